package bulkhead_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

var (
	modelSeeds = flag.Uint64("model.seeds", 0, "how many runs of the model are made; 0: a few")
	modelFirst = flag.Uint64("model.first", 0, "the first seed")
)

// A model is a bulkhead that does one thing at a time and examines everything.
type model struct {
	limit, queue int
	held         []*modeled
	waiting      []*modeled         // by age
	reserved     map[int]*modeled   // by level: the call that free slots are reserved for
	lines        map[line]lineState // with waiting calls
	steps        int
	pressure     map[int]int // by level: 8 for each cancellation, less 1 for each served call, from 0 to 64
}

// A line is what the calls of a share wait in at a level.
type line struct {
	level int
	share string
}

type lineState struct {
	turn   int // the step at which the line came or was served last
	served bool
}

type modeled struct {
	level, cost int
	share       string
	reason      bulkhead.Reason // of its refusal
}

func (m *model) inFlight() (n int) {
	for _, c := range m.held {
		n += c.cost
	}
	return n
}

func (m *model) heldBy(share string) (n int) {
	for _, c := range m.held {
		if c.share == share {
			n += c.cost
		}
	}
	return n
}

// at returns the calls that wait at a level, by age.
func (m *model) at(level int) []*modeled {
	return slices.DeleteFunc(slices.Clone(m.waiting), func(c *modeled) bool { return c.level != level })
}

func (m *model) line(level int, share string) []*modeled {
	return slices.DeleteFunc(m.at(level), func(c *modeled) bool { return c.share != share })
}

// next returns the call that is served next of all that wait.
func (m *model) next() *modeled {
	for level := range levelsOfModel {
		waiting := m.at(level)
		if len(waiting) == 0 {
			continue
		}
		if m.reserved[level] == nil {
			m.reserved[level] = m.choose(level, waiting)
		}
		return m.reserved[level]
	}
	return nil
}

// choose returns the call that is served next of those that wait at a level.
func (m *model) choose(level int, waiting []*modeled) *modeled {
	turn := func(c *modeled) int {
		l := m.lines[line{level, c.share}]
		if !l.served && m.newestFirst(level) {
			return -l.turn
		}
		return l.turn
	}
	first := slices.MinFunc(waiting, func(a, b *modeled) int {
		return cmp.Or(m.heldBy(a.share)-m.heldBy(b.share), turn(a)-turn(b))
	})
	if calls := m.line(level, first.share); m.newestFirst(level) {
		return calls[len(calls)-1]
	}
	return first
}

func (m *model) newestFirst(level int) bool { return m.pressure[level] >= 48 }

func (m *model) grant() {
	for len(m.waiting) > 0 && m.inFlight() < m.limit {
		c := m.next()
		if m.inFlight()+c.cost > m.limit {
			return
		}
		m.leave(c)
		m.held = append(m.held, c)
		m.pressure[c.level] = max(m.pressure[c.level]-1, 0)
		if l := (line{c.level, c.share}); len(m.line(c.level, c.share)) > 0 {
			m.steps++
			m.lines[l] = lineState{m.steps, true}
		}
	}
}

// leave takes a call out of the queue.
func (m *model) leave(c *modeled) {
	m.waiting = slices.DeleteFunc(m.waiting, func(w *modeled) bool { return w == c })
	if m.reserved[c.level] == c {
		delete(m.reserved, c.level)
	}
	if len(m.line(c.level, c.share)) == 0 {
		delete(m.lines, line{c.level, c.share})
	}
}

func (m *model) acquire(c *modeled) {
	passes := slices.ContainsFunc(m.waiting, func(w *modeled) bool { return w.level <= c.level })
	switch {
	case c.cost == 0, !passes && m.inFlight()+c.cost <= m.limit:
		m.held = append(m.held, c)
		return
	case c.cost > m.limit:
		c.reason = bulkhead.TooCostly
		return
	case m.queue == 0:
		c.reason = bulkhead.NoSlot
		return
	case len(m.waiting) >= m.queue:
		victim := m.victim(c)
		if victim == nil {
			c.reason = bulkhead.QueueFull
			return
		}
		m.leave(victim)
		victim.reason = bulkhead.Displaced
		defer m.grant() // free slots may have been reserved for the victim
	}
	if len(m.at(c.level)) == 0 {
		m.pressure[c.level] = 0
	}
	m.waiting = append(m.waiting, c)
	if l := (line{c.level, c.share}); m.lines[l].turn == 0 {
		m.steps++
		m.lines[l] = lineState{m.steps, false}
	}
}

