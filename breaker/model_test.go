package breaker_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

// A model is a breaker in its plainest form: one goroutine, no gobreaker, no ring, but lists of
// all results, streams and probes. Runs and bursts are computed from the list of all events.
type model struct {
	cfg     breaker.Config // every field set
	now     time.Duration
	state   breaker.State
	since   time.Duration
	until   time.Duration
	opens   int
	order   int         // of admissions and events so far
	events  [2][]*event // of calls and of streams in this period, in order
	results []*result   // of this period, in order
	bursts  []*burst    // of this window, in order
	hints   []hint      // of this window, in order
	period  int         // results count for the period of their call
	outage  int         // late probes count for the outage of their call
	passed  int         // probes of this opening that have succeeded
	permits int
	calls   []*call // that run, or whose stream continues
	totals  totals
}

type totals struct {
	Succeeded, Failed, Ignored, Refused int64
	Transitions                         map[breaker.State]int64
}

// totalsOf returns the counters of s.
func totalsOf(s breaker.Stats) totals {
	return totals{s.Succeeded, s.Failed, s.Ignored, s.Refused, s.Transitions}
}

// An event is a failure, or a success that ends a run.
type event struct {
	failed  bool
	began   int // the order of its call
	order   int
	at      time.Duration
	timeout bool
	after   time.Duration
}

// A run is what the events of one kind say.
type run struct {
	first           *event // of the last run and its burst
	size            int    // of that burst
	count, timeouts int
	after           time.Duration // the longest
	inBurst         bool          // the last event is
}

func runOf(events []*event) (r run) {
	for _, e := range events {
		switch {
		case !e.failed:
			r.count, r.timeouts, r.after = 0, 0, 0
			continue
		case r.first != nil && e.began < r.first.order && e.at <= r.first.at+250*time.Millisecond:
			r.size++
			r.inBurst = true
		case r.count == 0:
			r = run{first: e, size: 1, count: 1, inBurst: true}
			if e.timeout {
				r.timeouts = 1
			}
		default:
			r.count++
			r.inBurst = false
			if e.timeout {
				r.timeouts++
			}
		}
		if r.count > 0 {
			r.after = max(r.after, e.after)
		}
	}
	return r
}

func (r run) undecided(now time.Duration) bool {
	return r.size > 1 && now < r.first.at+250*time.Millisecond && float64(r.timeouts) < float64(r.count)/2
}

type result struct {
	at            time.Duration
	failed, taken bool
}

// A burst is failures of calls in flight at the first of them.
type burst struct {
	first *event
	last  place
	size  int
}

// A place is that of the newest result at some moment.
type place struct {
	at    time.Duration
	count int // of results
}

// A hint is the RetryAfter of a failure.
type hint struct {
	place
	after time.Duration
}

type call struct {
	order    int
	period   int
	outage   int
	begun    time.Duration
	deadline time.Duration
	cfg      breaker.Config
	probe    bool
	decided  bool // of a probe: it has succeeded, failed or is overdue
	returned bool
	since    time.Duration // when it returned
	old      bool          // its stream has ended a run of failures by its age
}

// An end is an error and what it says, if its caller has not left.
type end struct {
	err   error
	says  breaker.Verdict
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
	{errHang, breaker.Failure, 0},
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
	{errHang, breaker.Failure, 0},
	{fmt.Errorf("read: %w", context.Canceled), breaker.Ignore, 0},
	{refused(true), breaker.Ignore, 0},
	{answered(true), breaker.Success, 0},
	{nil, breaker.Success, 0},
}

func newModel(cfg breaker.Config) *model {
	m := &model{state: breaker.Closed, cfg: filled(cfg)}
	m.totals.Transitions = map[breaker.State]int64{
		breaker.Closed: 0, breaker.HalfOpen: 0, breaker.Open: 0, breaker.ForcedOpen: 0, breaker.Disabled: 0,
	}
	return m
}

func filled(cfg breaker.Config) breaker.Config { return breaker.New(cfg).Config() }

