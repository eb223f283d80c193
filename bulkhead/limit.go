package bulkhead

import "fmt"

// A LimitChange reports that the limit of a bulkhead has changed.
type LimitChange struct {
	Name     string // of the bulkhead
	From, To int
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
	for _, kept := range b.kept {
		least = max(least, kept+1)
	}
	if n < least || n > most {
		return fmt.Errorf("bulkhead: %sSetLimit(%d): must be %d to %d", b.prefix(), n, least, most)
	}
	b.mu.Lock()
	b.resize(n)
	b.mu.Unlock()
	b.announce()
	return nil
}

func (b *Bulkhead) prefix() string {
	if b.cfg.Name == "" {
		return ""
	}
	return b.cfg.Name + ": "
}

// resize makes n the limit. The mutex is held.
func (b *Bulkhead) resize(n int) {
	old := int(b.limit.Load())
	if n == old {
		return
	}
	b.limit.Store(int64(n))
	b.slots.add(n - old)
	if b.slots.word.Load()&waiting != 0 {
		now := b.now()
		for level := range b.queue.lines {
			for w := b.queue.lines[level].oldest; w != nil; w = w.newer {
				if b.tooHeavy(w.weight, level) {
					b.settle(w, now, false, TooHeavy)
				}
			}
		}
		b.grant(now)
	}
	if b.cfg.OnLimit != nil {
		b.changes = append(b.changes, LimitChange{Name: b.cfg.Name, From: old, To: n})
	}
}

// announce calls OnLimit with the changes that it has not seen, unless somebody
// is doing so: then they go on with them.
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

// tell calls OnLimit without the mutex, and takes that again even if it panics.
func (b *Bulkhead) tell(change LimitChange) {
	b.mu.Unlock()
	defer b.mu.Lock()
	b.cfg.OnLimit(change)
}
