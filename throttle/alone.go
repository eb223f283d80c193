package throttle

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// alone are the limits of this instance in an outage.
type alone struct {
	base *Group[string] // by the limit of the configuration

	mu     sync.Mutex
	others map[string]*Group[string] // by other limits
	owing  atomic.Int64              // len(debts), to be read without mu
	debts  map[string]debt           // by the keys in Redis
}

// A debt is what this instance has admitted alone, less what Redis has taken for nobody
// since: Redis is told of it with the next call for the key. Without a debt, such tokens are
// lost: given back after the bucket has become full, they would be more than its Burst.
type debt struct {
	tokens int
	since  time.Time // when the first of them was admitted
}

// maxDebts bounds the keys with a debt. With more, some are forgotten.
const maxDebts = DefaultMaxKeys

// owe adds to the debt of a key.
func (a *alone) owe(key string, more debt) {
	if more.tokens == 0 {
		return
	}
	if more.since.IsZero() {
		more.since = time.Now()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	d, ok := a.debts[key]
	if !ok || more.since.Before(d.since) {
		d.since = more.since
	}
	d.tokens += more.tokens
	if a.debts == nil {
		a.debts = make(map[string]debt)
	}
	for other := range a.debts {
		if ok || len(a.debts) < maxDebts {
			break
		}
		delete(a.debts, other)
	}
	a.debts[key] = d
	a.owing.Store(int64(len(a.debts)))
}

// pay takes tokens from the debt of a key, if there is one.
func (a *alone) pay(key string, tokens int) {
	if a.owing.Load() == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if d := a.debts[key]; d.tokens > tokens {
		d.tokens -= tokens
		a.debts[key] = d
	} else {
		delete(a.debts, key)
	}
	a.owing.Store(int64(len(a.debts)))
}

// settle returns the debt of a key and forgets it.
func (a *alone) settle(key string) debt {
	if a.owing.Load() == 0 {
		return debt{}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	d := a.debts[key]
	delete(a.debts, key)
	a.owing.Store(int64(len(a.debts)))
	return d
}

// maxOthers bounds the others: a program has few plans. If it has more, the keys of the
// rest are under base.
const maxOthers = 100

// group returns the limit of terms.
func (a *alone) group(t *sharedTerms) *Group[string] {
	if t.base {
		return a.base
	}
	id := fmt.Sprint(t.limit)
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.others[id]
	if g == nil && len(a.others) < maxOthers {
		if cfg := t.cfg.local(t.limit); cfg.Validate() == nil {
			g = NewGroup(cfg)
			if a.others == nil {
				a.others = make(map[string]*Group[string])
			}
			a.others[id] = g
		}
	}
	if g == nil {
		return a.base
	}
	return g
}

// follow makes cfg the configuration of the limits.
func (a *alone) follow(cfg *SharedConfig) error {
	if err := a.base.follow(cfg.localOf()); err != nil {
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
