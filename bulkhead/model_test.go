package bulkhead_test

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
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

	shared bool
	now    []float64       // by level: the latest turn that was served
	turns  map[turn]*float // of those that wait
	placed int
}

// A turn is that of a share at a level.
type turn struct {
	level int
	share string
}

type float struct {
	at     float64
	placed int // when, of equal ones the first goes first
}

type modeled struct {
	level, cost int
	share       string
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

// weightOf is that of a share in the model test.
func weightOf(share string) int { return len(share) }

func (m *model) weight(share string) float64 {
	if !m.shared {
		return 1
	}
	return float64(weightOf(share))
}

// hasPart reports whether a share holds its part of the limit or more.
func (m *model) hasPart(share string) bool {
	if !m.shared {
		return false
	}
	slots, known := 0, map[string]bool{}
	for c := range m.held {
		if c.cost == 0 {
			continue
		}
		known[c.share] = true
		if c.share == share {
			slots += c.cost
		}
	}
	for _, c := range m.waiting {
		known[c.share] = true
	}
	weights := 0.0
	for s := range known {
		weights += m.weight(s)
	}
	return float64(slots)*weights >= float64(m.limit)*m.weight(share)
}

// sharesOf returns the shares that wait at a level, in the order in which they are served.
func (m *model) sharesOf(level int) (shares []string) {
	for t := range m.turns {
		if t.level == level {
			shares = append(shares, t.share)
		}
	}
	slices.SortFunc(shares, func(a, b string) int {
		ta, tb := m.turns[turn{level, a}], m.turns[turn{level, b}]
		if pa, pb := m.hasPart(a), m.hasPart(b); pa != pb {
			if pb {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(ta.at, tb.at), ta.placed-tb.placed)
	})
	return shares
}

// line returns the calls of a share that wait at a level, in the order in which they are
// served.
func (m *model) line(level int, share string) []*modeled {
	line := slices.DeleteFunc(slices.Clone(m.waiting), func(w *modeled) bool {
		return w.level != level || w.share != share
	})
	if m.newestFirst() {
		slices.Reverse(line)
	}
	return line
}

// ofLevel returns the calls that wait at a level, in the order in which they are served.
func (m *model) ofLevel(level int) (order []*modeled) {
	for _, share := range m.sharesOf(level) {
		order = append(order, m.line(level, share)...)
	}
	if claim := m.claim[level]; claim != nil && m.claims() {
		order = slices.DeleteFunc(order, func(w *modeled) bool { return w == claim })
		order = slices.Insert(order, 0, claim)
	}
	return order
}

// claims reports whether a call that has become the first may be so no longer.
func (m *model) claims() bool { return m.shared || m.newestFirst() }

// place puts a share behind those whose turn is not later.
func (m *model) place(t turn, at float64) {
	m.placed++
	m.turns[t] = &float{at, m.placed}
}

func (m *model) fits(c *modeled) bool {
	return m.limit-m.inFlight()-c.cost >= m.kept(c.level)
}

// passes returns the levels of which a call that waits is passed if c gets its slots.
func (m *model) passes(c *modeled) (levels []int) {
	for level := range c.level + 1 {
		order := m.ofLevel(level)
		switch {
		case len(order) == 0:
		case level < c.level:
			levels = append(levels, level)
		case slices.Contains(m.waiting, c) && order[0] == c:
		case !slices.Contains(m.waiting, c) && m.newestFirst() && m.claim[level] == nil:
		default:
			levels = append(levels, level)
		}
	}
	return levels
}

func (m *model) mayPass(c *modeled) bool {
	if of := m.ofLevel(c.level); len(of) > 0 && of[0] != c && m.hasPart(c.share) && !m.hasPart(of[0].share) {
		return false
	}
	return !slices.ContainsFunc(m.passes(c), func(level int) bool { return m.passed[level]+c.cost > m.limit })
}

func (m *model) admit(c *modeled) {
	passes := m.passes(c)
	for _, level := range passes {
		m.passed[level] += c.cost
	}
	if slices.Contains(m.waiting, c) {
		if !slices.Contains(passes, c.level) { // the first of its level
			m.passed[c.level] = 0
		}
		t := turn{c.level, c.share}
		at := m.turns[t].at
		m.now[c.level] = max(m.now[c.level], at)
		m.place(t, max(at, m.now[c.level]-float64(m.limit))+float64(c.cost)/m.weight(c.share))
	}
	m.leave(c)
	m.held[c] = true
}

func (m *model) leave(c *modeled) {
	m.waiting = slices.DeleteFunc(m.waiting, func(w *modeled) bool { return w == c })
	if m.claim[c.level] == c {
		m.claim[c.level] = nil
	}
	if len(m.line(c.level, c.share)) == 0 {
		delete(m.turns, turn{c.level, c.share})
	}
	if len(m.sharesOf(c.level)) == 0 {
		m.passed[c.level], m.now[c.level] = 0, 0
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
		for again := true; again; granted = granted || again {
			of := m.ofLevel(level)
			room := m.limit - m.inFlight() - m.kept(level)
			if len(of) > 0 && m.claims() && room > 0 && room < of[0].cost {
				m.claim[level] = of[0]
			}
			again = m.grantOne(level)
		}
	}
	return granted
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
		victim := m.victim(c)
		if victim == nil {
			m.refuse(c, bulkhead.QueueFull)
			return
		}
		m.refuse(victim, bulkhead.Displaced)
	}
	m.waiting = append(m.waiting, c)
	if t := (turn{c.level, c.share}); m.turns[t] == nil {
		m.place(t, m.now[c.level]+1/m.weight(c.share))
	}
	m.grant()
}

// victim returns the call that gives its place in a full queue to c, or nil.
func (m *model) victim(c *modeled) *modeled {
	level := m.waiting[0].level
	for _, w := range m.waiting {
		level = max(level, w.level)
	}
	if level < c.level {
		return nil
	}
	most, crowd := "", 0.0
	if level == c.level {
		most, crowd = c.share, float64(len(m.line(level, c.share))+1)/m.weight(c.share)
	}
	for t, of := range m.turns {
		n := float64(len(m.line(level, t.share))) / m.weight(t.share)
		own := level == c.level && most == c.share
		if t.level == level && (n > crowd || n == crowd && !own && of.before(m.turns[turn{level, most}])) {
			most, crowd = t.share, n
		}
	}
	if level == c.level && most == c.share && !m.newestFirst() {
		return nil
	}
	line := m.line(level, most)
	if len(line) > 1 && m.newestFirst() {
		line = slices.DeleteFunc(line, func(w *modeled) bool { return w == m.claim[level] })
	}
	if len(line) == 0 || level == c.level && line[len(line)-1] == m.claim[level] {
		return nil
	}
	return line[len(line)-1]
}

func (f *float) before(other *float) bool {
	return cmp.Or(cmp.Compare(f.at, other.at), f.placed-other.placed) < 0
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
		synctest.Test(t, func(t *testing.T) { playModel(t, data[:min(len(data), 250)], false) })
	})
}

