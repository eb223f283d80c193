package bulkhead

import (
	"context"
	"fmt"

	"github.com/go-resilience/resilience/internal/keyed"
)

// SetLimit changes the limit. When it grows, waiting calls get the new slots
// immediately. When it shrinks, calls in flight finish, and no slot is given away until
// fewer than n are taken; a waiting call that has become too costly is refused.
//
// SetLimit is the short form of a [Bulkhead.Update] of Limit. An adaptive limit goes on
// from n, which its Config does not show. The error says what n may be: 1 or more, or
// within Min and Max of an adaptive limit.
func (b *Bulkhead) SetLimit(n int) error {
	if err := b.setLimit(n); err != nil {
		return err
	}
	b.announce(context.Background())
	return nil
}

func (b *Bulkhead) setLimit(n int) error {
	var err error
	set := func(given *Config) {
		if err = b.rules.Load().allows(n, b.key); err == nil && given.Adaptive == nil {
			given.Limit = n
		}
	}
	return b.setting.Update(set, func(_, _ *Config) error { return err }, func(cfg *Config) {
		r := b.rules.Load()
		a := r.adaptive
		if a == nil {
			b.adopt(cfg)
			return
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.controller.restart(b.unix(), n)
		b.mu.Lock()
		defer b.unlock()
		b.resize(r, Event{To: n})
	})
}

// allows returns an error unless n may be the limit of the bulkhead of key.
func (r *rules) allows(n int, key string) error {
	least, most := 1, maxLimit
	if r.Adaptive != nil {
		least, most = r.Adaptive.Min, r.Adaptive.Max
	}
	if n >= least && n <= most {
		return nil
	}
	label := keyed.Label(r.Name, key)
	if label != "" {
		label += ": "
	}
	return fmt.Errorf("bulkhead: %sSetLimit(%d): must be %d to %d", label, n, least, most)
}

// resize changes the limit to that of e. The mutex is held.
func (b *Bulkhead) resize(r *rules, e Event) {
	e.Kind, e.Name, e.Key, e.From = EventLimitChanged, r.Name, b.key, int(b.queue.limit.Load())
	if e.From == e.To {
		return
	}
	b.resizes.Add(1)
	b.queue.limit.Store(int64(e.To))
	b.queue.slots.add(e.To - e.From)
	b.resizes.Add(1)
	b.serve(r)
	if b.observers.Any() {
		b.changes.Add(e)
	}
}

// serve hands free slots to waiting calls by new rules or a new limit. The mutex is held.
func (b *Bulkhead) serve(r *rules) {
	if b.queue.slots.word.Load()&waiting != 0 {
		b.refuseTooCostly(r)
		b.queue.by(r, b.now()).grant(0)
	}
}

// tooCostlyWaits reports whether a call waits that costs more than its level may use of
// limit. The mutex is held.
func (b *Bulkhead) tooCostlyWaits(r *rules, limit int) bool {
	for level := range b.queue.levels {
		for w := range b.queue.levels[level].all {
			if w.cost > r.most(limit, level) {
				return true
			}
		}
	}
	return false
}

// refuseTooCostly takes the calls out of the queue that would wait forever. The mutex is
// held.
func (b *Bulkhead) refuseTooCostly(r *rules) {
	limit := int(b.queue.limit.Load())
	for level := range b.queue.levels {
		for w := range b.queue.levels[level].all {
			if w.cost > r.most(limit, level) {
				b.queue.settle(w, false, TooCostly)
			}
		}
	}
}
