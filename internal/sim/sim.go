// Package sim runs the code of a package in a simulation that a seed decides: the same
// seed makes the same run. It is for tests alone.
//
// A simulation runs in a bubble of testing/synctest. Every call of the code to the outside
// (a store, a load, a step's work) parks in [World.Call]. When all goroutines are blocked,
// one goroutine draws by the seed which call goes on, and how it ends, or lets the clock go
// on by a step. So one thing happens at a time, in an order that the seed decides. What the
// code does between two steps of the clock, by its own jitter, is seen at the next step.
//
// A run is a list of draws in which 0 is always the plainest: no fault, no act of an
// operator, the first of several calls. A run that fails is made shorter by leaving out and
// zeroing draws while it still fails, and is printed as a line for the corpus, which every
// run of the tests repeats.
package sim

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"
)

// A World is one run of a simulation: its clock, its troubles, and the calls under way.
type World struct {
	Step    time.Duration          // of the clock
	Trouble int                    // percent of the calls that have a fault or are held
	Prone   func(label string) int // the same for each call, instead of Trouble; may be nil
	Hold    int                    // steps that a call is held, at most
	Meddle  int                    // percent of the looks at which an act happens
	Idle    int                    // the same while no call is ready, if more than Meddle
	Most    int                    // calls at one instant; more are a livelock
	Acts    []Act                  // what operators do

	tape   *tape
	driven bool // the plan is made
	began  time.Time
	count  Count
	hash   uint64
	trace  *strings.Builder // nil: not wanted

	mu     sync.Mutex
	parked []*call
	notes  []string
	ended  bool
	kind   string // of the failure
	why    string

	at, atOnce int64 // the instant, and the calls of it
}

// An Act is something that an operator, or the world, does. It has a goroutine of its own.
type Act struct {
	Name string
	Do   func()
}

// A Count is what was done.
type Count struct{ Calls, Faults, Acts, Steps int }

type call struct {
	label string
	ctx   context.Context
	can   []string
	known bool      // its fault is drawn
	fault string    // one of can, or ""
	due   time.Time // not before
	err   error
	on    chan struct{}
}

// Choose returns a number below n. 0 is the plainest.
func (w *World) Choose(n int) int {
	if w.driven {
		return w.tape.draw(ofActs, n)
	}
	return w.tape.draw(ofPlan, n)
}

// Chance reports true with a probability in percent.
func (w *World) Chance(percent int) bool { return w.Choose(100) >= 100-percent }

// Pick returns one of list. The first is the plainest.
func Pick[T any](w *World, list ...T) T { return list[w.Choose(len(list))] }

// Now is the time since the run began.
func (w *World) Now() time.Duration { return time.Since(w.began) }

// Note writes a line into the trace. What goroutines note at one time is sorted.
func (w *World) Note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.notes = append(w.notes, fmt.Sprintf("%9v  %s\n", w.Now(), fmt.Sprintf(format, args...)))
	}
}

// note writes what was noted into the trace, and then a line.
func (w *World) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	slices.Sort(w.notes)
	w.notes = append(w.notes, fmt.Sprintf("%9v  %s\n", w.Now(), fmt.Sprintf(format, args...)))
	for _, line := range w.notes {
		h := fnv.New64a()
		_, _ = fmt.Fprintf(h, "%x%s", w.hash, line)
		w.hash = h.Sum64()
		if w.trace != nil {
			w.trace.WriteString(line)
		}
	}
	w.notes = w.notes[:0]
}

// Fail ends the run. kind says what was violated: a run that is made shorter fails in the
// same kind.
func (w *World) Fail(kind, format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.kind == "" && !w.ended {
		w.kind, w.why = kind, fmt.Sprintf("at %v: %s", w.Now(), fmt.Sprintf(format, args...))
	}
}

// Failed reports whether Fail was called.
func (w *World) Failed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.kind != ""
}

// Call parks until the scheduler lets it go on, and returns the fault that was drawn, "" for
// none. A ctx that ends meanwhile ends a call that is held, with the error of ctx. label
// tells the calls that are under way at a time apart. After End, Call returns "over".
func (w *World) Call(ctx context.Context, label string, faults ...string) (fault string, err error) {
	c := &call{label: label, ctx: ctx, can: faults, on: make(chan struct{})}
	w.mu.Lock()
	if w.ended {
		w.mu.Unlock()
		return "over", nil
	}
	w.parked = append(w.parked, c)
	w.mu.Unlock()
	<-c.on
	return c.fault, c.err
}

