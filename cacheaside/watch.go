package cacheaside

import "context"

// watch listens for invalidations by other processes. While it cannot hear them, nothing
// is kept in memory, unless Config.MemoryInOutage is set.
func (c *Cache[K, V]) watch() {
	defer func() { // in case a function of the application ends the goroutine
		c.memory.Remembers.Store(false)
		c.outdate()
	}()
	restored, told := false, false
	up := func() {
		c.outdate() // entries and loads may have missed a change
		c.sweep()
		if !c.closed.Load() {
			c.memory.Remembers.Store(true)
		}
		kind := EventWatchBegun
		if restored {
			kind = EventWatchRestored
		}
		restored, told = true, false
		c.tellAll(context.Background(), kind, nil)
	}
	c.tier.Watch(up, c.heard, func(err error) {
		if !c.cfg().MemoryInOutage && c.memory.Remembers.Swap(false) {
			c.outdate()
			c.sweep()
		}
		if !told && !c.closed.Load() {
			told = true
			c.tellAll(context.Background(), EventWatchLost, err)
		}
	})
}

// heard is called for each key that another process has invalidated.
func (c *Cache[K, V]) heard(written string) {
	if written == "" {
		c.outdate()
		c.sweep()
		return
	}
	c.memory.End(written)
}

// sweep frees the memory of outdated entries. It visits each of them, and messages that
// follow must not wait for that.
func (c *Cache[K, V]) sweep() {
	if c.sweeping.Swap(true) {
		return // the sweep that is about to begin covers these too
	}
	c.running.Go(func() {
		c.sweeping.Store(false)
		c.entries.InvalidateAll()
	})
}
