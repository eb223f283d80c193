//go:build race

package sim

const (
	repeated = 0  // since the race detector has goroutines run in an order by chance
	part     = 10 // a tenth of the seeds: what the detector looks for is the same in all of them
)
