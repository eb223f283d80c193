//go:build race

package sim

// The race detector has goroutines run in an order by chance.
const repeated = 0
