//go:build !race

package sim

const repeated = 20 // seeds, in each run of the tests
