package saga

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// An execution is one saga that a runner holds, in one epoch. The goroutine of run owns
// the machine, the state and all writes. Each attempt has a goroutine of its own, which
// sends it a result.
type execution struct {
	r    *Runner
	p    *registered
	plan *plan
	id   identity
	rec  Record // as claimed; Status, Data and Steps as last recorded
	seq  int64  // of the record now

	m    *machine
	s    any    // the state: a *S
	data []byte // s, encoded

	results   chan result
	running   []context.CancelCauseFunc // by unit
	txUnit    int                       // the unit that has a transaction, or -1
	open      *result                   // the result of txUnit, to be committed
	carried   string                    // of the machine, for the attempts
	heard     time.Time                 // when the signals were last read, by the local clock
	heardLast bool                      // they were read after the saga had turned back
	deaf      time.Time                 // since when that has failed; zero if it has not
	over      bool                      // released or ended, and recorded so
	unwritten time.Time                 // since when something is to be recorded later; zero if nothing is

	ctx    context.Context // of the attempts: ends when the saga is lost
	stop   context.CancelCauseFunc
	since  time.Time     // rec.Now by the local clock
	lease  *time.Timer   // fires at the end of the lease
	signal chan struct{} // a field below has changed

	mu      sync.Mutex
	granted time.Duration // the length of the lease
	until   time.Time     // its end, by the local clock
	gone    bool
	asked   *string // the note of a cancellation request
	news    bool    // a signal has come, or a child has ended
}

// A result is the result of an attempt.
type result struct {
	unit     int
	op       Op
	attempt  int
	err      error
	took     time.Duration
	s, base  any                // its copy of the state, and the copy before
	children int                // of the unit, as recorded
	retried  bool               // start those again that have failed
	cut      bool               // its ctx ended because the runner stopped or lost the saga
	ctx      context.Context    // of the attempt
	tx       *sql.Tx            // still open after a DoTx or UndoTx that succeeded
	end      context.CancelFunc // ends ctx, and with it tx
}

// newExecution returns the execution of a saga that was claimed at since, or later, by
// the local clock.
func newExecution(r *Runner, p *registered, rec Record, since time.Time, lease time.Duration) *execution {
	e := &execution{
		r: r, p: p, plan: p.planned(), rec: rec, seq: rec.Seq, since: since, txUnit: -1,
		results: make(chan result, len(p.planned().units)),
		running: make([]context.CancelCauseFunc, len(p.planned().units)),
		signal:  make(chan struct{}, 1), granted: lease, until: since.Add(lease),
		id: identity{p: p.planned(), id: rec.ID, epoch: rec.Epoch},
	}
	e.ctx, e.stop = context.WithCancelCause(r.base)
	e.lease = time.AfterFunc(time.Until(e.until), e.lose)
	return e
}

// run runs the saga until it ends, is written back to wait for its next attempt, is
// handed over because the runner stops, or is lost.
func (e *execution) run() {
	defer e.lookBack()
	defer e.r.drop(e)
	defer e.stop(nil)
	defer e.lease.Stop()
	if !e.load() {
		return
	}
	for !e.over && !e.lost() {
		_ = e.heed()
		now := e.now()
		if !e.hear(now) {
			continue
		}
		// A transaction of this saga may hold the only connection that can write. It
		// will commit what there is to record.
		if e.txUnit < 0 {
			e.m.advance(now)
			e.report(now)
			if !e.record(now) {
				break
			}
			if !e.over && !e.hear(now) {
				continue
			}
			e.launch(now)
		} else {
			e.report(now)
		}
		e.turnBack(now)
		e.wait(now)
		if e.open != nil {
			e.commitOpen()
		}
	}
	if !e.over {
		e.r.count.lost.Add(1)
		e.r.tellOf(e.ctx, &e.rec, Event{Kind: EventLost, At: e.now()})
	}
	e.leave()
	if e.over && e.m.status == Running && e.heed() {
		e.r.recall(e.ctx, e.rec.ID)
	}
}

