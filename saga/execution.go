package saga

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
	"github.com/go-resilience/resilience/saga/internal/plan"
)

// An execution is one saga that a runner holds, in one epoch. The goroutine of run owns
// the machine, the state and all writes. Each attempt has a goroutine of its own, which
// sends it a result.
type execution struct {
	r    *Runner
	p    program
	plan *plan.Plan
	id   identity
	rec  store.Record // as claimed; Status, Data and Steps as last recorded
	seq  int64        // of the record now

	m    *machine.Machine
	s    any    // the state, a *S, if the steps are a chain; each of others has a copy
	data []byte // the state, encoded

	results   chan result
	running   []context.CancelCauseFunc // by unit
	txUnit    int                       // the unit that has a transaction, or -1
	open      *result                   // the result of txUnit, to be committed
	untold    []Event                   // of attempts that have ended beside txUnit
	carried   string                    // of the machine, for the attempts
	heard     time.Time                 // when the signals were last read, by the local clock
	heardLast bool                      // they were read after the saga had turned back
	deaf      time.Time                 // since when that has failed; zero if it has not

	ctx   context.Context // of the attempts: ends when the saga is lost
	since time.Time       // rec.Now by the local clock
	*lease
}

// A result is the result of an attempt.
type result struct {
	unit     int
	op       Op
	attempt  int
	err      error
	took     time.Duration
	s        any                // the state, or its copy
	base     []byte             // what that is a copy of
	children int                // of the unit, as recorded
	retried  bool               // start those again that have failed
	cut      bool               // its ctx ended because the runner stopped or lost the saga
	ctx      context.Context    // of the attempt
	tx       *sql.Tx            // still open after a DoTx or UndoTx that succeeded
	end      context.CancelFunc // ends ctx, and with it tx
}

// newExecution returns the execution of a saga that was claimed at since, or later, by
// the local clock.
func newExecution(r *Runner, p program, rec store.Record, since time.Time) *execution {
	ctx, stop := context.WithCancelCause(r.base)
	return &execution{
		r: r, p: p, plan: p.planned(), rec: rec, seq: rec.Seq, since: since, txUnit: -1,
		results: make(chan result, len(p.planned().Units)),
		running: make([]context.CancelCauseFunc, len(p.planned().Units)),
		id:      identity{p: p.planned(), id: rec.ID, epoch: rec.Epoch},
		ctx:     ctx, lease: newLease(rec.Epoch, stop, since, r.cfg.LeaseTTL),
	}
}

// now returns the store's clock, as well as it is known here.
func (e *execution) now() time.Time { return e.rec.Now.Add(time.Since(e.since)) }

// heed takes in a request to turn back, and reports whether it is news.
func (e *execution) heed() bool {
	note := e.asked.Swap(nil)
	if note == nil || !e.m.Cancel(*note) {
		return false
	}
	e.rec.CancelNote = *note
	return true
}

// timeout returns how long an attempt may take.
func (e *execution) timeout(u *plan.Unit, tx bool) time.Duration {
	d := cmp.Or(u.Timeout, defaultTimeout)
	if tx && e.r.tx.Exclusive() {
		d = min(d, e.term/2) // no heartbeat is written meanwhile
	}
	return d
}

// conclude counts a result, passes it on to the machine, and tells of it.
func (e *execution) conclude(res *result) {
	end := endOf(res.err, e.plan.Units[res.unit].NoDoubt)
	e.attempted(res, outcomeOf(end, res.op, res.cut))
	e.end(res, end)
	if n := e.m.Failing(res.unit); end.Err != nil && !res.cut && n >= 8 && n&(n-1) == 0 {
		e.r.figures.count(func(s *Stats) { s.Stalled++ })
		e.tellLater(Event{Kind: EventStalled, Step: e.plan.Units[res.unit].Name, Op: res.op, Attempt: n, Err: end.Err, At: e.now()})
	}
}

// end passes the end of an attempt on to the machine.
func (e *execution) end(res *result, end machine.End) {
	switch now := e.now(); {
	case end.Err != nil && res.cut:
		e.m.Interrupted(res.unit, end)
	case res.op == OpUndo:
		e.m.Undid(res.unit, end, now)
	default:
		e.m.Did(res.unit, end, now)
	}
}

