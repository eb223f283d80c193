// Package sim runs code in a simulation that depends only on a seed: with the same seed, the run is the same.
// It is for tests only.
//
// A simulation runs in a bubble of testing/synctest. Whenever the code calls something outside of it, such as
// a store, a load or the work of a saga's step, the call waits in [World.Call]. When all goroutines are
// blocked, the scheduler draws random numbers from the seed. They decide which call continues and with which
// result, or that the clock advances by one step. Therefore only one thing happens at a time, in an order
// that the seed determines. If a timer of the code expires between two steps of the clock, the simulation
// sees the effect at the next step.
//
// A run is determined by its list of draws, which are random numbers. The draw 0 always represents the
// simplest choice: no fault, no action of an operator, or the first of several calls. If a run fails, the
// package shrinks it: it removes draws or replaces them by 0 as long as the run still fails. Then it prints
// the draws as a line for the corpus, a file of runs that every run of the tests repeats.
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

// A World is one run of a simulation: its clock, its faults, and the calls in flight.
type World struct {
	Step    time.Duration          // the step of the clock
	Trouble int                    // percentage of calls that have a fault or are delayed
	Prone   func(label string) int // returns the percentage for a call and replaces Trouble; may be nil
	Hold    int                    // maximum delay of a call, in steps of the clock
	Meddle  int                    // percentage of decisions of the scheduler that choose an act
	Idle    int                    // replaces Meddle while no call is ready, if it is more than Meddle
	Most    int                    // maximum number of calls at one time; more calls are a livelock
	Acts    []Act                  // the acts that the scheduler may choose

	tape   *tape
	driven bool // whether Drive was called; before that, Choose draws the plan of the run
	began  time.Time
	count  Count
	hash   uint64
	trace  *strings.Builder // nil if no trace is needed

	mu     sync.Mutex
	parked []*call
	notes  []string
	ended  bool
	kind   string // kind of the failure
	why    string

	at, atOnce int64 // the current time in nanoseconds, and the number of calls at that time
}

// An Act is an action of an operator, or another event from outside. It runs on its own goroutine.
type Act struct {
	Name string
	Do   func()
}

// A Count holds the numbers of calls, faults, acts and steps of the clock in a run.
type Count struct{ Calls, Faults, Acts, Steps int }

type call struct {
	label string
	ctx   context.Context
	can   []string
	known bool      // whether its fault has been drawn
	fault string    // one of can, or "" for no fault
	due   time.Time // the earliest time at which the call may continue
	err   error
	on    chan struct{}
}

// Choose draws a number from 0 to n-1. 0 must represent the simplest choice.
func (w *World) Choose(n int) int {
	if w.driven {
		return w.tape.draw(ofActs, n)
	}
	return w.tape.draw(ofPlan, n)
}

// Chance returns true with the given probability in percent.
func (w *World) Chance(percent int) bool { return w.Choose(100) >= 100-percent }

// Pick draws one of list. The first element must be the simplest choice.
func Pick[T any](w *World, list ...T) T { return list[w.Choose(len(list))] }

// Now returns the time since the run started.
func (w *World) Now() time.Duration { return time.Since(w.began) }

// Note adds a line to the trace. Lines that several goroutines add at the same time are sorted.
func (w *World) Note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.notes = append(w.notes, fmt.Sprintf("%9v  %s\n", w.Now(), fmt.Sprintf(format, args...)))
	}
}

// note writes the lines of Note into the trace, and then a line of the scheduler.
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

// Fail marks the run as failed and ends it. kind names the rule that was violated. A shrunk run must fail
// with the same kind.
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

// Call waits until the scheduler lets it continue. It returns the fault that was drawn, one of faults, or ""
// for no fault. If ctx is done while the call is delayed, Call returns ctx's error. label must be different
// for calls that are in flight at the same time. After End, Call returns the fault "over".
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

// Drive runs the simulation until done returns true, for at most d. It reports whether done returned true.
// Drive calls done whenever all goroutines are blocked.
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

// look makes one decision of the scheduler: it starts an act, lets a call continue, or advances the clock.
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

// ready returns the calls that may continue now. For new calls, it first draws faults and delays.
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

// Heal ends all faults: from then on, no call has a fault, delayed calls may continue, and there are no acts.
func (w *World) Heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Trouble, w.Prone, w.Acts = 0, nil, nil
	for _, c := range w.parked {
		c.due = time.Time{}
	}
}

// End ends the run and its trace. All calls continue with the fault "over".
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

// Done adds calls and faults that a simulation has made without Call to the counts of the run.
func (w *World) Done(c Count) {
	w.count.Calls += c.Calls
	w.count.Faults += c.Faults
}

// Counts returns the counts of the run so far.
func (w *World) Counts() Count { return w.count }

// draws holds the draws of a run in one list for each kind of decision. With separate lists, shrinking can
// change the draws of one kind without affecting the others.
type draws [4][]int

const (
	ofPlan = iota
	ofActs
	ofOrder
	ofTrouble
)

// A tape supplies the draws of a run: first the given draws, then random draws from rng, or zeros if rng is
// nil.
type tape struct {
	given draws
	rng   *rand.Rand // the source of further draws; if nil, they are 0
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
