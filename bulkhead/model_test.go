package bulkhead_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

// A model is a bulkhead that does one thing at a time and looks at everything.
type model struct {
	limit   int
	queue   int
	newest  bool // first
	kept    []int
	held    map[*modeled]bool
	waiting []*modeled // by age
}

type modeled struct {
	level, weight, passed int
	refused               bool
	reason                bulkhead.Reason
}

func (m *model) inFlight() int {
	n := 0
	for c := range m.held {
		n += c.weight
	}
	return n
}

// inOrder returns who waits, those first who are served first.
func (m *model) inOrder() []*modeled {
	order := slices.Clone(m.waiting)
	if m.newest {
		slices.Reverse(order)
	}
	slices.SortStableFunc(order, func(a, b *modeled) int { return a.level - b.level })
	return order
}

func (m *model) fits(c *modeled) bool {
	return m.limit-m.inFlight()-c.weight >= m.kept[c.level]
}

// firsts returns the first of each level that waits before c.
func (m *model) firsts(c *modeled) []*modeled {
	var firsts []*modeled
	seen := map[int]bool{}
	for _, w := range m.inOrder() {
		if w == c || w.level > c.level {
			break
		}
		if newcomer := !slices.Contains(m.waiting, c); newcomer && m.newest && w.level == c.level {
			break
		}
		if !seen[w.level] {
			firsts = append(firsts, w)
			seen[w.level] = true
		}
	}
	return firsts
}

func (m *model) mayPass(c *modeled) bool {
	for _, f := range m.firsts(c) {
		if f.passed+c.weight > m.limit {
			return false
		}
	}
	return true
}

func (m *model) admit(c *modeled) {
	for _, f := range m.firsts(c) {
		f.passed += c.weight
	}
	m.leave(c)
	m.held[c] = true
}

func (m *model) leave(c *modeled) {
	m.waiting = slices.DeleteFunc(m.waiting, func(w *modeled) bool { return w == c })
}

func (m *model) refuse(c *modeled, reason bulkhead.Reason) {
	m.leave(c)
	c.refused, c.reason = true, reason
}

func (m *model) tooHeavy(c *modeled) bool { return c.weight > 1 && c.weight > m.limit-m.kept[c.level] }

func (m *model) grant() {
	for again := true; again; {
		again = false
		for _, w := range m.inOrder() {
			if !m.fits(w) {
				continue
			}
			if !m.mayPass(w) {
				return
			}
			m.admit(w)
			again = true
			break
		}
	}
}

func (m *model) acquire(c *modeled) {
	if m.fits(c) && m.mayPass(c) {
		m.admit(c)
		return
	}
	if m.tooHeavy(c) {
		m.refuse(c, bulkhead.TooHeavy)
		return
	}
	if m.queue == 0 {
		m.refuse(c, bulkhead.NoSlot)
		return
	}
	if len(m.waiting) == m.queue {
		var victim *modeled
		for _, w := range m.waiting {
			if w.level > c.level && (victim == nil || w.level >= victim.level) {
				victim = w
			}
		}
		if victim == nil {
			m.refuse(c, bulkhead.QueueFull)
			return
		}
		m.refuse(victim, bulkhead.Displaced)
	}
	m.waiting = append(m.waiting, c)
	m.grant()
}

func (m *model) release(c *modeled) {
	delete(m.held, c)
	m.grant()
}

func (m *model) cancel(c *modeled) {
	m.refuse(c, bulkhead.ContextEnded)
	m.grant()
}

func (m *model) setLimit(n int) {
	m.limit = n
	for _, w := range slices.Clone(m.waiting) {
		if m.tooHeavy(w) {
			m.refuse(w, bulkhead.TooHeavy)
		}
	}
	m.grant()
}

// A pair is one call to the real bulkhead and its like in the model.
type pair struct {
	*modeled
	cancel  context.CancelFunc
	release func()
	err     error
}