func (m *model) enter(s breaker.State) {
	m.period++
	m.passed = 0
	m.calls = slices.DeleteFunc(m.calls, func(c *call) bool { return c.returned || !c.probe })
	if s != m.state {
		m.since = m.now
		m.totals.Transitions[s]++
	}
	m.state = s
	if s == breaker.Closed || s == breaker.Disabled {
		m.events, m.results, m.bursts, m.hints = [2][]*event{}, nil, nil, nil
		m.outage++
	}
}

// operated is enter for an operator.
func (m *model) operated(s breaker.State) {
	m.opens = 0
	m.outage++
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
	m.outage++
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

const ofCalls, ofStreams = 0, 1

// note adds an event to the runs of a kind.
func (m *model) note(kind int, e event) *event {
	m.order++
	e.order, e.at = m.order, m.now
	m.events[kind] = append(m.events[kind], &e)
	return &e
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
			m.note(ofStreams, event{})
		}
	}
	for _, c := range slices.Clone(m.calls) {
		switch {
		case !c.probe || c.decided:
		case !c.returned && m.now >= c.begun+c.cfg.ProbeTimeout:
			c.decided = true
			if c.period == m.period {
				m.note(ofCalls, event{failed: true, began: m.order})
				m.openAfter(0)
			}
		case c.returned && m.now >= c.since+min(c.cfg.OpenFor, c.cfg.ProbeTimeout):
			m.decide(c, ofStreams, breaker.Success, 0)
		}
	}
	return m.state
}

// decide settles a probe.
func (m *model) decide(c *call, kind int, says breaker.Verdict, after time.Duration) {
	c.decided = true
	if c.period != m.period {
		return
	}
	switch says {
	case breaker.Failure:
		m.note(kind, event{failed: true, began: m.order})
		m.outage++
		m.openAfter(after)
	case breaker.Success:
		m.note(kind, event{})
		if m.passed++; m.passed == m.permits {
			m.enter(breaker.Closed)
		}
	}
}

