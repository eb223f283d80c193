package throttle

// SetRand makes a draw its probabilities from random, in [0, 1).
func (a *Adaptive) SetRand(random func() float64) { a.rand = random }

// SlotOf returns the hash slot of a key in Redis.
func SlotOf(key string) uint16 { return slotOf(key) }

// OutageSlots returns of how many slots an outage is remembered.
func (s *Shared) OutageSlots() int {
	s.outages.mu.Lock()
	defer s.outages.mu.Unlock()
	return len(s.outages.slots)
}

// OwnLimits returns how many keys have a limit of their own at the moment.
func (g *Group[K]) OwnLimits() (n int) {
	for i := range g.shards {
		g.shards[i].mu.Lock()
		n += len(g.shards[i].own)
		g.shards[i].mu.Unlock()
	}
	return n
}