// load makes the machine and the state from the record. It reports false if it cannot:
// then the saga is stuck.
func (e *execution) load() bool {
	var err error
	e.m, err = loadMachine(e.plan, &e.rec)
	if err == nil {
		e.data = e.rec.Data
		e.s, err = e.p.decode(e.data)
	}
	e.carried = e.m.carried
	e.m.lookAgain()
	e.extract()
	if e.rec.Previous != "" {
		e.m.takeOver(e.rec.Previous)
	}
	if limit := e.r.config().MaxTakeovers; err == nil && limit >= 0 && e.rec.Takeovers > limit {
		err = fmt.Errorf("saga: taken over %d times without a result", e.rec.Takeovers)
	}
	if err == nil {
		if e.rec.CancelRequested {
			e.m.cancel(e.rec.CancelNote)
		}
		return true
	}
	e.m.stick("", err)
	req := e.request(true, 0)
	if e.s == nil {
		req.Data, req.Steps = e.rec.Data, e.rec.Steps // as they are, since they cannot be read
	}
	e.writeLast(req)
	return false
}

// now returns the store's clock, as well as it is known here.
func (e *execution) now() time.Time { return e.rec.Now.Add(time.Since(e.since)) }

// cancel passes on a request to turn back.
func (e *execution) cancel(note string) {
	e.mu.Lock()
	e.asked = &note
	e.mu.Unlock()
	e.nudge()
}

func (e *execution) nudge() {
	select {
	case e.signal <- struct{}{}:
	default:
	}
}

// heed takes in a request to turn back, and reports whether it is news.
func (e *execution) heed() bool {
	e.mu.Lock()
	note := e.asked
	e.asked = nil
	e.mu.Unlock()
	if note == nil || !e.m.cancel(*note) {
		return false
	}
	e.rec.CancelRequested, e.rec.CancelNote = true, *note
	return true
}

// launch starts the attempts that may begin.
func (e *execution) launch(now time.Time) {
	if e.over || e.lost() || e.r.isDraining() {
		return
	}
	for i := e.m.ready(0, now); i >= 0; i = e.m.ready(i+1, now) {
		d := &e.plan.units[i]
		tx := d.doTx
		if e.m.units[i].Status == StepUndoing {
			tx = d.undoTx
		}
		if tx && e.txUnit >= 0 {
			continue // one at a time
		}
		if tx {
			e.txUnit = i
		}
		u := &e.m.units[i]
		res := result{unit: i, s: e.s, children: u.Children}
		// A step that has children waits for them, unless it has failed since.
		res.retried = u.Status == StepStarted && u.Children > 0 && u.WaitingSince.IsZero()
		if !e.plan.chain {
			res.s, res.err = e.p.decode(e.data)
			res.base, _ = e.p.decode(e.data)
		}
		res.op, res.attempt = e.m.begin(i)
		e.m.work[i].due = now.Add(e.timeout(d, tx))
		ctx, cancel := context.WithCancelCause(e.ctx)
		e.running[i] = cancel
		e.r.count.inFlight.Add(1)
		go e.attempt(ctx, res, tx)
	}
}

// errTxEnded is the error of a DoTx or UndoTx that has committed or rolled back its
// transaction itself. It may have taken effect, and the log does not say so.
var errTxEnded = errors.New("saga: the step has ended its transaction itself")

// endedItself reports whether err, of a transaction under ctx, says that the step has
// ended the transaction. The end of ctx also ends it.
func endedItself(ctx context.Context, err error) bool {
	return errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil
}

var errExited = errors.New("saga: a step called runtime.Goexit")

// timeout returns how long an attempt may take.
func (e *execution) timeout(u *unit, tx bool) time.Duration {
	d := cmp.Or(u.timeout, defaultTimeout)
	if tx && e.r.tx.Exclusive() {
		d = min(d, e.term()/2) // no heartbeat is written meanwhile
	}
	return d
}

