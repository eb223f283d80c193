package bulkhead

import (
	"sync"
	"time"
)

// heldSlots lists the slots whose holders may forget them: those that Begin took and
// those of work that outlasts its function. They are few beside the slots of Do alone,
// which are not timed: reading the clock would cost more than the rest of such a call.
type heldSlots struct {
	mu     sync.Mutex
	oldest *heldSlot
	newest *heldSlot
}

type heldSlot struct {
	older, newer *heldSlot
	bulkhead     *Bulkhead
	slots        taken
	since        time.Duration
	released     bool
	answered     bool // but perhaps it goes on
}

// isAnswered notes whether the call of h was answered. It precedes End.
func (h *heldSlot) isAnswered(answered bool) {
	if h.answered = answered; answered {
		h.bulkhead.answered.Add(int64(h.slots.n))
	}
}

// End gives back the slots of work that is over.
func (h *heldSlot) End(error) {
	if h.answered {
		h.bulkhead.answered.Add(-int64(h.slots.n))
	}
	h.bulkhead.unlist(h)
	h.bulkhead.leave(h.slots)
}

// hold notes that the slots of a call are held from now on.
func (b *Bulkhead) hold(slots taken) *heldSlot {
	h := &heldSlot{bulkhead: b, slots: slots, since: b.now()}
	b.held.mu.Lock()
	defer b.held.mu.Unlock()
	h.older, b.held.newest = b.held.newest, h
	if h.older == nil {
		b.held.oldest = h
	} else {
		h.older.newer = h
	}
	return h
}

// unlist notes that the slots of h are held no longer. It returns false if it was
// called for h before.
func (b *Bulkhead) unlist(h *heldSlot) bool {
	b.held.mu.Lock()
	defer b.held.mu.Unlock()
	if h.released {
		return false
	}
	h.released = true
	if h.older == nil {
		b.held.oldest = h.newer
	} else {
		h.older.newer = h.newer
	}
	if h.newer == nil {
		b.held.newest = h.older
	} else {
		h.newer.older = h.older
	}
	h.older, h.newer = nil, nil // who still has h keeps none of those after it
	return true
}

// longestHeld returns how long the oldest held slot has been held.
func (b *Bulkhead) longestHeld() time.Duration {
	b.held.mu.Lock()
	defer b.held.mu.Unlock()
	if b.held.oldest == nil {
		return 0
	}
	return b.now() - b.held.oldest.since
}
