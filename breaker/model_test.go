package breaker_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

// A model is a breaker in its plainest form: one goroutine, no gobreaker, a list of
// calls.
type model struct {
	cfg       breaker.Config // every field set, no jitter, no slow rate
	now       time.Duration
	state     breaker.State
	until     time.Duration
	opens     int
	row       int
	calls     []result
	period    int // results count for the period of their call
	successes int
	needed    int // successes that close the present opening
	probes    map[int]probe
	admitted  int
	totals    breaker.Totals
}

type probe struct {
	period  int
	expires time.Duration
}

type result struct {
	at           time.Duration
	failed, slow bool
}

type call struct {
	id, period      int // id 0: no probe
	begun, deadline time.Duration
	patience        time.Duration
}

// An end is an error and what it says, if its caller has not left.
type end struct {
	err   error
	says  outcome
	after time.Duration
}

type outcome int

const (
	good outcome = iota
	bad
	nothing
)

const tick = 100 * time.Millisecond

var ends = []end{
	{nil, good, 0},
	{errDown, bad, 0},
	{refused(true), nothing, 0},
	{throttled(3 * tick), bad, 3 * tick},
	{nil, good, 0},
	{answered(true), good, 0},
	{errors.Join(anOpenError, errDown), bad, 0},
	{errors.Join(anOpenError, throttled(30*tick), errDown), bad, 30 * tick},
	{errors.Join(anOpenError, answered(true)), good, 0},
	{fmt.Errorf("get: %w", errors.Join(answered(true), errDown)), bad, 0},
}

func (m *model) enter(s breaker.State) {
	if s != m.state {
		entered := map[breaker.State]*int64{
			breaker.Open: &m.totals.Opened, breaker.HalfOpen: &m.totals.HalfOpened, breaker.Closed: &m.totals.Closed,
			breaker.ForcedOpen: &m.totals.ForcedOpen, breaker.Disabled: &m.totals.Disabled,
		}
		*entered[s]++
	}
	m.state = s
	m.period++
	m.successes = 0
	if s != breaker.Open && s != breaker.HalfOpen {
		m.opens, m.row, m.calls = 0, 0, nil
	}
}

func (m *model) open(d time.Duration) {
	m.enter(breaker.Open)
	m.until = m.now + d
	m.needed = m.cfg.Successes
}

func (m *model) look() breaker.State {
	if m.state == breaker.Open && m.now >= m.until {
		m.enter(breaker.HalfOpen)
	}
	hung := false
	for id, p := range m.probes {
		if p.expires <= m.now {
			hung = hung || p.period == m.period
			delete(m.probes, id)
		}
	}
	if hung {
		m.opens++
		m.open(m.byItself())
	}
	return m.state
}

func (m *model) allow(deadline time.Duration) (call, bool) {
	switch m.look() {
	case breaker.Open, breaker.ForcedOpen:
		m.totals.Refused++
		return call{}, false
	case breaker.Closed, breaker.Disabled:
		return call{0, m.period, m.now, deadline, m.cfg.Patience}, true
	}
	present := 0 // of this opening
	for _, p := range m.probes {
		if p.period == m.period {
			present++
		}
	}
	if len(m.probes) >= m.cfg.Probes || present+m.successes >= m.needed {
		m.totals.Refused++
		return call{}, false
	}
	m.admitted++
	m.probes[m.admitted] = probe{m.period, m.now + m.cfg.MaxHalfOpen}
	return call{m.admitted, m.period, m.now, deadline, m.cfg.Patience}, true
}

// end ends a call with e. Its work may go on.
func (m *model) end(c call, e end, canceled, goesOn bool) {
	if c.id != 0 {
		m.look()
		delete(m.probes, c.id)
	}
	says, slow := e.says, false
	switch overran := c.deadline > 0 && m.now >= c.deadline; {
	case says != bad:
	case overran && (c.patience < 0 || c.deadline-c.begun < c.patience):
		says = nothing
	case overran:
		slow = true
	case canceled:
		says = nothing
	}
	switch says {
	case good:
		m.totals.Succeeded++
	case bad:
		m.totals.Failed++
	default:
		m.totals.Ignored++
	}
	if slow {
		m.totals.Slow++
	}
	if c.period != m.period || says == nothing {
		return
	}
	if says == bad {
		m.row++
	} else if !goesOn {
		m.row = 0
	}
	if m.state == breaker.HalfOpen && says == good {
		if m.successes++; m.successes == m.needed {
			m.enter(breaker.Closed)
		}
		return
	}
	if m.state != breaker.HalfOpen {
		m.calls = append(m.calls, result{m.now, says == bad, slow})
		n := m.counts()
		rate := n.Calls >= int64(m.cfg.MinCalls) && m.cfg.FailureRate > 0 && float64(n.Failed) >= m.cfg.FailureRate*float64(n.Calls)
		inARow := m.cfg.Failures > 0 && m.row >= m.cfg.Failures
		inWindow := m.cfg.FailuresInWindow > 0 && n.Failed >= int64(m.cfg.FailuresInWindow)
		if says == good || m.state == breaker.Disabled || !rate && !inARow && !inWindow && e.after == 0 {
			return
		}
	}
	m.opens++
	if e.after > 0 {
		m.open(min(e.after, m.cfg.MaxRetryAfter))
	} else {
		m.open(m.byItself())
	}
}

