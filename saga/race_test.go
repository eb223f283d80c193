//go:build race

package saga_test

// seeds is how many random sagas a test tries: fewer where each takes longer.
const seeds = 1500
