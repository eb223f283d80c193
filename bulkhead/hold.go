package bulkhead

import (
	"sync"
	"time"
)

// holds are the slots whose holders may forget them: those that Begin took, and those
// of work that may outlast its function. They are few beside those of Do alone, for
// which reading the clock would cost more than all else.
type holds struct {
	mu     sync.Mutex
	oldest *hold
	newest *hold
}

// A hold is one of them.
type hold struct {
	older, newer *hold
	since        time.Duration
	dropped      bool
}

// hold notes that slots are held from now on.
func (b *Bulkhead) hold() *hold {
	h := &hold{since: b.now()}
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	h.older, b.holds.newest = b.holds.newest, h
	if h.older == nil {
		b.holds.oldest = h
	} else {
		h.older.newer = h
	}
	return h
}

// drop notes that the slots of h are held no longer. It reports false if that is known
// already.
func (b *Bulkhead) drop(h *hold) bool {
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	if h.dropped {
		return false
	}
	h.dropped = true
	if h.older == nil {
		b.holds.oldest = h.newer
	} else {
		h.older.newer = h.newer
	}
	if h.newer == nil {
		b.holds.newest = h.older
	} else {
		h.newer.older = h.older
	}
	return true
}

// longestHeld returns how long the oldest of the holds has been one.
func (b *Bulkhead) longestHeld() time.Duration {
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	if b.holds.oldest == nil {
		return 0
	}
	return b.now() - b.holds.oldest.since
}
