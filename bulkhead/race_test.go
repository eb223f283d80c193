//go:build race

package bulkhead_test

// raceDetector says that the race detector makes simulations slow. It finds nothing in
// them: each is one goroutine.
const raceDetector = true
