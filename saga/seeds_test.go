//go:build !race

package saga_test

// seeds is how many random sagas a test runs.
const seeds = 10_000
