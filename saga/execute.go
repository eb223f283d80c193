package saga

import (
	"context"
	"errors"
	"fmt"
	"log"
	"runtime/debug"
	"time"

	"github.com/go-resilience/resilience/internal/panics"
	"github.com/go-resilience/resilience/internal/sqltx"
	"github.com/go-resilience/resilience/saga/internal/machine"
)

// run runs the saga until it ends, is written back to wait for its next attempt, is
// handed over because the runner stops, or is lost.
func (e *execution) run() {
	defer e.lookBack()
	defer func() { e.r.drop(e.rec, e.lease) }()
	defer e.stop(nil)
	defer e.timer.Stop()
	if !e.load() {
		return
	}
	for !e.over.Load() && !e.lost() {
		_ = e.heed()
		if now := e.now(); e.hear(now) && !e.step(now) {
			break
		}
	}
	if !e.over.Load() {
		e.r.figures.count(func(s *Stats) { s.Lost++ })
		e.r.tellOf(e.ctx, &e.rec, Event{Kind: EventLost, At: e.now()})
	}
	e.leave()
	if e.over.Load() && e.m.Status == Running && e.heed() {
		e.r.recall(e.ctx, e.rec.ID)
	}
}

// step records what follows from the results so far, begins the attempts that may begin, and
// waits for the next result. It reports false if the saga is lost.
func (e *execution) step(now time.Time) bool {
	// A transaction of this saga may hold the only connection that can write. It will commit
	// what there is to record.
	free := e.txUnit < 0
	if free {
		e.m.Advance(now)
	}
	if free {
		if !e.record(now) {
			return false
		}
		if e.over.Load() || !e.hear(now) {
			return true
		}
		e.launch(now)
	}
	e.turnBack(now)
	e.wait(now)
	if e.open != nil {
		e.commitOpen()
	}
	return true
}

// load makes the machine and the state from the record. It reports false if it cannot:
// then the saga is stuck.
func (e *execution) load() bool {
	var err error
	e.m, err = machine.Load(e.plan, &e.rec)
	if err == nil {
		e.data = e.rec.Data
		e.s, err = e.p.decode(e.data)
	}
	e.carried = e.m.Carried
	e.m.LookAgain()
	e.extract()
	if e.rec.Previous != "" {
		e.m.TakeOver(e.rec.Previous)
	}
	if limit := e.r.config().MaxTakeovers; err == nil && limit >= 0 && e.rec.Takeovers > limit {
		err = fmt.Errorf("saga: taken over %d times without a result", e.rec.Takeovers)
	}
	if err == nil {
		if e.rec.CancelRequested {
			e.m.Cancel(e.rec.CancelNote)
		}
		return true
	}
	e.m.Stick("", err)
	req := e.request(true, 0)
	if e.s == nil {
		req.Data, req.Steps = e.rec.Data, e.rec.Steps // as they are, since they cannot be read
	}
	e.writeLast(req)
	return false
}

// launch starts the attempts that may begin.
func (e *execution) launch(now time.Time) {
	if e.lost() || e.r.isDraining() {
		return
	}
	for i := e.m.Ready(0, now); i >= 0; i = e.m.Ready(i+1, now) {
		d := &e.plan.Units[i]
		tx := d.DoTx
		if e.m.Units[i].Status == StepUndoing {
			tx = d.UndoTx
		}
		if tx && e.txUnit >= 0 {
			continue // one at a time
		}
		if tx {
			e.txUnit = i
		}
		u := &e.m.Units[i]
		res := result{unit: i, s: e.s, children: u.Children}
		// A step that has children waits for them, unless it has failed since.
		res.retried = u.Children > 0 && u.WaitingSince.IsZero()
		if !e.plan.Chain {
			res.s, res.err = e.p.decode(e.data)
			res.base = e.data
		}
		res.op, res.attempt = e.m.Begin(i)
		ctx, cancel := context.WithCancelCause(e.ctx)
		e.running[i] = cancel
		e.r.figures.count(func(s *Stats) { s.InFlight++ })
		go e.attempt(ctx, res, tx)
	}
}

