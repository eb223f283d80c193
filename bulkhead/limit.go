package bulkhead

import (
	"fmt"
	"time"
)

// A LimitChange reports that the limit of a bulkhead has changed. Latency and what
// follows are those of an adaptive limit, and zero after SetLimit.
type LimitChange struct {
	Name     string // of the bulkhead
	From, To int

	Latency time.Duration // geometric mean of the last calls that were looked at
	Base    time.Duration // the same on an idle server; 0 means not known yet
	Probe   bool          // lowered for a few latencies, to learn Base
}

// SetLimit changes the limit. When it grows, callers that wait get the new slots
// at once. When it shrinks, calls in flight finish, and no slot is given away
// until fewer than n are taken; who waits with a weight that has become too heavy
// is refused.
//
// An adaptive limit goes on from n. The error says what n may be: 1 or more, and
// more than what Reserve keeps; within Min and Max if it is adaptive.
func (b *Bulkhead) SetLimit(n int) error {
	least, most := 1, maxLimit
	if b.cfg.Adaptive != nil {
		least, most = b.adaptive.controller.cfg.Min, b.adaptive.controller.cfg.Max
	}
	least = max(least, b.kept[len(b.kept)-1]+1)
	if n < least || n > most {
		name := b.cfg.Name
		if name != "" {
			name += ": "
		}
		return fmt.Errorf("bulkhead: %sSetLimit(%d): must be %d to %d", name, n, least, most)
	}
	b.set(n)
	b.announce()
	return nil
}

func (b *Bulkhead) set(n int) {
	b.adaptive.mu.Lock()
	defer b.adaptive.mu.Unlock()
	if b.cfg.Adaptive != nil {
		b.adaptive.controller.restart(b.now(), n)
	}
	b.mu.Lock()
	defer b.unlock()
	b.resize(LimitChange{To: n})
}

// resize changes the limit. The mutex is held.
func (b *Bulkhead) resize(change LimitChange) {
	change.Name, change.From = b.cfg.Name, int(b.limit.Load())
	if change.From == change.To {
		return
	}
	b.resizes.Add(1)
	b.limit.Store(int64(change.To))
	b.slots.add(change.To - change.From)
	b.resizes.Add(1)
	if b.slots.word.Load()&waiting != 0 {
		b.refuseTooHeavy()
		b.grant(b.now(), 0)
	}
	if b.cfg.OnLimit != nil {
		b.changes = append(b.changes, change)
	}
}

// heavierWaits reports whether a call waits that limit would be too low for. The
// mutex is held.
func (b *Bulkhead) heavierWaits(limit int) bool {
	for level := range b.queue.lines {
		for w := b.queue.lines[level].oldest; w != nil; w = w.newer {
			if w.weight > 1 && w.weight > limit-b.kept[level] {
				return true
			}
		}
	}
	return false
}

// refuseTooHeavy takes out of the queue who would wait for ever.
func (b *Bulkhead) refuseTooHeavy() {
	for level := range b.queue.lines {
		for w := b.queue.lines[level].oldest; w != nil; w = w.newer {
			if b.tooHeavy(w.weight, level) {
				b.settle(w, false, TooHeavy)
			}
		}
	}
}

// announce calls OnLimit with the changes that it has not seen. If somebody is
// doing so already, they go on with them.
func (b *Bulkhead) announce() {
	if b.cfg.OnLimit == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.announcing {
		return
	}
	b.announcing = true
	defer func() { b.announcing = false }()
	for len(b.changes) > 0 {
		change := b.changes[0]
		b.changes = b.changes[1:]
		b.tell(change)
	}
}

// tell calls OnLimit without the mutex, and has that again even if it panics.
func (b *Bulkhead) tell(change LimitChange) {
	b.mu.Unlock()
	defer b.mu.Lock()
	b.cfg.OnLimit(change)
}