// attempt calls a Do or an Undo, on a goroutine of its own, and sends the result. Its ctx
// is independent of that of the Start.
func (e *execution) attempt(ctx context.Context, res result, tx bool) {
	ctx, res.end = context.WithTimeout(ctx, e.timeout(&e.plan.units[res.unit], tx))
	ctx = &attemptContext{ctx, &e.id, res.unit, res.attempt, res.op}
	res.ctx = ctx
	defer func() {
		if v := recover(); v != nil {
			res.err = &PanicError{v, debug.Stack()}
		}
		if res.err != nil && res.tx != nil {
			if endedItself(ctx, res.tx.Rollback()) {
				res.err = Abort(fmt.Errorf("%w: %w", errTxEnded, res.err))
			}
			res.tx = nil
		}
		cause := context.Cause(ctx)
		res.cut = errors.Is(cause, ErrDraining) || errors.Is(cause, ErrLost)
		if res.tx == nil {
			res.end()
		}
		e.results <- res
	}()
	if res.err != nil {
		return // its copy of the state could not be made
	}
	res.err = errExited
	began := time.Now()
	defer func() { res.took = time.Since(began) }()
	if e.plan.units[res.unit].child {
		res.err = e.attend(ctx, &res)
		return
	}
	if tx {
		var err error
		if res.tx, err = e.r.tx.Begin(ctx); err != nil {
			res.err = err
			return
		}
		res.err = e.p.callTx(ctx, res.tx, res.unit, res.op, res.s)
		return
	}
	res.err = e.p.call(ctx, res.unit, res.op, res.s)
}

// turnBack ends the attempts of a saga that is to turn back, except for that of a pivot
// whose answer must be known.
func (e *execution) turnBack(now time.Time) {
	if !e.m.turning(now) {
		return
	}
	for i, cancel := range e.running {
		if cancel != nil && e.m.units[i].Status == StepStarted && !e.m.mustKnow(i) {
			cancel(&turnedBack{e.m.wish})
		}
	}
}

// report reports that the saga makes no progress.
func (e *execution) report(now time.Time) {
	at, ok := e.m.stalled(e.r.config().StalledAfter)
	if e.over || !ok || now.Before(at) {
		return
	}
	e.m.reported = now // recorded with the next commit
	e.r.count.stalled.Add(1)
	in := newInstance(e.snapshot(now), e.plan)
	for i := range in.Steps {
		if w := &e.m.work[i]; w.busy && !now.Before(w.due) {
			in.Steps[i].Error = fmt.Sprintf("saga: an attempt runs %v after the end of its ctx", now.Sub(w.due).Round(time.Second))
		}
	}
	e.r.tellOf(e.ctx, &e.rec, Event{Kind: EventStalled, Took: in.Since(), Err: recordedReason(in.LastError), At: now})
	onStalled := e.r.config().OnStalled
	if onStalled == nil {
		slog.WarnContext(e.ctx, "saga: no progress", "saga", in.Saga, "id", in.ID, "since", in.Since(), "error", in.LastError)
		return
	}
	hook(e.ctx, "OnStalled", onStalled, StalledSaga{e.r.Name(), *in})
}

// snapshot returns the record as it would be if it were written now.
func (e *execution) snapshot(now time.Time) Record {
	rec := e.rec
	rec.Status, rec.Data, rec.Steps, rec.Seq = e.m.status, e.data, e.m.encode(), e.seq
	rec.Failures, rec.Takeovers, rec.LastError = e.m.failures, e.m.takeovers, e.m.lastError
	rec.Now = now
	return rec
}

