package cacheaside

// watch listens for invalidations by other processes. While it cannot hear them, nothing
// is kept in memory, unless Config.MemoryInOutage is set.
func (s *shared[K, V]) watch() {
	c := s.c
	defer c.remembers.Store(false) // in case a function of the application ends the goroutine
	restored, told := false, false
	for s.ctx.Err() == nil {
		err := s.store.Watch(s.ctx, func() {
			c.outdate() // entries and loads may have missed a change
			s.sweep()
			if !c.closed.Load() {
				c.remembers.Store(true)
			}
			s.doubtRecent()
			kind := EventWatchBegun
			if restored {
				kind = EventWatchRestored
			}
			restored, told = true, false
			c.tellAll(s.ctx, kind, nil)
		}, s.heard)
		switch {
		case c.cfg().MemoryInOutage:
			s.doubtRecent()
		case c.remembers.Swap(false):
			c.outdate()
			s.sweep()
			s.doubtRecent()
		}
		if s.ctx.Err() != nil {
			return
		}
		if !told {
			told = true
			c.tellAll(s.ctx, EventWatchLost, err)
		}
		sleep(s.ctx, s.pause())
	}
}

// heard is called for each key that another process has invalidated.
func (s *shared[K, V]) heard(written string) {
	if written == "" {
		s.c.outdate()
		s.sweep()
		return
	}
	s.buckets[s.bucketOf(written)].Add(1)
}

// sweep frees the memory of outdated entries. It visits each of them, and messages that
// follow must not wait for that.
func (s *shared[K, V]) sweep() {
	if s.sweeping.Swap(true) {
		return // the sweep that is about to begin covers these too
	}
	s.c.running.Go(func() {
		s.sweeping.Store(false)
		s.c.entries.InvalidateAll()
	})
}
