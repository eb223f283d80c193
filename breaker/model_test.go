package breaker_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

// A model is a breaker in its plainest form: one goroutine, no gobreaker, no ring, but lists of
// all results, works and probes.
type model struct {
	cfg     breaker.Config // every field set
	now     time.Duration
	state   breaker.State
	since   time.Duration
	until   time.Duration
	opens   int
	row     int
	results []*result // of this period, in order
	period  int       // results count for the period of their call
	passed  int       // probes of this opening that have succeeded
	permits int
	calls   []*call // that run, or whose work goes on
	totals  breaker.Totals
}

type result struct {
	at            time.Duration
	failed, taken bool
	after         time.Duration
	inRow         bool
}

type call struct {
	period   int
	begun    time.Duration
	deadline time.Duration
	cfg      breaker.Config
	probe    bool
	decided  bool // of a probe: it has succeeded, failed or hung
	returned bool
	since    time.Duration // when it returned
	old      bool          // its work has ended a row of failures by its age
}

// An end is an error and what it says, if its caller has not left.
type end struct {
	err   error
	says  breaker.Result
	after time.Duration
}

const tick = 100 * time.Millisecond

var ends = []end{
	{nil, breaker.Success, 0},
	{errDown, breaker.Failure, 0},
	{refused(true), breaker.Ignore, 0},
	{throttled(3 * tick), breaker.Failure, 3 * tick},
	{nil, breaker.Success, 0},
	{answered(true), breaker.Success, 0},
	{errors.Join(anOpenError, errDown), breaker.Failure, 0},
	{throttled(30 * tick), breaker.Failure, 30 * tick},
	{errors.Join(anOpenError, answered(true)), breaker.Success, 0},
	{fmt.Errorf("get: %w", throttled(7*tick)), breaker.Failure, 7 * tick},
}

// workEnds are how work ends that goes on.
var workEnds = []end{
	{nil, breaker.Success, 0},
	{errDown, breaker.Failure, 0},
	{errDown, breaker.Failure, 0},
	{throttled(5 * tick), breaker.Failure, 5 * tick},
	{fmt.Errorf("read: %w", context.Canceled), breaker.Ignore, 0},
	{refused(true), breaker.Ignore, 0},
	{answered(true), breaker.Success, 0},
	{nil, breaker.Success, 0},
}

func newModel(cfg breaker.Config) *model {
	return &model{state: breaker.Closed, cfg: filled(cfg)}
}

func filled(cfg breaker.Config) breaker.Config { return breaker.New(cfg).Config() }

func (m *model) enter(s breaker.State) {
	m.period++
	m.passed = 0
	m.calls = slices.DeleteFunc(m.calls, func(c *call) bool { return c.returned || !c.probe })
	if s != m.state {
		m.since = m.now
		entered := map[breaker.State]*int64{
			breaker.Open: &m.totals.Opened, breaker.HalfOpen: &m.totals.HalfOpened, breaker.Closed: &m.totals.Closed,
			breaker.ForcedOpen: &m.totals.ForcedOpen, breaker.Disabled: &m.totals.Disabled,
		}
		*entered[s]++
	}
	m.state = s
	if s == breaker.Closed || s == breaker.Disabled {
		m.row, m.results = 0, nil
	}
}

// operated is enter for an operator.
func (m *model) operated(s breaker.State) {
	m.opens = 0
	m.enter(s)
}

func (m *model) free() bool { return m.state != breaker.ForcedOpen && m.state != breaker.Disabled }

func (m *model) trip(d time.Duration) {
	if !m.free() {
		return
	}
	if m.state != breaker.Open {
		m.opens++
	}
	m.open(cmp.Or(d, m.byItself()))
}

func (m *model) open(d time.Duration) {
	m.enter(breaker.Open)
	m.until = m.now + d
	m.permits = m.cfg.Probes
}

// byItself returns how long the breaker opens by itself.
func (m *model) byItself() time.Duration {
	return min(m.cfg.OpenFor<<min(m.opens-1, 30), m.cfg.MaxOpenFor)
}

// openAfter opens the breaker for what failures asked for, or else by itself.
func (m *model) openAfter(asked time.Duration) {
	m.opens++
	m.open(cmp.Or(min(asked, m.cfg.MaxRetryAfter), m.byItself()))
}

func (m *model) endRow() {
	m.row = 0
	for _, r := range m.results {
		r.inRow = false
	}
}

func (m *model) look() breaker.State {
	if m.state == breaker.Open && m.now >= m.until {
		m.enter(breaker.HalfOpen)
	}
	if m.now-m.since >= m.cfg.Window && m.state == breaker.Closed {
		m.opens = 0
	}
	for _, c := range m.calls {
		if c.returned && !c.probe && !c.old && m.now >= c.since+m.cfg.Window {
			c.old = true
			m.endRow()
		}
	}
	for _, c := range slices.Clone(m.calls) {
		switch {
		case !c.probe || c.decided:
		case !c.returned && m.now >= c.begun+c.cfg.OpenFor:
			m.decide(c, breaker.Failure, 0)
		case c.returned && m.now >= c.since+c.cfg.OpenFor:
			m.decide(c, breaker.Success, 0)
		}
	}
	return m.state
}