// keep merges an attempt's changes into the state, and returns the attempt's error. If
// they conflict with those of another attempt, the attempt has failed and may run again,
// on the state that the other has left. If the state can no longer be encoded, the
// attempt has failed for good.
func (e *execution) keep(res *result) error {
	data, err := e.merged(res)
	if err == nil {
		e.data = data
		return res.err
	}
	e.restore()
	if res.err != nil {
		return fmt.Errorf("%w; %w", res.err, err)
	}
	return err
}

// merged returns the state with an attempt's changes, encoded.
func (e *execution) merged(res *result) ([]byte, error) {
	if res.s == nil {
		return e.data, nil // its copy could not be made
	}
	data, err := e.p.encode(res.s)
	if err != nil {
		return nil, Abort(err)
	}
	if e.plan.Chain || bytes.Equal(res.base, e.data) {
		return data, nil // nothing has changed in the meantime
	}
	// All are decoded, since a value may not come back as it was: a time loses its monotonic
	// clock, which is no change of a step.
	var states [3]any
	for i, data := range [][]byte{e.data, res.base, data} {
		if states[i], err = e.p.decode(data); err != nil {
			return nil, err // the attempt is in doubt
		}
	}
	if err := mergeState(states[0], states[1], states[2]); err != nil {
		return nil, err
	}
	data, err = e.p.encode(states[0])
	return data, Abort(err)
}

// restore returns the state to what it was when it was last kept.
func (e *execution) restore() {
	if !e.plan.Chain {
		return
	}
	s, err := e.p.decode(e.data)
	if err != nil {
		e.m.Stick("", err)
		return
	}
	e.s = s
}

// waits returns how long this runner lets the saga wait.
func (e *execution) waits() machine.Waits {
	cfg := e.r.config()
	return machine.Waits{Stops: e.r.isDraining(), Longest: cfg.Park, Least: cfg.LeaseTTL}
}

// request returns the commit of the machine's present state.
func (e *execution) request(release bool, wakeIn time.Duration) store.CommitRequest {
	if len(e.m.Log) == 0 {
		e.m.Note(store.Entry{Kind: EventResumed})
	}
	if release {
		e.m.Forsake()
	}
	req := e.m.Commit()
	req.ID, req.Epoch, req.Seq, req.Nonce = e.rec.ID, e.rec.Epoch, e.seq, rand.Int64()
	req.Release, req.WakeIn = release, wakeIn
	if !bytes.Equal(e.data, e.rec.Data) {
		req.Data = e.data
	}
	return req
}

// storeCtx returns the ctx of one call of the store. It outlives that of the attempts,
// and has a timeout, since a database may not answer.
func (e *execution) storeCtx() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(e.ctx), e.term/2)
}

// pause waits before the next call of a store that has failed since then, with patience. In
// the first lease, which may be all the time that is left, the pause is at most a 20th of it,
// and after that 20 leases, unless the saga is lost.
func (e *execution) pause(since time.Time) {
	term := e.term
	soon := patience(since, time.Millisecond, term/20)
	t := time.NewTimer(e.r.chance(patience(since.Add(term), soon, 20*term)) + 1)
	defer t.Stop()
	select {
	case <-t.C:
	case <-e.ctx.Done():
		time.Sleep(e.r.chance(soon) + 1) // the lease may last for a while
	}
}

// attempted counts an attempt that has ended, and tells of it, but not before the end of a
// transaction of this saga: a hook may ask the store, and the transaction may have the only
// connection.
func (e *execution) attempted(res *result, outcome Outcome) {
	e.r.figures.attempt(e.plan.Name, outcome, res.took)
	e.tellLater(Event{
		Kind: EventAttempted, Step: e.plan.Units[res.unit].Name, Op: res.op, Attempt: res.attempt,
		Outcome: outcome, Took: res.took, Err: res.err, At: e.now(),
	})
}

// tellLater tells of an event when no transaction of this saga is under way.
func (e *execution) tellLater(ev Event) {
	e.untold = append(e.untold, ev)
	if e.txUnit >= 0 {
		return
	}
	for _, ended := range e.untold {
		e.r.tellOf(e.ctx, &e.rec, ended)
	}
	e.untold = e.untold[:0]
}

// extract puts what the saga carries into the ctx of its attempts and hooks.
func (e *execution) extract() {
	fn := e.r.config().Extract
	if fn == nil || e.m.Carried == "" {
		return
	}
	hook(e.ctx, "Extract", func(ctx context.Context, carried string) {
		if with := fn(ctx, carried); with != nil {
			e.ctx = with
		}
	}, e.m.Carried)
}
