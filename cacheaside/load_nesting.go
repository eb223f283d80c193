package cacheaside

import (
	"context"
	"fmt"
	"sync"

	"github.com/go-resilience/resilience/internal/ended"
)

// A load may call Get with its ctx, on its own Cache or another. While it waits for the
// answer, it gives its slot to other loads, so that loads never wait for slots that they
// hold themselves. A Get that would wait for its own load, directly or through other
// loads, fails with ErrRecursive.

// mostNested bounds the depth of nested loads. It stops a recursion that never reaches
// the same key twice.
const mostNested = 1000

// A nesting is the state of a load that has called Get. Its methods do nothing on nil.
type nesting struct {
	load    *loadCtx
	waiting int              // calls of Get that wait
	given   bool             // the slot has been given to other loads
	ended   bool             // the load has returned
	waits   map[*loadCtx]int // loads that this one waits for
}

// nestings guards the fields of every nesting, since a circle of loads may lead through
// several caches.
var nestings sync.Mutex

// plain stands for the nesting of a load that runs and has not called Get, over for that
// of a load that has returned. Before it runs, a load has no nesting.
var (
	plain = new(nesting)
	over  = &nesting{ended: true}
)

type loadKey struct{}

// loadOf returns the load that ctx belongs to, or nil.
func loadOf(ctx context.Context) *loadCtx {
	l, _ := ctx.Value(loadKey{}).(*loadCtx)
	return l
}

// nestingOf returns the nesting of the load that ctx belongs to, or nil if no load runs.
func nestingOf(ctx context.Context) *nesting {
	l := loadOf(ctx)
	if l == nil {
		return nil
	}
	if l.nest.Load() == plain {
		l.nest.CompareAndSwap(plain, &nesting{load: l})
	}
	if n := l.nest.Load(); n != over {
		return n
	}
	return nil
}

// takeSlot waits for a slot until c ends. It reports whether it took one.
func (c *loadCtx) takeSlot(slots *slots) bool {
	if !slots.tryTake() && !slots.take(c.Done()) { // Done creates a context, so it is not called first
		return false
	}
	c.slots = slots
	c.nest.Store(plain)
	return true
}

// returnSlot returns the slot when the load has returned.
func (c *loadCtx) returnSlot() {
	if c.nest.CompareAndSwap(plain, over) {
		c.slots.put()
		return
	}
	nestings.Lock()
	defer nestings.Unlock()
	n := c.nest.Load()
	n.ended = true
	if !n.given {
		c.slots.put()
	}
}

// pause gives the slot of the load to others while one of its Gets waits.
func (n *nesting) pause() {
	if n == nil {
		return
	}
	nestings.Lock()
	defer nestings.Unlock()
	n.waiting++
	if !n.given && !n.ended {
		n.given = true
		n.load.slots.put()
	}
}

// resume takes a slot again when the last of the waiting Gets has its answer. It returns
// an error if ctx, of that Get, ends first.
func (n *nesting) resume(ctx context.Context) error {
	if n == nil {
		return nil
	}
	nestings.Lock()
	n.waiting--
	due := n.waiting == 0 && n.given && !n.ended
	nestings.Unlock()
	if !due {
		return nil
	}
	if !n.load.slots.tryTake() && !n.load.slots.take(ctx.Done()) {
		return ended.Error(ctx)
	}
	nestings.Lock()
	defer nestings.Unlock()
	if n.waiting == 0 && n.given && !n.ended {
		n.given = false
	} else {
		n.load.slots.put()
	}
	return nil
}

// waitFor records that the load waits for another. It returns false if the other waits
// for it, directly or indirectly: neither would ever end.
func (n *nesting) waitFor(other *loadCtx) bool {
	if n == nil {
		return true
	}
	nestings.Lock()
	defer nestings.Unlock()
	if !n.ended && other.reaches(n.load, make(map[*loadCtx]bool)) {
		return false
	}
	if n.waits == nil {
		n.waits = make(map[*loadCtx]int)
	}
	n.waits[other]++
	return true
}

// waitedFor undoes waitFor.
func (n *nesting) waitedFor(other *loadCtx) {
	if n == nil {
		return
	}
	nestings.Lock()
	defer nestings.Unlock()
	if n.waits[other]--; n.waits[other] == 0 {
		delete(n.waits, other)
	}
}

// reaches reports whether c waits for target, directly or through other loads. nestings
// is locked.
func (c *loadCtx) reaches(target *loadCtx, seen map[*loadCtx]bool) bool {
	if c == target {
		return true
	}
	if seen[c] {
		return false
	}
	seen[c] = true
	if part := c.partOf.Load(); part != nil && part.reaches(target, seen) {
		return true
	}
	n := c.nest.Load()
	if n == nil || n.ended {
		return false
	}
	for other := range n.waits {
		if other.reaches(target, seen) {
			return true
		}
	}
	return false
}

// mayNest returns an error if the load of l must not wait for key, as far as this is
// known before there is a flight to wait for. Without memory, a flight waits for the
// lease of its own process, and nothing else would end that wait.
func (c *Cache[K, V]) mayNest(l *loadCtx, key K) error {
	if l == nil {
		return nil
	}
	if l.depth >= mostNested {
		return c.recursive(key)
	}
	if c.entries == nil {
		for ; l != nil; l = loadOf(l.caller) {
			if f, ok := l.job.(*flight[K, V]); ok && f.c == c && f.key == key && l.Err() == nil {
				return c.recursive(key)
			}
		}
	}
	return nil
}

func (c *Cache[K, V]) recursive(key K) error {
	return fmt.Errorf("%s%v: %w", prefix(c.cfg().Name), key, ErrRecursive)
}