// decide settles a probe.
func (m *model) decide(c *call, says breaker.Result, after time.Duration) {
	c.decided = true
	if c.period != m.period {
		return
	}
	switch says {
	case breaker.Failure:
		m.row++
		m.openAfter(after)
	case breaker.Success:
		m.endRow()
		if m.passed++; m.passed == m.permits {
			m.enter(breaker.Closed)
		}
	}
}

func (m *model) allow(deadline time.Duration) (*call, bool) {
	m.look()
	c := &call{period: m.period, begun: m.now, deadline: deadline, cfg: m.cfg}
	switch m.state {
	case breaker.Open, breaker.ForcedOpen:
		m.totals.Refused++
		return nil, false
	case breaker.HalfOpen:
		running, own := 0, m.passed
		for _, other := range m.calls {
			if other.probe && !other.decided {
				running++
				if other.period == m.period {
					own++
				}
			}
		}
		if running >= m.permits || own >= m.permits {
			m.totals.Refused++
			return nil, false
		}
		c.probe = true
	}
	m.calls = append(m.calls, c)
	return c, true
}

// read returns what the end of a call says; its caller may have left, or its deadline passed.
func (m *model) read(c *call, e end, canceled bool) breaker.Result {
	overran := c.deadline > 0 && m.now >= c.deadline
	if e.says == breaker.Failure && (canceled || overran && (c.cfg.Patience < 0 || c.deadline-c.begun < c.cfg.Patience)) {
		return breaker.Ignore
	}
	return e.says
}

// end ends a call with e. Its work may go on.
func (m *model) end(c *call, e end, canceled, goesOn bool) {
	m.look()
	says := m.read(c, e, canceled)
	if says == breaker.Success && c.cfg.SlowAfter > 0 && m.now-c.begun >= c.cfg.SlowAfter {
		says, e.after, goesOn = breaker.Failure, 0, false
	}
	switch says {
	case breaker.Success:
		m.totals.Succeeded++
	case breaker.Failure:
		m.totals.Failed++
	default:
		m.totals.Ignored++
	}
	if goesOn && says == breaker.Success {
		c.returned, c.since = true, m.now
	}
	if !c.returned || c.period != m.period {
		m.calls = slices.DeleteFunc(m.calls, func(other *call) bool { return other == c })
	}
	switch {
	case c.probe && c.decided, c.probe && c.returned:
	case c.probe:
		m.decide(c, says, e.after)
	case c.period != m.period || says == breaker.Ignore:
	case says == breaker.Failure:
		m.results = append(m.results, &result{m.now, true, false, e.after, true})
		m.failed()
	default:
		m.results = append(m.results, &result{at: m.now})
		if !c.returned {
			m.endRow()
		}
	}
}

// endWork ends the work of a call that has succeeded.
func (m *model) endWork(c *call, e end) {
	m.look()
	says := m.read(c, e, false)
	m.calls = slices.DeleteFunc(m.calls, func(other *call) bool { return other == c })
	if says == breaker.Failure {
		m.totals.Failed++
	}
	switch {
	case c.period != m.period:
	case c.probe && c.decided && says != breaker.Failure:
	case c.probe:
		m.decide(c, says, e.after)
	case says == breaker.Success:
		m.endRow()
	case says == breaker.Failure:
		broken := &result{m.now, true, false, e.after, true}
		m.results = append(m.results, broken)
		for _, r := range slices.Backward(m.results[:len(m.results)-1]) {
			if !r.failed && !r.taken && m.remembers(r, 1) {
				if r.taken = true; m.cfg.WindowCalls > 0 { // the failure takes its place
					m.results = m.results[:len(m.results)-1]
					*r = *broken
				}
				break
			}
		}
		m.failed()
	}
}

// failed goes on with a failure among the results.
func (m *model) failed() {
	m.row++
	n := m.counts()
	inRow := m.cfg.Failures > 0 && m.row >= m.cfg.Failures
	inWindow := m.cfg.FailuresInWindow > 0 && n.Failed >= int64(m.cfg.FailuresInWindow) ||
		m.cfg.FailureRate > 0 && n.Calls >= int64(m.cfg.MinCalls) && float64(n.Failed) >= m.cfg.FailureRate*float64(n.Calls)
	if m.state == breaker.Disabled || !inRow && !inWindow {
		return
	}
	var asked time.Duration
	for _, r := range m.results {
		if m.remembers(r, 0) && (r.inRow || inWindow) {
			asked = max(asked, r.after)
		}
	}
	m.openAfter(asked)
}

