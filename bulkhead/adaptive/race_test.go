//go:build race

package adaptive_test

const raceDetector = true
