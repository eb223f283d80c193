package bulkhead_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

var orders = []bulkhead.Order{bulkhead.FIFO, bulkhead.LIFO, bulkhead.CoDel}

// A model is a bulkhead that does one thing at a time and looks at everything.
type model struct {
	limit   int
	queue   int
	order   bulkhead.Order
	stood   time.Time  // since when a call waits
	above   []float64  // by level: the share of the limit that is kept for the levels above
	passed  []int      // by level: slots taken before the first that waits
	claim   []*modeled // by level: the costly call that stays first where the newest is
	held    map[*modeled]bool
	waiting []*modeled // by age
}

type modeled struct {
	level, cost int
	since       time.Time
	refused     bool
	reason      bulkhead.Reason
}

func (m *model) inFlight() int {
	n := 0
	for c := range m.held {
		n += c.cost
	}
	return n
}

func (m *model) kept(level int) int {
	return min(int(float64(m.limit)*m.above[level]+1e-9), m.limit-1)
}

func (m *model) newestFirst() bool {
	return m.order == bulkhead.LIFO ||
		m.order == bulkhead.CoDel && len(m.waiting) > 0 && time.Since(m.stood) >= 100*time.Millisecond
}

// inOrder returns the calls that wait, in the order in which they are served.
func (m *model) inOrder() []*modeled {
	order := slices.Clone(m.waiting)
	if m.newestFirst() {
		slices.Reverse(order)
		slices.SortStableFunc(order, func(a, b *modeled) int { return m.unclaimed(a) - m.unclaimed(b) })
	}
	slices.SortStableFunc(order, func(a, b *modeled) int { return a.level - b.level })
	return order
}

func (m *model) unclaimed(c *modeled) int {
	if m.claim[c.level] == c {
		return 0
	}
	return 1
}

func (m *model) fits(c *modeled) bool {
	return m.limit-m.inFlight()-c.cost >= m.kept(c.level)
}

// before returns the calls that wait and are served before c.
func (m *model) before(c *modeled) []*modeled {
	order := m.inOrder()
	if i := slices.Index(order, c); i >= 0 {
		return order[:i]
	}
	return slices.DeleteFunc(order, func(w *modeled) bool {
		return w.level > c.level || w.level == c.level && m.newestFirst() && m.claim[w.level] != w
	})
}

func (m *model) mayPass(c *modeled) bool {
	return !slices.ContainsFunc(m.before(c), func(w *modeled) bool {
		return m.passed[w.level]+c.cost > m.limit
	})
}

func (m *model) admit(c *modeled) {
	levels := map[int]bool{}
	for _, w := range m.before(c) {
		levels[w.level] = true
	}
	for level := range levels {
		m.passed[level] += c.cost
	}
	if slices.Contains(m.waiting, c) && !levels[c.level] { // the first of its level
		m.passed[c.level] = 0
	}
	m.leave(c)
	m.held[c] = true
}

func (m *model) leave(c *modeled) {
	m.waiting = slices.DeleteFunc(m.waiting, func(w *modeled) bool { return w == c })
	if m.claim[c.level] == c {
		m.claim[c.level] = nil
	}
	if !slices.ContainsFunc(m.waiting, func(w *modeled) bool { return w.level == c.level }) {
		m.passed[c.level] = 0
	}
}

func (m *model) refuse(c *modeled, reason bulkhead.Reason) {
	m.leave(c)
	c.refused, c.reason = true, reason
}

func (m *model) tooCostly(c *modeled) bool { return c.cost > m.limit-m.kept(c.level) }

func (m *model) grant() {
	granted := m.grantLevels()
	if m.order != bulkhead.CoDel || !m.newestFirst() || !granted {
		return
	}
	refused := false
	for _, w := range slices.Clone(m.waiting) {
		if time.Since(w.since) > 5*time.Millisecond {
			m.refuse(w, bulkhead.StandingQueue)
			refused = true
		}
	}
	if refused {
		m.grantLevels()
	}
}

func (m *model) grantLevels() (granted bool) {
	for level := range m.above {
		of := m.ofLevel(level)
		room := m.limit - m.inFlight() - m.kept(level)
		if len(of) > 0 && m.newestFirst() && m.claim[level] == nil && room > 0 && room < of[0].cost {
			m.claim[level] = of[0]
		}
		for m.grantOne(level) {
			granted = true
		}
	}
	return granted
}

