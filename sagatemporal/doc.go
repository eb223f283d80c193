// Package sagatemporal runs sagas of package saga on Temporal.
package sagatemporal