// endWork ends the work of a call that has succeeded.
func (m *model) endWork(c call, broken bool) {
	if broken {
		m.end(c, end{errDown, bad, 0}, false, false)
	} else if c.period == m.period && m.state != breaker.HalfOpen {
		m.row = 0
	}
}

// byItself returns how long the breaker opens by itself.
func (m *model) byItself() time.Duration {
	return min(m.cfg.OpenFor<<min(m.opens-1, 30), m.cfg.MaxOpenFor)
}

// update is told of a change of the Config.
func (m *model) update(change func(*breaker.Config)) {
	was := m.cfg
	change(&m.cfg)
	if was.WindowCalls != m.cfg.WindowCalls || was.Window != m.cfg.Window {
		m.calls = nil
	}
}

func (m *model) counts() breaker.Counts {
	n := breaker.Counts{FailedInARow: int64(m.row)}
	for i, r := range m.calls {
		if w := m.cfg.Window / 10; w > 0 && r.at/w <= m.now/w-10 || w == 0 && i < len(m.calls)-m.cfg.WindowCalls {
			continue
		}
		n.Calls++
		if r.failed {
			n.Failed++
		} else {
			n.Succeeded++
		}
		if r.slow {
			n.Slow++
		}
	}
	return n
}

// FuzzBreakerModel compares a breaker with the model after each of a random
// sequence of operations; two bytes are one operation.
func FuzzBreakerModel(f *testing.F) {
	f.Add([]byte{0x00, 0x13, 1, 0, 2, 1, 1, 0, 2, 1, 1, 0, 0, 40, 1, 0, 2, 0, 1, 0})
	f.Fuzz(func(t *testing.T, program []byte) {
		if len(program) < 2 || len(program) > 2000 {
			return
		}
		synctest.Test(t, func(t *testing.T) { runModel(t, program) })
	})
}

