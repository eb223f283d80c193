// Package integration tests the patterns against real servers: Redis,
// PostgreSQL, SQLite.
package integration
