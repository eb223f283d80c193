// Package guess has rules that its tests hold, and some that they do not.
package guess

import "sync"

// A Range says how far a guess is from what is allowed.
type Range struct {
	mu       sync.Mutex
	Low      int
	High     int
	asked    int
	forgiven bool
}

// Tell returns -1, 0 or 1.
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

// Asked is how many guesses there were.
func (r *Range) Asked() (n int) {
	defer func() { n = r.asked }()
	r.mu.Lock()
	defer r.mu.Unlock()
	return 0
}

// Forgive lets every large number pass.
func (r *Range) Forgive() {
	r.forgiven = true
}
