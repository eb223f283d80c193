package throttle

// SetRand makes a draw its probabilities from random, in [0, 1).
func (a *Adaptive) SetRand(random func() float64) { a.rand = random }