// remembers reports whether a result is in the window, but for the newest ones.
func (m *model) remembers(r *result, but int) bool {
	if m.cfg.WindowCalls > 0 {
		return slices.Index(m.results, r) >= len(m.results)-but-m.cfg.WindowCalls
	}
	w := m.cfg.Window / 10
	return r.at/w > m.now/w-10
}

// update is told of a change of the Config.
func (m *model) update(cfg breaker.Config) {
	m.look()
	was := m.cfg
	m.cfg = filled(cfg)
	if was.WindowCalls != m.cfg.WindowCalls || was.Window != m.cfg.Window && m.cfg.WindowCalls == 0 {
		m.results = nil
	}
}

func (m *model) counts() breaker.Counts {
	n := breaker.Counts{FailedInARow: int64(m.row)}
	for _, r := range m.results {
		switch {
		case !m.remembers(r, 0) || r.taken:
		case r.failed:
			n.Failed++
		default:
			n.Succeeded++
		}
	}
	n.Calls = n.Succeeded + n.Failed
	return n
}

// difference compares the model with what the breaker shows.
func (m *model) difference(s breaker.Stats) string {
	m.look()
	switch {
	case m.state != s.State:
		return fmt.Sprintf("state %v, not %v as in the model", s.State, m.state)
	case m.totals != s.Totals:
		return fmt.Sprintf("totals %+v, not %+v", s.Totals, m.totals)
	case m.opens != int(s.OpensInARow):
		return fmt.Sprintf("%d openings in a row, not %d", s.OpensInARow, m.opens)
	case m.state == breaker.Open && s.OpenLeft != m.until-m.now:
		return fmt.Sprintf("open for %v, not %v", s.OpenLeft, m.until-m.now)
	case (m.state == breaker.Closed || m.state == breaker.Disabled) && s.Window != m.counts():
		return fmt.Sprintf("window %+v, not %+v", s.Window, m.counts())
	case int64(m.row) != s.Window.FailedInARow:
		return fmt.Sprintf("%d failures in a row, not %d", s.Window.FailedInARow, m.row)
	}
	return ""
}

// modelConfig returns a Config; choose returns a number below n.
func modelConfig(choose func(n int) int) breaker.Config {
	cfg := breaker.Config{
		Failures:   1 + choose(4),
		OpenFor:    4 * tick,
		MaxOpenFor: 4 * tick * time.Duration(1+choose(8)),
		Probes:     1 + choose(4),
		Patience:   []time.Duration{tick, 3 * tick, -1, 10 * tick}[choose(4)],
		SlowAfter:  []time.Duration{0, 0, 0, 12 * tick}[choose(4)],
		Window:     []time.Duration{10 * tick, 10 * tick, 30 * tick, 100 * tick}[choose(4)],
	}
	cfg.MaxRetryAfter = []time.Duration{cfg.MaxOpenFor, 2 * tick, 40 * tick}[choose(3)]
	cfg.WindowCalls = []int{0, 0, 6, 9}[choose(4)]
	switch choose(4) {
	case 1:
		cfg.FailureRate, cfg.MinCalls = 0.5, 4
	case 2:
		cfg.FailureRate, cfg.MinCalls, cfg.Failures = 0.6, 4, 0
	case 3:
		cfg.FailuresInWindow = 3
	}
	return cfg
}

// modelUpdate returns a change of a Config.
func modelUpdate(choose func(n int) int) func(*breaker.Config) {
	field, n := choose(8), 1+choose(5)
	return func(c *breaker.Config) {
		switch field {
		case 0:
			c.Failures = n
		case 1:
			c.OpenFor, c.MaxOpenFor = time.Duration(n)*tick, time.Duration(2*n)*tick
		case 2:
			c.Probes = n
		case 3:
			c.SlowAfter = time.Duration(n-1) * 6 * tick
		case 4:
			c.WindowCalls = 5 + n
		case 5:
			c.WindowCalls, c.Window = 0, time.Duration(n)*10*tick
		case 6:
			c.Patience = time.Duration(n) * tick
		case 7:
			c.MaxRetryAfter = time.Duration(n) * 5 * tick
		}
	}
}

// FuzzBreakerModel compares a breaker with the model after each of a random sequence of
// operations; each byte is a choice.
func FuzzBreakerModel(f *testing.F) {
	f.Add([]byte{0x00, 0x13, 1, 0, 2, 1, 1, 0, 2, 1, 1, 0, 0, 40, 1, 0, 2, 0, 1, 0})
	f.Fuzz(func(t *testing.T, program []byte) {
		if len(program) > 2000 {
			return
		}
		synctest.Test(t, func(t *testing.T) { runModel(t, program) })
	})
}