func runModel(t *testing.T, program []byte) {
	a, b := int(program[0]), int(program[1])
	cfg := breaker.Config{
		Failures:    1 + a%4,
		OpenFor:     4 * tick,
		MaxOpenFor:  4 * tick * time.Duration(1+a>>4),
		Probes:      1 + b%3,
		Successes:   1 + b>>2%4,
		MaxHalfOpen: 20 * tick,
		WindowCalls: 6,
		Patience:    []time.Duration{tick, 3 * tick, -1, 10 * tick}[b>>4%4],
	}
	cfg.MaxRetryAfter = []time.Duration{cfg.MaxOpenFor, 2 * tick}[b>>7]
	if a&4 != 0 { // by rate
		cfg.FailureRate, cfg.MinCalls = 0.5, 4
		cfg.Failures *= b >> 6 & 1
		if a&8 != 0 {
			cfg.WindowCalls, cfg.Window = 0, 10*tick
		}
	} else if a&8 != 0 {
		cfg.FailuresInWindow = 3
	}
	m := &model{state: breaker.Closed, cfg: cfg, probes: make(map[int]probe)}
	var seen changes
	cfg.OnChange = seen.hook
	circuit := breaker.New(steady(cfg))
	began := time.Now()

	type waiting struct {
		call   call
		done   func(error)
		cancel context.CancelFunc
	}
	var calls []waiting
	type lingering struct {
		call call
		work *linger.Work
	}
	var works []lingering
	for i := 2; i+1 < len(program); i += 2 {
		op, arg := program[i]%19, int(program[i+1])
		switch op {
		case 0:
			time.Sleep(time.Duration(arg) * tick / 4)
			synctest.Wait() // for the deadlines
			m.now = time.Since(began)
		case 1, 2, 3, 4, 5:
			ctx, cancel := context.WithCancel(t.Context())
			var deadline time.Duration
			if arg%2 == 1 {
				deadline = m.now + time.Duration(1+arg>>4)*tick
				ctx, cancel = context.WithDeadline(t.Context(), began.Add(deadline))
			}
			defer cancel()
			done, err := circuit.Begin(ctx)
			c, admitted := m.allow(deadline)
			require.Equal(t, admitted, err == nil, "op %d: %+v", i, m)
			if admitted {
				calls = append(calls, waiting{c, done, cancel})
			}
		case 6, 7, 8, 9, 10:
			if len(calls) > 0 {
				j := arg >> 4 % len(calls)
				w, e := calls[j], ends[arg%len(ends)]
				calls = append(calls[:j], calls[j+1:]...)
				canceled := arg>>4%5 == 4
				if canceled {
					w.cancel()
				}
				w.done(e.err)
				m.end(w.call, e, canceled, false)
			}
		case 11:
			e := ends[arg%len(ends)]
			called := false
			got := do(circuit, func(context.Context) error { called = true; return e.err })
			c, admitted := m.allow(0)
			require.Equal(t, admitted, called, "op %d: %+v", i, m)
			if admitted {
				require.Equal(t, e.err, got)
				m.end(c, e, false, false)
			} else {
				require.ErrorIs(t, got, breaker.ErrOpen)
			}
		case 12:
			d := time.Duration(arg) * tick / 4
			circuit.Trip(errDown, d)
			if m.state != breaker.ForcedOpen && m.state != breaker.Disabled {
				if m.state != breaker.Open {
					m.opens++
				}
				m.open(cmp.Or(d, m.byItself()))
			}
		case 13:
			circuit.Reset()
			if m.state != breaker.ForcedOpen && m.state != breaker.Disabled {
				m.enter(breaker.Closed)
			}
		case 14:
			if arg%2 == 0 {
				circuit.ForceOpen(nil)
				m.enter(breaker.ForcedOpen)
			} else if circuit.Disable(); m.state != breaker.Disabled {
				m.enter(breaker.Disabled)
			}
		case 15:
			circuit.Enable()
			if m.state == breaker.ForcedOpen || m.state == breaker.Disabled {
				m.enter(breaker.Closed)
			}
		case 16:
			change := func(c *breaker.Config) {
				switch n := 1 + arg>>3%5; arg % 8 {
				case 0:
					c.Failures = n
				case 1:
					c.OpenFor = time.Duration(n) * tick
					c.MaxOpenFor = time.Duration(1+arg>>6) * c.OpenFor
				case 2:
					c.Probes = n
				case 3:
					c.Successes = n
				case 4:
					c.WindowCalls, c.Window = 5+n, 0
				case 5:
					c.WindowCalls, c.Window = 0, time.Duration(n)*10*tick
				case 6:
					c.Patience = time.Duration(n) * tick
				case 7:
					c.MaxHalfOpen = time.Duration(n) * 5 * tick
				}
			}
			m.look()
			m.update(change)
			require.NoError(t, circuit.Update(change))
		case 17:
			ctx, work := linger.Begin(t.Context())
			err := circuit.Do(ctx, func(context.Context) error { work.GoOn(); return nil })
			c, admitted := m.allow(0)
			require.Equal(t, admitted, err == nil, "op %d: %+v", i, m)
			if admitted {
				m.end(c, ends[0], false, true)
				works = append(works, lingering{c, work})
			}
		case 18:
			if len(works) > 0 {
				j := arg >> 1 % len(works)
				w, broken := works[j], arg%2 == 1
				works = append(works[:j], works[j+1:]...)
				if broken {
					w.work.End(errDown)
				} else {
					w.work.End(nil)
				}
				m.endWork(w.call, broken)
			}
		}
		s := circuit.Stats()
		require.Equal(t, m.look(), s.State, "op %d: %+v\n%v", i, m, program[:i+2])
		require.EqualValues(t, m.opens, s.OpensInARow, "op %d: %+v", i, m)
		require.Equal(t, m.totals, s.Totals, "op %d: %+v", i, m)
		switch s.State {
		case breaker.Open:
			require.Equal(t, m.until-m.now, s.OpenLeft, "op %d: %+v", i, m)
		case breaker.Closed, breaker.Disabled:
			require.Equal(t, m.counts(), s.Window, "op %d: %+v", i, m)
		}
	}
	seen.requireChain(t, m.look())
}

func TestBreakerModel(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 5))
	for range 3000 {
		program := make([]byte, 2+2*r.IntN(200))
		for i := range program {
			program[i] = byte(r.Uint32())
		}
		synctest.Test(t, func(t *testing.T) { runModel(t, program) })
		if t.Failed() {
			t.Fatalf("program %v", program)
		}
	}
}
