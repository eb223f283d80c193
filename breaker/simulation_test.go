package breaker_test

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/sim"
)

// TestBreakerSimulation compares a breaker with the model while calls that overlap end in
// every way and order, hang, and are canceled, and operators change its settings and force
// it. When the troubles are over, it closes within a bounded time and number of calls.
func TestBreakerSimulation(t *testing.T) {
	sim.Simulation{Name: "breaker", Seeds: 300, Run: simulateBreaker}.Test(t)
}

func simulateBreaker(w *sim.World) {
	w.Step, w.Trouble, w.Hold, w.Meddle = tick, 40, 40, 40
	cfg := breaker.Config{
		Failures:    1 + w.Choose(4),
		OpenFor:     4 * tick,
		MaxOpenFor:  4 * tick * time.Duration(1+w.Choose(8)),
		Probes:      1 + w.Choose(3),
		Successes:   1 + w.Choose(4),
		MaxHalfOpen: 20 * tick,
		WindowCalls: 6,
		Patience:    sim.Pick(w, tick, 3*tick, -1, 10*tick),
	}
	cfg.MaxRetryAfter = sim.Pick(w, cfg.MaxOpenFor, 2*tick)
	switch w.Choose(4) {
	case 1:
		cfg.FailureRate, cfg.MinCalls = 0.5, 4
	case 2:
		cfg.FailureRate, cfg.MinCalls, cfg.Failures = 0.5, 4, 0
		cfg.WindowCalls, cfg.Window = 0, 10*tick
	case 3:
		cfg.FailuresInWindow = 3
	}
	var mu sync.Mutex
	m := &model{state: breaker.Closed, cfg: cfg, probes: make(map[int]probe)}
	var seen changes
	cfg.OnChange = seen.hook
	circuit := breaker.New(steady(cfg))
	began := time.Now()
	locked := func(fn func()) {
		mu.Lock()
		defer mu.Unlock()
		m.now = time.Since(began)
		fn()
	}

	calls := 0
	cancels := make(map[int]context.CancelFunc)
	begin := func(e end, d time.Duration) (admitted bool) {
		calls++
		id := calls
		var deadline time.Duration
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		if d > 0 {
			deadline = time.Since(began) + d
			ctx, cancel = context.WithDeadline(ctx, began.Add(deadline))
			defer cancel()
		}
		mu.Lock()
		cancels[id] = cancel
		mu.Unlock()
		var c call
		var canceled bool
		err := circuit.Do(ctx, func(ctx context.Context) error {
			locked(func() { c, admitted = m.allow(deadline) })
			if !admitted {
				w.Fail("admitted", "call %d, but the model refuses it: %+v", id, m)
			}
			fault, err := w.Call(ctx, fmt.Sprintf("call %d: %v", id, e.err), "deaf")
			if fault == "deaf" { // it does not heed the end of its ctx, and hangs
				_, _ = w.Call(context.Background(), fmt.Sprintf("call %d goes on", id))
			}
			if err != nil {
				e = end{err, bad, 0}
			}
			canceled = ctx.Err() == context.Canceled
			return e.err
		})
		locked(func() {
			delete(cancels, id)
			if admitted {
				if canceled { // before its deadline
					c.deadline = 0
				}
				m.end(c, e, canceled, false)
				return
			}
			if _, ok := m.allow(deadline); ok {
				w.Fail("refused", "call %d, but the model admits it: %v, %+v", id, err, m)
			}
		})
		return admitted
	}
	// Of the calls of a time, half fail.
	dependency := func() { begin(sim.Pick(w, ends...), time.Duration(w.Choose(20)/10*(1+w.Choose(16)))*tick) }
	w.Acts = []sim.Act{
		{Name: "a call", Do: dependency},
		{Name: "a call", Do: dependency},
		{Name: "a call", Do: dependency},
		{Name: "a call", Do: func() { begin(end{errDown, bad, 0}, 0) }},
		{Name: "cancel", Do: func() {
			mu.Lock()
			var first int
			for id := range cancels {
				if first == 0 || id < first {
					first = id
				}
			}
			cancel := cancels[first]
			mu.Unlock()
			if cancel != nil {
				cancel()
			}
		}},
		{Name: "update", Do: func() {
			field, n := w.Choose(7), 1+w.Choose(5)
			change := func(c *breaker.Config) {
				switch field {
				case 0:
					c.Failures = n
				case 1:
					c.OpenFor, c.MaxOpenFor = time.Duration(n)*tick, time.Duration(2*n)*tick
				case 2:
					c.Probes = n
				case 3:
					c.Successes = n
				case 4:
					c.WindowCalls, c.Window = 5+n, 0
				case 5:
					c.Patience = time.Duration(n) * tick
				case 6:
					c.MaxHalfOpen = time.Duration(n) * 5 * tick
				}
			}
			locked(func() { m.look(); m.update(change) })
			if err := circuit.Update(change); err != nil {
				w.Fail("update", "%v", err)
			}
		}},
		{Name: "an operator", Do: func() {
			locked(func() {
				switch free := m.state != breaker.ForcedOpen && m.state != breaker.Disabled; w.Choose(5) {
				case 0:
					circuit.Enable()
					if !free {
						m.enter(breaker.Closed)
					}
				case 1:
					circuit.Reset()
					if free {
						m.enter(breaker.Closed)
					}
				case 2:
					d := time.Duration(w.Choose(40)) * tick
					circuit.Trip(errDown, d)
					if free {
						if m.state != breaker.Open {
							m.opens++
						}
						m.open(cmp.Or(d, m.byItself()))
					}
				case 3:
					circuit.ForceOpen(nil)
					m.enter(breaker.ForcedOpen)
				case 4:
					circuit.Disable()
					if m.state != breaker.Disabled {
						m.enter(breaker.Disabled)
					}
				}
			})
		}},
	}
	same := func() bool {
		locked(func() {
			s := circuit.Stats()
			state := m.look()
			switch {
			case state != s.State:
				w.Fail("state", "%v, not %v as in the model: %+v", s.State, state, m)
			case m.totals != s.Totals:
				w.Fail("totals", "%+v, not %+v", s.Totals, m.totals)
			case m.opens != int(s.OpensInARow):
				w.Fail("openings", "%d in a row, not %d", s.OpensInARow, m.opens)
			case state == breaker.Open && s.OpenLeft != m.until-m.now:
				w.Fail("open", "for %v, not %v", s.OpenLeft, m.until-m.now)
			case (state == breaker.Closed || state == breaker.Disabled) && s.Window != m.counts():
				w.Fail("window", "%+v, not %+v", s.Window, m.counts())
			}
		})
		return false
	}
	w.Drive(20*time.Second, same)

	w.Heal()
	w.Drive(2*tick, same) // what hung has ended
	locked(func() {
		circuit.Enable()
		if m.state == breaker.ForcedOpen || m.state == breaker.Disabled {
			m.enter(breaker.Closed)
		}
	})
	// An opening, a probe after each step, and what the settings need to close.
	most := int(max(m.until-m.now, 0)/tick) + 20
	for i := 0; circuit.State() != breaker.Closed && !w.Failed(); i++ {
		if i > most {
			w.Fail("liveness", "%v after %d calls that would succeed", circuit.State(), i)
		}
		go begin(end{nil, good, 0}, 0)
		w.Drive(tick, same)
	}
	if !w.Failed() {
		from := breaker.Closed
		for i, change := range seen.all {
			if change.From != from || change.To == from {
				w.Fail("changes", "change %d: %+v, after %v", i, change, from)
			}
			from = change.To
		}
	}
}