// Drive lets things happen until done reports true, for d at most. It reports whether done
// did. done is called when all goroutines are blocked.
func (w *World) Drive(d time.Duration, done func() bool) bool {
	w.driven = true
	for end := w.Now() + d; ; {
		synctest.Wait()
		switch {
		case w.Failed():
			return false
		case done != nil && done():
			return true
		case w.Now() >= end:
			return false
		}
		w.look()
	}
}

// look does one thing.
func (w *World) look() {
	ready := w.ready()
	percent := w.Meddle
	if len(ready) == 0 {
		percent = max(percent, w.Idle)
	}
	if len(w.Acts) > 0 && w.Chance(percent) {
		act := Pick(w, w.Acts...)
		w.count.Acts++
		w.note("%s", act.Name)
		go act.Do()
		return
	}
	if len(ready) == 0 {
		w.count.Steps++
		time.Sleep(w.Step - w.Now()%w.Step)
		return
	}
	c := ready[w.tape.draw(ofOrder, len(ready))]
	if now := int64(w.Now()); now != w.at {
		w.at, w.atOnce = now, 0
	}
	if w.atOnce++; w.Most > 0 && w.atOnce > int64(w.Most) {
		w.Fail("livelock", "%d calls at one instant, the last is %s", w.atOnce, c.label)
		return
	}
	w.count.Calls++
	how := c.fault
	if c.err != nil {
		how = c.err.Error()
	}
	w.note("%s %s", c.label, how)
	w.release(c)
}

// ready returns the calls that may go on now, and draws the troubles of new ones.
func (w *World) ready() (ready []*call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	slices.SortStableFunc(w.parked, func(a, b *call) int { return cmp.Compare(a.label, b.label) })
	now := time.Now()
	for _, c := range w.parked {
		if !c.known {
			c.known = true
			percent := w.Trouble
			if w.Prone != nil {
				percent = w.Prone(c.label)
			}
			if percent > 0 && w.tape.draw(ofTrouble, 100) >= 100-percent {
				w.count.Faults++
				if k := w.tape.draw(ofTrouble, len(c.can)+1); k < len(c.can) {
					c.fault = c.can[k]
				} else {
					c.due = now.Add(time.Duration(1+w.tape.draw(ofTrouble, max(1, w.Hold))) * w.Step)
				}
			}
		}
		if c.ctx != nil && c.due.After(now) && c.ctx.Err() != nil {
			c.due, c.err = now, c.ctx.Err()
		}
		if !c.due.After(now) {
			ready = append(ready, c)
		}
	}
	return ready
}

func (w *World) release(c *call) {
	w.mu.Lock()
	w.parked = slices.DeleteFunc(w.parked, func(p *call) bool { return p == c })
	w.mu.Unlock()
	close(c.on)
}

// Heal ends the troubles: no call has a fault any more, and what is held goes on. Nobody
// meddles.
func (w *World) Heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Trouble, w.Prone, w.Acts = 0, nil, nil
	for _, c := range w.parked {
		c.due = time.Time{}
	}
}

// End lets all calls go on, as "over". The trace ends here.
func (w *World) End() {
	if w.ended {
		return
	}
	w.note("end %s", w.kind)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	for _, c := range w.parked {
		c.fault = "over"
		close(c.on)
	}
	w.parked = nil
}

// Done counts what a simulation has done without Call.
func (w *World) Done(c Count) {
	w.count.Calls += c.Calls
	w.count.Faults += c.Faults
}

// Counts returns what was done so far.
func (w *World) Counts() Count { return w.count }

// Draws are those of a run, by what they decide, so that one kind can be changed while the
// others stay.
type draws [4][]int

const (
	ofPlan = iota
	ofActs
	ofOrder
	ofTrouble
)

// A tape has the draws of a run: those given, and then those of a seed, or zeros.
type tape struct {
	given draws
	rng   *rand.Rand // nil: zeros
	drawn draws
}

func (t *tape) draw(kind, n int) (v int) {
	switch at := len(t.drawn[kind]); {
	case n < 2:
		return 0
	case at < len(t.given[kind]):
		v = t.given[kind][at] % n
	case t.rng != nil:
		v = t.rng.IntN(n)
	}
	t.drawn[kind] = append(t.drawn[kind], v)
	return v
}
