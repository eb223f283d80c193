package throttle

import (
	"fmt"
	"sync"
)

// alone are the limits of this instance in an outage.
type alone struct {
	base *Group[string] // by the limit of the configuration

	mu     sync.Mutex
	others map[other]*Group[string] // by other limits
}

// An other is a limit other than that of the configuration. A call that began before an
// Update asks for the part of before.
type other struct {
	cfg   *SharedConfig
	limit string
}

// maxOthers bounds the others: a program has few plans. If it has more, the keys of the
// rest are under base.
const maxOthers = 100

// group returns the limit of terms.
func (a *alone) group(t *sharedTerms) *Group[string] {
	if t.base {
		return a.base
	}
	id := other{t.cfg, fmt.Sprint(t.limit)}
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.others[id]
	if g == nil && len(a.others) < maxOthers {
		if cfg := t.cfg.local(t.limit); cfg.Validate() == nil {
			g = NewGroup(cfg)
			if a.others == nil {
				a.others = make(map[other]*Group[string])
			}
			a.others[id] = g
		}
	}
	if g == nil {
		return a.base
	}
	return g
}

// adopt makes cfg the configuration of the limits.
func (a *alone) adopt(cfg *SharedConfig) error {
	if err := a.base.Update(func(c *GroupConfig[string]) { *c = cfg.localOf() }); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.others) // what they have admitted would be under other shares
	return nil
}

// whole returns a Decision of an instance's part of the limit as one about the limit.
func (t *sharedTerms) whole(part Decision) Decision {
	for _, q := range t.limit.Quotas {
		if q.window() == part.Quota.window() { // never that of the zero Quota
			part.Quota, part.Limit = q, q.N
			return part
		}
	}
	part.Limit, part.Window = t.limit.Burst, t.window
	return part
}