// FuzzBulkheadIsTheModel does what the bytes say to a bulkhead and to the model,
// and compares the two after each step.
func FuzzBulkheadIsTheModel(f *testing.F) {
	f.Add([]byte{2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		synctest.Test(t, func(t *testing.T) { playModel(t, data[:min(len(data), 250)]) })
	})
}

func playModel(t *testing.T, data []byte) {
	next := func(n int) int {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return int(b) % n
	}
	reserve := []int{next(3), next(3), 0}
	kept := []int{0, reserve[0], reserve[0] + reserve[1]}
	least := kept[2] + 1
	m := &model{limit: least + next(8), queue: next(6), newest: next(2) == 1, kept: kept, held: map[*modeled]bool{}}
	order := bulkhead.FIFO
	if m.newest {
		order = bulkhead.LIFO
	}
	b := bulkhead.New(bulkhead.Config{
		Limit: m.limit, Queue: m.queue, Order: order, Levels: 3, Priority: levelOf, Reserve: reserve,
	})
	var pairs []*pair
	for len(data) > 0 {
		switch next(8) {
		case 0, 1, 2, 3:
			p := &pair{modeled: &modeled{level: next(3), weight: 1}}
			if next(3) == 0 {
				p.weight = 1 + next(6)
			}
			ctx, cancel := context.WithCancel(atLevel(context.Background(), p.level))
			p.cancel = cancel
			pairs = append(pairs, p)
			go func() { p.release, p.err = b.Acquire(bulkhead.WithWeight(ctx, p.weight)) }()
			m.acquire(p.modeled)
		case 4, 5:
			if held := matching(pairs, func(p *pair) bool { return m.held[p.modeled] }); len(held) > 0 {
				p := held[next(len(held))]
				p.release()
				p.release()
				m.release(p.modeled)
			}
		case 6:
			waiting := matching(pairs, func(p *pair) bool { return slices.Contains(m.waiting, p.modeled) })
			if len(waiting) > 0 {
				p := waiting[next(len(waiting))]
				p.cancel()
				m.cancel(p.modeled)
			}
		case 7:
			n := least + next(10)
			require.NoError(t, b.SetLimit(n))
			m.setLimit(n)
		}
		synctest.Wait()
		compare(t, b, m, pairs)
	}
	for range pairs {
		for _, p := range pairs {
			if m.held[p.modeled] {
				p.release()
				m.release(p.modeled)
				synctest.Wait()
			}
			p.cancel()
			if slices.Contains(m.waiting, p.modeled) {
				m.cancel(p.modeled)
			}
			synctest.Wait()
		}
	}
	compare(t, b, m, pairs)
	requireIdle(t, b)
}

func matching(pairs []*pair, ok func(*pair) bool) []*pair {
	return slices.DeleteFunc(slices.Clone(pairs), func(p *pair) bool { return !ok(p) })
}

func compare(t *testing.T, b *bulkhead.Bulkhead, m *model, pairs []*pair) {
	t.Helper()
	for i, p := range pairs {
		switch {
		case p.refused:
			var full *bulkhead.FullError
			require.True(t, errors.As(p.err, &full), "call %d is refused: %v", i, p.reason)
			require.Equal(t, p.reason, full.Reason, "call %d", i)
		case slices.Contains(m.waiting, p.modeled):
			require.True(t, p.err == nil && p.release == nil, "call %d waits", i)
		default:
			require.NotNil(t, p.release, "call %d has its slots", i)
		}
	}
	s := b.Stats()
	require.Equal(t, m.limit, s.Limit)
	require.Equal(t, m.inFlight(), s.InFlight)
	queued := make([]int, 3)
	for _, w := range m.waiting {
		queued[w.level]++
	}
	require.Equal(t, queued, s.Queued)
}

func TestBulkheadIsTheModelAtRandom(t *testing.T) {
	rng := newRand(6)
	for range 400 {
		data := make([]byte, 200)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		synctest.Test(t, func(t *testing.T) { playModel(t, data) })
		if t.Failed() {
			t.Logf("%#v", data)
			return
		}
	}
}