func (m *model) ofLevel(level int) []*modeled {
	return slices.DeleteFunc(m.inOrder(), func(w *modeled) bool { return w.level != level })
}

// grantOne reports whether a call of level has got its slots.
func (m *model) grantOne(level int) bool {
	for _, w := range m.ofLevel(level) {
		if m.fits(w) && m.mayPass(w) {
			m.admit(w)
			return true
		}
	}
	return false
}

// try reports whether c, a new call, gets its slots at once.
func (m *model) try(c *modeled) bool {
	if c.cost > 0 && (!m.fits(c) || !m.mayPass(c)) {
		return false
	}
	m.admit(c)
	return true
}

func (m *model) acquire(c *modeled) {
	if m.try(c) {
		return
	}
	if m.tooCostly(c) {
		m.refuse(c, bulkhead.TooCostly)
		return
	}
	if m.queue == 0 {
		m.refuse(c, bulkhead.NoSlot)
		return
	}
	c.since = time.Now()
	if len(m.waiting) == 0 {
		m.stood = c.since
	}
	if len(m.waiting) == m.queue {
		order := m.inOrder()
		victim := order[len(order)-1]
		if victim.level < c.level || victim.level == c.level && (!m.newestFirst() || m.claim[c.level] == victim) {
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
	if c.cost > 0 { // else nothing has become free
		m.grant()
	}
}

func (m *model) cancel(c *modeled) {
	m.refuse(c, bulkhead.ContextEnded)
	m.grant()
}

func (m *model) setLimit(n int) {
	if n == m.limit {
		return
	}
	m.limit = n
	for _, w := range slices.Clone(m.waiting) {
		if m.tooCostly(w) {
			m.refuse(w, bulkhead.TooCostly)
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

// FuzzBulkheadIsTheModel reads operations from the bytes, does each to a bulkhead and to
// the model, and compares the two after each step.
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
	kept := []int{next(3), next(3)} // slots of the first limit
	least := kept[0] + kept[1] + 1
	m := &model{
		limit: least + next(8), queue: next(6), order: orders[next(len(orders))],
		passed: make([]int, 3), claim: make([]*modeled, 3), held: map[*modeled]bool{},
	}
	reserve := []float64{float64(kept[0]) / float64(m.limit), float64(kept[1]) / float64(m.limit)}
	m.above = []float64{0, reserve[0], reserve[0] + reserve[1]}
	cfg := bulkhead.Config{
		Limit: m.limit, Queue: m.queue, Order: m.order, Levels: 3, Priority: levelOf, Reserve: reserve, Cost: costOf,
	}
	if m.queue > 0 {
		cfg.MaxWait = -1
	}
	b := bulkhead.New(cfg)
	var pairs []*pair
	for len(data) > 0 {
		switch next(8) {
		case 0, 1, 2:
			p := &pair{modeled: &modeled{level: next(3), cost: 1}}
			if next(3) == 0 {
				p.cost = next(7)
			}
			ctx, cancel := context.WithCancel(atLevel(t.Context(), p.level)) // ends if the test fails
			p.cancel = cancel
			pairs = append(pairs, p)
			go func() {
				var done func(error)
				if done, p.err = b.Begin(costing(ctx, p.cost)); p.err == nil {
					p.release = func() { done(nil) }
				}
			}()
			m.acquire(p.modeled)
		case 3:
			p := &pair{modeled: &modeled{level: 2, cost: 1}, cancel: func() {}}
			done, err := b.TryBegin(atLevel(t.Context(), 2))
			require.Equal(t, m.try(p.modeled), err == nil)
			if err == nil {
				p.release = func() { done(nil) }
				pairs = append(pairs, p)
			}
		case 4:
			which := next(256)
			if held := matching(pairs, func(p *pair) bool { return m.held[p.modeled] }); len(held) > 0 {
				p := held[which%len(held)]
				p.release()
				p.release()
				m.release(p.modeled)
			}
		case 5:
			time.Sleep(time.Duration(next(256)) * time.Millisecond)
		case 6:
			which := next(256)
			if waiting := matching(pairs, func(p *pair) bool { return slices.Contains(m.waiting, p.modeled) }); len(waiting) > 0 {
				p := waiting[which%len(waiting)]
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
