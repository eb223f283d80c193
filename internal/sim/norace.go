//go:build !race

package sim

const (
	repeated = 20 // number of seeds that each run of the tests runs twice
	part     = 1  // the fixed seeds are divided by part
)