func (m *model) allow(deadline time.Duration) (*call, bool) {
	m.look()
	m.order++
	c := &call{order: m.order, period: m.period, outage: m.outage, begun: m.now, deadline: deadline, cfg: m.cfg}
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

// read returns what the end of a call says, and whether it is a timeout; its caller may have left, or its
// deadline passed.
func (m *model) read(c *call, e end, canceled bool) (breaker.Verdict, bool) {
	overran := c.deadline > 0 && m.now >= c.deadline
	impatient := c.cfg.Patience == breaker.Unlimited || c.deadline-c.begun < c.cfg.Patience
	if e.says == breaker.Failure && (canceled || overran && impatient) {
		return breaker.Ignore, false
	}
	return e.says, overran || errors.Is(e.err, os.ErrDeadlineExceeded)
}

// end ends a call with e. Its stream may continue.
func (m *model) end(c *call, e end, canceled, streams bool) {
	m.look()
	says, timeout := m.read(c, e, canceled)
	if says == breaker.Success && c.cfg.SlowAfter > 0 && m.now-c.begun >= c.cfg.SlowAfter {
		says, e.after, streams, timeout = breaker.Failure, 0, false, true
	}
	switch says {
	case breaker.Success:
		m.totals.Succeeded++
	case breaker.Failure:
		m.totals.Failed++
	default:
		m.totals.Ignored++
	}
	if streams && says == breaker.Success {
		c.returned, c.since = true, m.now
	}
	if !c.returned || c.period != m.period {
		m.calls = slices.DeleteFunc(m.calls, func(other *call) bool { return other == c })
	}
	switch {
	case c.probe && c.period == m.period && c.returned:
		m.note(ofCalls, event{})
	case c.probe && c.period == m.period:
		m.decide(c, ofCalls, says, e.after)
	case c.probe:
		if says == breaker.Success && c.outage == m.outage {
			m.enter(breaker.Closed)
		}
	case c.period != m.period || says == breaker.Ignore:
	case says == breaker.Failure:
		m.results = append(m.results, &result{at: m.now, failed: true})
		m.failed(ofCalls, event{failed: true, began: c.order, timeout: timeout, after: e.after})
	default:
		m.results = append(m.results, &result{at: m.now})
		m.note(ofCalls, event{})
	}
}

// endStream ends the stream of a call that has succeeded.
func (m *model) endStream(c *call, e end) {
	m.look()
	says, timeout := m.read(c, e, false)
	m.calls = slices.DeleteFunc(m.calls, func(other *call) bool { return other == c })
	if says == breaker.Failure {
		m.totals.Failed++
	}
	switch {
	case c.period != m.period:
	case c.probe && c.decided && says != breaker.Failure:
	case c.probe:
		m.decide(c, ofStreams, says, e.after)
	case says == breaker.Success:
		m.note(ofStreams, event{})
	case says == breaker.Failure:
		broken := &result{at: m.now, failed: true}
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
		m.failed(ofStreams, event{failed: true, began: c.order, timeout: timeout, after: e.after})
	}
}

// failed goes on with a failure among the results.
func (m *model) failed(kind int, e event) {
	failure := m.note(kind, e)
	here := place{m.now, len(m.results)}
	if r := runOf(m.events[kind]); r.inBurst {
		var newest *burst
		if n := len(m.bursts); n > 0 && m.recalls(m.bursts[n-1].last) {
			newest = m.bursts[n-1]
		}
		if newest == nil || failure.began >= newest.first.order || m.now > newest.first.at+250*time.Millisecond {
			newest = &burst{first: r.first}
			m.bursts = append(m.bursts, newest)
		}
		newest.size++
		newest.last = here
	}
	m.hints = append(m.hints, hint{here, e.after})
	if m.state == breaker.Disabled {
		return
	}
	opens, asked := false, time.Duration(0)
	undecided := false
	for _, events := range m.events {
		r := runOf(events)
		undecided = undecided || r.undecided(m.now)
		if m.cfg.ConsecutiveFailures > 0 && r.count >= m.cfg.ConsecutiveFailures && !r.undecided(m.now) {
			opens, asked = true, max(asked, r.after)
		}
	}
	n := m.counts()
	n.Failed -= m.excused(n.Failed)
	calls := n.Succeeded + n.Failed
	if !undecided && (m.cfg.FailuresInWindow > 0 && n.Failed >= int64(m.cfg.FailuresInWindow) ||
		m.cfg.FailureRate > 0 && calls >= int64(m.cfg.MinCalls) && float64(n.Failed) >= m.cfg.FailureRate*float64(calls)) {
		opens, asked = true, max(asked, m.longestHint())
	}
	if opens {
		m.openAfter(asked)
	}
}

// excused returns how many of the failures in the window do not count because they are one with another.
func (m *model) excused(failed int64) int64 {
	var largest *burst
	for _, b := range m.bursts {
		if m.recalls(b.last) && (largest == nil || b.size >= largest.size) {
			largest = b
		}
	}
	if largest == nil {
		return 0
	}
	size := min(int64(largest.size), failed)
	if m.cfg.WindowCalls > 0 {
		size = min(size, int64(m.cfg.WindowCalls-(len(m.results)-largest.last.count)))
	}
	if 2*size < failed {
		return 0
	}
	return size - 1
}

// longestHint returns the longest RetryAfter of the failures in the window.
func (m *model) longestHint() (longest time.Duration) {
	for _, h := range m.hints {
		if m.recalls(h.place) {
			longest = max(longest, h.after)
		}
	}
	return longest
}

// remembers reports whether a result is in the window, but for the newest ones.
func (m *model) remembers(r *result, but int) bool {
	if m.cfg.WindowCalls > 0 {
		return slices.Index(m.results, r) >= len(m.results)-but-m.cfg.WindowCalls
	}
	return m.recent(r.at)
}

// recalls reports whether the newest result of some moment is in the window.
func (m *model) recalls(p place) bool {
	if m.cfg.WindowCalls > 0 {
		return p.count > len(m.results)-m.cfg.WindowCalls
	}
	return m.recent(p.at)
}

func (m *model) recent(at time.Duration) bool {
	w := m.cfg.Window / 10
	return at/w > m.now/w-10
}

// update follows a change of the Config.
func (m *model) update(cfg breaker.Config) {
	m.look()
	was := m.cfg
	m.cfg = filled(cfg)
	if was.WindowCalls != m.cfg.WindowCalls || was.Window != m.cfg.Window && m.cfg.WindowCalls == 0 {
		m.results, m.bursts, m.hints = nil, nil, nil
	}
}

func (m *model) counts() breaker.Counts {
	n := breaker.Counts{ConsecutiveFailures: int64(m.consecutive())}
	for _, r := range m.results {
		switch {
		case !m.remembers(r, 0) || r.taken:
		case r.failed:
			n.Failed++
		default:
			n.Succeeded++
		}
	}
	return n
}

// consecutive returns the larger of the two runs.
func (m *model) consecutive() int {
	return max(runOf(m.events[ofCalls]).count, runOf(m.events[ofStreams]).count)
}

// difference compares the model with what the breaker shows.
func (m *model) difference(s breaker.Stats) string {
	m.look()
	switch {
	case m.state != s.State:
		return fmt.Sprintf("state %v, not %v as in the model", s.State, m.state)
	case !reflect.DeepEqual(m.totals, totalsOf(s)):
		return fmt.Sprintf("totals %+v, not %+v", totalsOf(s), m.totals)
	case m.opens != s.ConsecutiveOpens:
		return fmt.Sprintf("%d consecutive openings, not %d", s.ConsecutiveOpens, m.opens)
	case m.state == breaker.Open && s.OpenLeft != m.until-m.now:
		return fmt.Sprintf("open for %v, not %v", s.OpenLeft, m.until-m.now)
	case (m.state == breaker.Closed || m.state == breaker.Disabled) && s.Window != m.counts():
		return fmt.Sprintf("window %+v, not %+v", s.Window, m.counts())
	case int64(m.consecutive()) != s.Window.ConsecutiveFailures:
		return fmt.Sprintf("%d consecutive failures, not %d", s.Window.ConsecutiveFailures, m.consecutive())
	}
	return ""
}

// modelConfig returns a Config; choose returns a number below n.
func modelConfig(choose func(n int) int) breaker.Config {
	cfg := breaker.Config{
		ConsecutiveFailures: 1 + choose(4),
		OpenFor:             4 * tick,
		MaxOpenFor:          4 * tick * time.Duration(1+choose(8)),
		Probes:              1 + choose(4),
		Patience:            []time.Duration{tick, 3 * tick, -1, 10 * tick}[choose(4)],
		SlowAfter:           []time.Duration{0, 0, 0, 12 * tick}[choose(4)],
		Window:              []time.Duration{10 * tick, 10 * tick, 30 * tick, 100 * tick}[choose(4)],
	}
	cfg.ProbeTimeout = []time.Duration{0, 2 * tick, 10 * tick}[choose(3)]
	cfg.MaxRetryAfter = []time.Duration{cfg.MaxOpenFor, 2 * tick, 40 * tick}[choose(3)]
	cfg.WindowCalls = []int{0, 0, 6, 9}[choose(4)]
	switch choose(4) {
	case 1:
		cfg.FailureRate, cfg.MinCalls = 0.5, 4
	case 2:
		cfg.FailureRate, cfg.MinCalls, cfg.ConsecutiveFailures = 0.6, 4, 0
	case 3:
		cfg.FailuresInWindow = 3
	}
	return cfg
}

// modelUpdate returns a change of a Config.
func modelUpdate(choose func(n int) int) func(*breaker.Config) {
	field, n := choose(9), 1+choose(5)
	return func(c *breaker.Config) {
		switch field {
		case 0:
			c.ConsecutiveFailures = n
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
			c.ProbeTimeout = time.Duration(n) * 3 * tick
		case 8:
			c.MaxRetryAfter = time.Duration(n) * 5 * tick
		}
	}
}

// configure makes a change of the Config as it was given.
func configure(b *breaker.Breaker, change func(*breaker.Config)) error {
	return b.Describe().Update(false, func(cfg any) error { change(cfg.(*breaker.Config)); return nil })
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
			if configure(circuit, change) == nil {
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
				m.endStream(w.call, e)
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
