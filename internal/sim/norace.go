//go:build !race

package sim

const (
	repeated = 20 // seeds that are run twice, in each run of the tests
	part     = 1  // of the seeds
)