// wait waits until there is something to do, and takes in all results that have arrived,
// so that parallel steps that end together are recorded together.
func (e *execution) wait(now time.Time) {
	if e.over {
		return
	}
	var alarm <-chan time.Time
	at, ok := e.m.alarm(now)
	if e.txUnit >= 0 || e.r.isDraining() {
		at, ok = e.m.deadline(now) // no attempt begins now
	}
	if t := now.Add(e.r.config().Poll - time.Since(e.heard)); e.m.awaiting(now) && (!ok || t.Before(at)) {
		at, ok = t, true
	}
	if t, is := e.m.stalled(e.r.config().StalledAfter); is && (!ok || t.Before(at)) {
		at, ok = t, true
	}
	if t := e.unwritten.Add(laterFor); e.txUnit < 0 && !e.unwritten.IsZero() && (!ok || t.Before(at)) {
		at, ok = t, true
	}
	if ok {
		t := time.NewTimer(at.Sub(now))
		defer t.Stop()
		alarm = t.C
	}
	select {
	case res := <-e.results:
		e.take(res)
	case <-alarm:
		return
	case <-e.signal:
		return
	}
	for {
		select {
		case res := <-e.results:
			e.take(res)
		default:
			return
		}
	}
}

// take takes in the result of an attempt.
func (e *execution) take(res result) {
	cancel := e.running[res.unit]
	e.running[res.unit] = nil
	e.r.count.inFlight.Add(-1)
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
		if e.plan.chain {
			e.restore()
		}
	} else {
		res.err = e.keep(&res)
	}
	e.attempted(&res, e.outcome(&res))
	e.conclude(&res)
}

// waiting takes in the result of an attempt that found children that have not ended, and
// reports whether it is one.
func (e *execution) waiting(res *result) bool {
	pending, ok := res.err.(*errPending)
	if !ok || res.cut {
		return false
	}
	res.err = nil
	if res.err = e.keep(res); res.err != nil {
		return false // begin has changed the state, which it must not
	}
	now := e.now()
	e.m.wait(res.unit, pending.children, now, now.Add(e.r.config().Poll))
	return true
}

// conclude passes a result on to the machine, and tells OnEvent and the observers if
// there will be another attempt.
func (e *execution) conclude(res *result) {
	now := e.now()
	switch {
	case res.err != nil && res.cut:
		e.m.interrupted(res.unit, res.err, now)
		return
	case res.op == OpUndo:
		e.m.undid(res.unit, res.err, now)
	default:
		e.m.did(res.unit, res.err, now)
	}
	if s := e.m.units[res.unit].Status; res.err != nil && !behavior.IsRefused(res.err) && (s == StepStarted || s == StepUndoing) {
		retry := Event{Kind: EventAttemptFailed, Step: e.m.units[res.unit].Name, Op: res.op, Attempt: res.attempt, Err: res.err, At: now}
		e.r.tellHook(e.ctx, &e.rec, retry)
		e.r.tellOf(e.ctx, &e.rec, retry)
	}
}

// keep merges an attempt's changes into the state, and returns the attempt's error. If
// they conflict with those of another attempt, the attempt has failed and may run again,
// on the state that the other has left. If the state can no longer be encoded, the
// attempt has failed for good.
func (e *execution) keep(res *result) error {
	var err error
	if !e.plan.chain && res.s != nil {
		err = e.p.merge(e.s, res.base, res.s)
	}
	if err == nil {
		data, eerr := e.p.encode(e.s)
		if eerr == nil {
			e.data = data
			return res.err
		}
		err = Abort(eerr)
	}
	e.restore()
	if res.err != nil {
		return fmt.Errorf("%w; %w", res.err, err)
	}
	return err
}

// restore returns the state to what it was when it was last kept.
func (e *execution) restore() {
	s, err := e.p.decode(e.data)
	if err != nil {
		e.m.stick("", err)
		return
	}
	e.s = s
}

// leave ends the attempts of a saga that is no longer held, and waits for them.
func (e *execution) leave() {
	e.stop(ErrLost)
	for i := range e.running {
		if e.running[i] == nil {
			continue
		}
		res := <-e.results
		e.r.count.inFlight.Add(-1)
		if res.tx != nil {
			_ = res.tx.Rollback()
			res.end()
		}
		e.attempted(&res, OutcomeInterrupted)
	}
}
