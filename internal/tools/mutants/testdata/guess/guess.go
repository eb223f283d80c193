// Package guess has rules that its tests check, and rules that they do not check.
package guess

import "sync"

// A Range is a range of allowed guesses.
type Range struct {
	mu       sync.Mutex
	Low      int
	High     int
	asked    int
	forgiven bool
}

// Tell returns -1 if n is too low, 1 if n is too high, and 0 otherwise.
func (r *Range) Tell(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked++
	if n < r.Low {
		return -1
	}
	if n > r.High && !r.forgiven {
		return 1
	}
	return 0
}

// Asked returns the number of guesses.
func (r *Range) Asked() (n int) {
	defer func() { n = r.asked }()
	r.mu.Lock()
	defer r.mu.Unlock()
	return 0
}

// Forgive makes Tell accept every number above the range.
func (r *Range) Forgive() {
	r.forgiven = true
}
