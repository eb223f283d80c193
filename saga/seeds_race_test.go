//go:build race

package saga_test

// seeds is how many random sagas a test runs; the race detector makes them slower.
const seeds = 1500
