package adaptive

// SetRand makes a draw its probabilities from random, in [0, 1).
func (a *Throttle) SetRand(random func() float64) { a.rand = random }
