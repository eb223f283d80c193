//go:build race

package bulkhead_test

const raceDetector = true
