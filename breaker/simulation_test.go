package breaker_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/sim"
)

// TestBreakerSimulation compares a breaker with the model while overlapping calls end in every way and order,
// hang, are canceled and stream, and operators change settings and states. After that, the breaker closes
// within a bounded time and number of calls.
func TestBreakerSimulation(t *testing.T) {
	sim.Simulation{Name: "breaker", Seeds: 300, Run: simulateBreaker}.Test(t)
}

func simulateBreaker(w *sim.World) {
	w.Step, w.Trouble, w.Hold, w.Meddle = tick, 40, 40, 40
	given := modelConfig(w.Choose)
	var mu sync.Mutex
	m := newModel(given)
	var seen changes
	circuit := watched(&seen, given)
	began := time.Now()
	locked := func(fn func()) {
		mu.Lock()
		defer mu.Unlock()
		m.now = time.Since(began)
		m.look()
		fn()
	}

	calls := 0
	cancels := make(map[int]context.CancelFunc)
	type stream struct {
		call *call
		work *linger.Work
	}
	var streams []stream
	begin := func(e end, d time.Duration, continues bool) (admitted bool) {
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
		ctx, work := linger.Begin(ctx)
		mu.Lock()
		cancels[id] = cancel
		mu.Unlock()
		var c *call
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
				e = end{err, breaker.Failure, 0}
			}
			canceled = ctx.Err() == context.Canceled
			if continues && e.err == nil {
				work.Continue()
			} else {
				work.End(nil)
			}
			return e.err
		})
		locked(func() {
			delete(cancels, id)
			if admitted {
				m.end(c, e, canceled, e.err == nil)
				switch {
				case c.returned && continues:
					streams = append(streams, stream{c, work})
				case c.returned: // its stream has ended already
					m.endStream(c, end{nil, breaker.Success, 0})
				}
				return
			}
			if _, ok := m.allow(deadline); ok {
				w.Fail("refused", "call %d, but the model admits it: %v, %+v", id, err, m)
			}
		})
		return admitted
	}
	endStream := func(i int, e end) {
		s := streams[i]
		streams = slices.Delete(streams, i, i+1)
		locked(func() {
			s.work.End(e.err)
			m.endStream(s.call, e)
		})
	}
	// Of the calls of a time, half fail.
	dependency := func() {
		begin(sim.Pick(w, ends...), time.Duration(w.Choose(20)/10*(1+w.Choose(16)))*tick, w.Choose(3) == 0)
	}
	w.Acts = []sim.Act{
		{Name: "a call", Do: dependency},
		{Name: "a call", Do: dependency},
		{Name: "a call", Do: func() { begin(end{errDown, breaker.Failure, 0}, 0, false) }},
		{Name: "a stream", Do: func() {
			begin(end{nil, breaker.Success, 0}, time.Duration(w.Choose(20)/15*(1+w.Choose(16)))*tick, true)
		}},
		{Name: "a stream ends", Do: func() {
			if len(streams) > 0 {
				endStream(w.Choose(len(streams)), sim.Pick(w, workEnds...))
			}
		}},
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
			change := modelUpdate(w.Choose)
			locked(func() {
				if configure(circuit, change) == nil {
					change(&given)
					m.update(given)
				}
			})
		}},
		{Name: "an operator", Do: func() {
			locked(func() {
				switch w.Choose(5) {
				case 0:
					circuit.Enable()
					if !m.free() {
						m.operated(breaker.Closed)
					}
				case 1:
					circuit.Reset()
					if m.free() {
						m.operated(breaker.Closed)
					}
				case 2:
					d := time.Duration(w.Choose(40)) * tick
					circuit.Trip(errDown, d)
					m.trip(d)
				case 3:
					circuit.ForceOpen(nil)
					m.operated(breaker.ForcedOpen)
				case 4:
					circuit.Disable()
					if m.state != breaker.Disabled {
						m.operated(breaker.Disabled)
					}
				}
			})
		}},
	}
	same := func() bool {
		locked(func() {
			if difference := m.difference(circuit.Stats()); difference != "" {
				w.Fail("difference", "%s: %+v", difference, m)
			}
		})
		return false
	}
	w.Drive(20*time.Second, same)

	w.Heal()
	w.Drive(2*tick, same) // what hung has ended
	locked(func() {
		circuit.Enable()
		if !m.free() {
			m.operated(breaker.Closed)
		}
	})
	// An opening, a probe after each step, which may be a stream that nobody ends, and what the
	// settings need to close.
	most := int(max(m.until-m.now, 0)/tick) + 20 + 10*int(given.OpenFor/tick)
	for i := 0; circuit.State() != breaker.Closed && !w.Failed(); i++ {
		if i > most {
			w.Fail("liveness", "%v after %d calls that would succeed", circuit.State(), i)
		}
		go begin(end{nil, breaker.Success, 0}, 0, i%2 == 0)
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
