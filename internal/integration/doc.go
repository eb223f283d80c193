// Package integration tests the packages of this module against real servers, such as Redis, PostgreSQL and MariaDB.
package integration
