package saga

import (
	"context"
	"fmt"
	"slices"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
)

// A look is what a parent sees of the children of a step.
type look struct {
	children []store.ChildRecord // those that count, in the order of their states
	statuses []Status            // of them
	next     []int               // the numbers of the ids under which they would be started again
}

// look looks at the children of a unit, whose number is known. Of those that a Retry has
// started again the last counts. The error is ErrNotFound if one was deleted.
func (e *execution) look(ctx context.Context, unit, children int) (*look, error) {
	list, err := e.r.store.Children(ctx, store.ChildrenRequest{Parent: e.rec.ID, Step: e.plan.Units[unit].Name})
	if err != nil {
		return nil, err
	}
	byID := make(map[string]*store.ChildRecord, len(list))
	for i := range list {
		byID[list[i].ID] = &list[i]
	}
	l := &look{}
	for n := range children {
		var c *store.ChildRecord
		for ; ; n += children {
			next := byID[ChildID(e.rec.ID, e.plan.Units[unit].Name, n)]
			if next == nil {
				break
			}
			c = next
		}
		if c == nil {
			return nil, ErrNotFound
		}
		l.children, l.statuses, l.next = append(l.children, *c), append(l.statuses, c.Status), append(l.next, n)
	}
	return l, nil
}

// childrenEnded reports whether a unit that waits for its children has something to do by now.
func (e *execution) childrenEnded() bool {
	ctx, cancel := e.storeCtx()
	defer cancel()
	for i := range e.m.Units {
		if !e.m.Pending(i) || !e.m.Waits(i, e.now()) {
			continue // a saga that is to turn back does not look at the children of its Do
		}
		u := &e.m.Units[i]
		if u.Children == 0 {
			continue
		}
		look, err := e.look(ctx, i, u.Children)
		if err != nil {
			continue
		}
		verdict, _ := machine.Judge(look.statuses, e.plan.Units[i].HasUndo)
		running := slices.ContainsFunc(look.statuses, func(s Status) bool { return !s.Ended() })
		if !running || u.Status == StepStarted && verdict != machine.ChildrenWait {
			return true
		}
	}
	return false
}

// hear reads the signals, if there may be new ones. It reports false if it could not. It
// reads them after a transaction of this saga, which may hold the only connection.
func (e *execution) hear(now time.Time) bool {
	if e.txUnit >= 0 {
		return true
	}
	if e.m.TimeUp(now) {
		e.heard = time.Time{} // the last look before the step goes on without its signal
	}
	if e.news.Swap(false) {
		e.m.LookAgain()
		e.heard = time.Time{}
	}
	if !e.plan.Awaits {
		return true
	}
	last := e.rec.Status != Running // no signal is kept any more
	due := e.heard.IsZero() || e.m.Awaiting(now) && time.Since(e.heard) >= e.r.config().Poll
	if !due && (!last || e.heardLast) {
		return true
	}
	began := time.Now()
	signals, err := e.readSignals()
	if err != nil {
		if e.deaf.IsZero() {
			e.deaf = began
		}
		e.pause(e.deaf)
		return false
	}
	e.heard, e.heardLast, e.deaf = began, last, time.Time{}
	e.m.Signals = signals
	e.id.signals.Store(&signals)
	return true
}

func (e *execution) readSignals() (map[string][]byte, error) {
	ctx, cancel := e.storeCtx()
	defer cancel()
	list, err := e.r.store.Signals(ctx, e.rec.ID)
	if err != nil {
		e.r.storeFailed(e.ctx, fmt.Errorf("saga: signals of %q: %w", e.rec.ID, err))
		return nil, err
	}
	signals := make(map[string][]byte, len(list))
	for _, sig := range list {
		signals[sig.Name] = sig.Payload
	}
	return signals, nil
}

// lookBack makes a saga due again that was written back to wait for something outside,
// if that has happened before the record was written: a signal or the end of a child makes
// only those sagas due that nobody holds. If the process dies in between, the saga is
// looked at again when wakeOutside says.
func (e *execution) lookBack() {
	if !e.over.Load() || !e.m.Going() || !e.m.Outside(e.now()) {
		return
	}
	if !e.news.Swap(false) && !e.signaled() && !e.childrenEnded() {
		return
	}
	ctx, cancel := e.storeCtx()
	defer cancel()
	if err := e.r.store.Hasten(ctx, e.rec.ID); err != nil {
		e.r.storeFailed(e.ctx, fmt.Errorf("saga: hasten %q: %w", e.rec.ID, err))
	}
	e.r.Wake()
}

// signaled reports whether there is a signal that a step waits for.
func (e *execution) signaled() bool {
	if !e.plan.Awaits {
		return false
	}
	signals, err := e.readSignals()
	if err != nil {
		return false
	}
	return e.m.News(signals)
}