// victim returns the call that gives its place in a full queue to c, or nil.
func (m *model) victim(c *modeled) *modeled {
	level := slices.MaxFunc(m.waiting, func(a, b *modeled) int { return a.level - b.level }).level
	if level < c.level {
		return nil
	}
	longest := slices.MinFunc(m.at(level), func(a, b *modeled) int {
		return cmp.Or(
			len(m.line(level, b.share))-len(m.line(level, a.share)),
			m.lines[line{level, a.share}].turn-m.lines[line{level, b.share}].turn)
	})
	line := m.line(level, longest.share)
	if level == c.level && len(line) <= len(m.line(level, c.share))+1 {
		return nil
	}
	return line[len(line)-1]
}

func (m *model) release(c *modeled) {
	m.held = slices.DeleteFunc(m.held, func(h *modeled) bool { return h == c })
	if c.cost > 0 {
		m.grant()
	}
}

func (m *model) cancel(c *modeled) {
	m.leave(c)
	c.reason = bulkhead.ContextEnded
	m.pressure[c.level] = min(m.pressure[c.level]+8, 64)
	m.grant()
}

func (m *model) setLimit(n int) {
	m.limit = n
	for _, c := range slices.Clone(m.waiting) {
		if c.cost > n {
			m.leave(c)
			c.reason = bulkhead.TooCostly
		}
	}
	m.grant()
}

const levelsOfModel = 3

// A pair is one call to the real bulkhead and its like in the model.
type pair struct {
	*modeled
	cancel  context.CancelFunc
	release func()
	err     error
}

// FuzzBulkheadMatchesModel reads operations from the bytes, does each to a bulkhead and to
// the model, and compares the two after each step.
func FuzzBulkheadMatchesModel(f *testing.F) {
	f.Add([]byte{2, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		synctest.Test(t, func(t *testing.T) { playModel(t, data[:min(len(data), 250)]) })
	})
}

// TestBulkheadMatchesModel plays random operations.
func TestBulkheadMatchesModel(t *testing.T) {
	seeds := *modelSeeds
	if seeds == 0 {
		if seeds = 1500; raceDetector || testing.Short() {
			seeds = 200
		}
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(*modelFirst+seed, 11))
		data := make([]byte, 50+rng.IntN(200))
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		synctest.Test(t, func(t *testing.T) { playModel(t, data) })
		if t.Failed() {
			t.Fatalf("seed %d: %#v", *modelFirst+seed, data)
		}
	}
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
	m := &model{
		limit: 1 + next(8), queue: next(7),
		reserved: map[int]*modeled{}, lines: map[line]lineState{}, pressure: map[int]int{},
	}
	cfg := bulkhead.Config{Limit: m.limit, Queue: m.queue, Levels: levelsOfModel, Priority: levelOf, Cost: costOf}
	if m.queue > 0 {
		cfg.MaxWait = -1
		if next(3) > 0 {
			cfg.Share = shareOf
		}
	}
	b := bulkhead.New(cfg)
	var pairs []*pair
	for len(data) > 0 {
		switch next(9) {
		case 0, 1, 2:
			p := &pair{modeled: &modeled{level: next(levelsOfModel), cost: 1}}
			if name := []string{"a", "b", "c", "d", ""}[next(5)]; cfg.Share != nil {
				p.share = name
			}
			if next(3) == 0 {
				p.cost = next(6)
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
		case 3, 4:
			which := next(256)
			if held := matching(pairs, func(p *pair) bool { return slices.Contains(m.held, p.modeled) }); len(held) > 0 {
				p := held[which%len(held)]
				p.release()
				p.release()
				m.release(p.modeled)
			}
		case 5, 7, 8:
			which := next(256)
			waiting := matching(pairs, func(p *pair) bool { return slices.Contains(m.waiting, p.modeled) })
			if len(waiting) > 0 {
				p := waiting[which%len(waiting)]
				p.cancel()
				m.cancel(p.modeled)
			}
		case 6:
			n := 1 + next(8)
			require.NoError(t, setLimit(b, n))
			m.setLimit(n)
		}
		synctest.Wait()
		compare(t, b, m, pairs)
	}
	for range pairs {
		for _, p := range pairs {
			if slices.Contains(m.held, p.modeled) {
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
	require.Zero(t, bulkhead.Shares(b))
	requireIdle(t, b)
}

func matching(pairs []*pair, ok func(*pair) bool) []*pair {
	return slices.DeleteFunc(slices.Clone(pairs), func(p *pair) bool { return !ok(p) })
}

func compare(t *testing.T, b *bulkhead.Bulkhead, m *model, pairs []*pair) {
	t.Helper()
	for i, p := range pairs {
		switch {
		case p.reason != "":
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
	queued := make([]int, levelsOfModel)
	for _, c := range m.waiting {
		queued[c.level]++
	}
	require.Equal(t, m.limit, s.Limit)
	require.Equal(t, m.inFlight(), s.InFlight)
	require.Equal(t, queued, s.Queued)
}
