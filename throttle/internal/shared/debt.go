package shared

import (
	"sync"
	"time"
)

// A debt is what this instance has admitted alone, less what Redis has taken for nobody
// since: Redis is told of it with the next call for the key. Without a debt, such tokens are
// lost: given back after the bucket has become full, they would be more than its Burst.
type debt struct {
	tokens int
	since  time.Time // when the first of them was admitted
}

// debts are those of this instance. Most often there are none.
type debts struct {
	mu    sync.Mutex
	byKey map[string]debt // by the keys in Redis
}

// maxDebts bounds the keys with a debt. With more, some are forgotten.
const maxDebts = 100_000

// owe adds to the debt of a key.
func (d *debts) owe(key string, more debt) {
	if more.tokens == 0 {
		return
	}
	if more.since.IsZero() {
		more.since = time.Now()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	sum, ok := d.byKey[key]
	if !ok || more.since.Before(sum.since) {
		sum.since = more.since
	}
	sum.tokens += more.tokens
	if d.byKey == nil {
		d.byKey = make(map[string]debt)
	}
	for other := range d.byKey {
		if ok || len(d.byKey) < maxDebts {
			break
		}
		delete(d.byKey, other)
	}
	d.byKey[key] = sum
}

// pay takes tokens from the debt of a key, if there is one.
func (d *debts) pay(key string, tokens int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if sum := d.byKey[key]; sum.tokens > tokens {
		sum.tokens -= tokens
		d.byKey[key] = sum
	} else {
		delete(d.byKey, key)
	}
}

// collect returns the debt of a key and forgets it.
func (d *debts) collect(key string) debt {
	d.mu.Lock()
	defer d.mu.Unlock()
	sum := d.byKey[key]
	delete(d.byKey, key)
	return sum
}