// attempt calls a Do or an Undo, on a goroutine of its own, and sends the result. Its ctx
// is independent of that of the Start.
func (e *execution) attempt(ctx context.Context, res result, tx bool) {
	ctx, res.end = context.WithTimeout(ctx, e.timeout(&e.plan.Units[res.unit], tx))
	ctx = withAttempt(ctx, &e.id, res.unit, res.attempt, res.op)
	res.ctx = ctx
	defer func() {
		cause := context.Cause(ctx)
		res.cut = errors.Is(cause, errDraining) || errors.Is(cause, errLost)
		if res.tx == nil {
			res.end()
		}
		e.results <- res
	}()
	defer func() {
		if v := recover(); v != nil {
			stack := debug.Stack()
			res.err = panics.New(fmt.Sprintf("saga: panic: %v", v), v, stack)
			log.Printf("saga: step %s of %s panicked: %v\n%s", e.plan.Units[res.unit].Name, e.plan.Name, v, stack)
		}
		if res.err != nil && res.tx != nil {
			if endedItself(ctx, res.tx.Rollback()) {
				res.err = Abort(fmt.Errorf("%w: %w", errTxEnded, res.err))
			}
			res.tx = nil
		}
	}()
	if res.err != nil {
		return // its copy of the state could not be made
	}
	res.err = errExited
	began := time.Now()
	defer func() { res.took = time.Since(began) }()
	res.err = e.perform(ctx, &res, tx)
}

// perform does the work of an attempt.
func (e *execution) perform(ctx context.Context, res *result, tx bool) (err error) {
	switch {
	case e.plan.Units[res.unit].Child:
		return e.attend(ctx, res)
	case !tx:
		return e.p.call(ctx, res.unit, res.op, res.s)
	}
	begin := ctx
	if res.attempt > 1 {
		begin = sqltx.Anew(ctx) // else each attempt may meet a server that takes no writes any more
	}
	if res.tx, err = e.r.tx.Begin(begin); err != nil {
		return err
	}
	return e.p.callTx(ctx, res.tx, res.unit, res.op, res.s)
}

// turnBack ends the attempts of a saga that is to turn back, except for that of a pivot
// whose answer must be known.
func (e *execution) turnBack(now time.Time) {
	for i, cancel := range e.running {
		if cancel != nil && e.m.Useless(i, now) {
			cancel(&turnedBack{e.m.Turning(now)})
		}
	}
}

// wait waits until there is something to do, and takes in all that has come by then, so that
// parallel steps that end together are recorded together.
func (e *execution) wait(now time.Time) {
	var alarm <-chan time.Time
	at, ok := e.m.Alarm(now)
	if e.txUnit >= 0 || e.r.isDraining() {
		at, ok = e.m.Deadline(now) // no attempt begins now
	}
	if t := now.Add(e.r.config().Poll - time.Since(e.heard)); e.txUnit < 0 && e.m.Awaiting(now) && (!ok || t.Before(at)) {
		at, ok = t, true
	}
	if ok {
		t := time.NewTimer(at.Sub(now))
		defer t.Stop()
		alarm = t.C
	}
	select {
	case res := <-e.results:
		e.collect(res)
	case <-alarm:
	case <-e.signal:
	}
	for { // whatever it was, the rest has come too
		select {
		case res := <-e.results:
			e.collect(res)
		case <-e.signal:
		default:
			return
		}
	}
}

// collect takes in the result of an attempt.
func (e *execution) collect(res result) {
	cancel := e.running[res.unit]
	e.running[res.unit] = nil
	e.r.figures.count(func(s *Stats) { s.InFlight-- })
	if res.tx != nil {
		end := res.end
		res.end = func() { end(); cancel(nil) } // later: canceling ctx rolls tx back
		e.open = &res
		return
	}
	cancel(nil)
	if e.waiting(&res) {
		return
	}
	if res.unit == e.txUnit {
		e.txUnit = -1
		e.restore()
	} else {
		res.err = e.keep(&res)
	}
	e.conclude(&res)
}

// waiting takes in the result of an attempt that found children that have not ended, and
// reports whether it is one.
func (e *execution) waiting(res *result) bool {
	pending, ok := res.err.(*errPending)
	if !ok {
		return false
	}
	res.err = nil
	if res.err = e.keep(res); res.err != nil {
		return false // begin has changed the state, which it must not
	}
	now := e.now()
	e.m.Wait(res.unit, pending.children, now, now.Add(e.r.config().Poll))
	return true
}

// leave ends the attempts of a saga that is no longer held, and waits for them.
func (e *execution) leave() {
	e.stop(errLost)
	e.txUnit = -1 // a transaction ends with its ctx
	for i := range e.running {
		if e.running[i] == nil {
			continue
		}
		res := <-e.results
		e.r.figures.count(func(s *Stats) { s.InFlight-- })
		if res.tx != nil {
			_ = res.tx.Rollback()
			res.end()
		}
		e.attempted(&res, OutcomeInterrupted)
	}
}
