//go:build race

package sim

const (
	repeated = 0  // no seed is run twice, because the race detector makes goroutines run in a random order
	part     = 10 // a tenth of the fixed seeds is enough to find data races
)