// TestSharesAreTheModel plays random operations.
func TestSharesAreTheModel(t *testing.T) {
	seeds := uint64(5000)
	if raceDetector || testing.Short() {
		seeds = 200
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 11))
		data := make([]byte, 50+rng.IntN(200))
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		synctest.Test(t, func(t *testing.T) { playModel(t, data, true) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// FuzzSharesAreTheModel is the same with shares.
func FuzzSharesAreTheModel(f *testing.F) {
	f.Add([]byte{0, 0, 1, 5, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 2, 4, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		synctest.Test(t, func(t *testing.T) { playModel(t, data[:min(len(data), 250)], true) })
	})
}

func playModel(t *testing.T, data []byte, shared bool) {
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
		shared: shared, now: make([]float64, 3), turns: map[turn]*float{},
	}
	reserve := []float64{float64(kept[0]) / float64(m.limit), float64(kept[1]) / float64(m.limit)}
	m.above = []float64{0, reserve[0], reserve[0] + reserve[1]}
	cfg := bulkhead.Config{
		Limit: m.limit, Queue: m.queue, Order: m.order, Levels: 3, Priority: levelOf, Reserve: reserve, Cost: costOf,
	}
	if shared && m.queue == 0 {
		m.queue, cfg.Queue = 1, 1
	}
	if m.queue > 0 {
		cfg.MaxWait = -1
	}
	if shared {
		cfg.Share, cfg.Weight = shareOf, weightOf
	}
	share := func() string {
		if !shared {
			return ""
		}
		return []string{"a", "b", "ccc", "dd"}[next(4)]
	}
	b := bulkhead.New(cfg)
	var pairs []*pair
	for len(data) > 0 {
		switch next(8) {
		case 0, 1, 2:
			p := &pair{modeled: &modeled{level: next(3), cost: 1, share: share()}}
			if next(3) == 0 {
				p.cost = next(7)
			}
			ctx, cancel := context.WithCancel(ofShare(atLevel(t.Context(), p.level), p.share)) // ends if the test fails
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
			p := &pair{modeled: &modeled{level: 2, cost: 1, share: share()}, cancel: func() {}}
			done, err := b.TryBegin(ofShare(atLevel(t.Context(), 2), p.share))
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
			require.True(t, p.err == nil && p.release == nil, "call %d waits: %v %+v", i, p.err, p.modeled)
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
	for i := range 800 {
		data := make([]byte, 200)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		synctest.Test(t, func(t *testing.T) { playModel(t, data, i%2 == 1) })
		if t.Failed() {
			t.Logf("%#v", data)
			return
		}
	}
}