func runModel(t *testing.T, program []byte) {
	left := program
	choose := func(n int) int {
		if len(left) == 0 {
			return 0
		}
		i := int(left[0]) % n
		left = left[1:]
		return i
	}
	given := modelConfig(choose)
	m := newModel(given)
	var seen changes
	circuit := watched(&seen, given)
	began := time.Now()

	type waiting struct {
		call   *call
		ctx    context.Context
		done   func(error)
		cancel context.CancelFunc
	}
	var calls []waiting
	type lingering struct {
		call *call
		work *linger.Work
	}
	var works []lingering
	for len(left) > 0 {
		switch choose(19) {
		case 0, 1:
			time.Sleep(time.Duration(choose(60)) * tick / 4)
			synctest.Wait() // for the deadlines
			m.now = time.Since(began)
		case 2, 3, 4:
			ctx, cancel := context.WithCancel(t.Context())
			var deadline time.Duration
			if choose(3) == 1 {
				deadline = m.now + time.Duration(1+choose(16))*tick
				ctx, cancel = context.WithDeadline(t.Context(), began.Add(deadline))
			}
			defer cancel()
			done, err := circuit.Begin(ctx)
			c, admitted := m.allow(deadline)
			require.Equal(t, admitted, err == nil, "%+v", m)
			if admitted {
				calls = append(calls, waiting{c, ctx, done, cancel})
			}
		case 5, 6, 7, 8:
			if len(calls) > 0 {
				j := choose(len(calls))
				w, e := calls[j], ends[choose(len(ends))]
				calls = slices.Delete(calls, j, j+1)
				if choose(5) == 4 {
					w.cancel()
				}
				w.done(e.err)
				m.end(w.call, e, w.ctx.Err() == context.Canceled, false)
			}
		case 9, 10:
			e := ends[choose(len(ends))]
			called := false
			got := do(circuit, func(context.Context) error { called = true; return e.err })
			c, admitted := m.allow(0)
			require.Equal(t, admitted, called, "%+v", m)
			if admitted {
				require.Equal(t, e.err, got)
				m.end(c, e, false, false)
			} else {
				require.ErrorIs(t, got, breaker.ErrOpen)
			}
		case 11:
			d := time.Duration(choose(60)) * tick / 4
			circuit.Trip(errDown, d)
			m.look()
			m.trip(d)
		case 12:
			circuit.Reset()
			if m.look(); m.free() {
				m.operated(breaker.Closed)
			}
		case 13:
			m.look()
			if choose(2) == 0 {
				circuit.ForceOpen(nil)
				m.operated(breaker.ForcedOpen)
			} else if circuit.Disable(); m.state != breaker.Disabled {
				m.operated(breaker.Disabled)
			}
		case 14:
			circuit.Enable()
			if m.look(); !m.free() {
				m.operated(breaker.Closed)
			}
		case 15:
			change := modelUpdate(choose)
			if err := circuit.Update(change); err == nil {
				change(&given)
				m.update(given)
			}
		case 16, 17:
			ctx, work := linger.Begin(t.Context())
			var deadline time.Duration
			if choose(4) == 1 {
				deadline = m.now + time.Duration(1+choose(16))*tick
				var cancel context.CancelFunc
				ctx, cancel = context.WithDeadline(ctx, began.Add(deadline))
				defer cancel()
			}
			took := time.Duration(choose(8)/6*(1+choose(16))) * tick
			var c *call
			admitted := false
			err := circuit.Do(ctx, func(context.Context) error {
				c, admitted = m.allow(deadline)
				require.True(t, admitted, "%+v", m)
				time.Sleep(took)
				synctest.Wait()
				m.now = time.Since(began)
				work.Continue()
				return nil
			})
			if err != nil {
				c, admitted = m.allow(deadline)
				require.False(t, admitted, "%+v", m)
				break
			}
			m.end(c, ends[0], false, true)
			if c.returned {
				works = append(works, lingering{c, work})
			} else {
				work.End(errDown)
			}
		case 18:
			if len(works) > 0 {
				j, e := choose(len(works)), workEnds[choose(len(workEnds))]
				w := works[j]
				works = slices.Delete(works, j, j+1)
				w.work.End(e.err)
				m.endWork(w.call, e)
			}
		}
		require.Empty(t, m.difference(circuit.Stats()), "%+v\n%v", m, program[:len(program)-len(left)])
	}
	seen.requireChain(t, m.state)
}

func TestBreakerModel(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 5))
	programs := 3000
	if testing.Short() {
		programs = 300
	}
	for range programs {
		program := make([]byte, 20+r.IntN(500))
		for i := range program {
			program[i] = byte(r.Uint32())
		}
		synctest.Test(t, func(t *testing.T) { runModel(t, program) })
		if t.Failed() {
			t.Fatalf("program %v", program)
		}
	}
}
