package saga

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/go-resilience/resilience/internal/panics"
	"github.com/go-resilience/resilience/internal/sqltx"
)

// An attempt performs a [Call].
type attempt struct {
	Call
	p *program
	h *hold  // nil unless a Runner performs the call
	r *runID // nil unless Run performs the call
	s any    // the state: under Run the caller's, otherwise a copy
	n int    // the index of the step

	ctx    context.Context
	cancel context.CancelCauseFunc // cancels ctx, which also rolls tx back
	tx     *sql.Tx                 // the open transaction after a DoTx or UndoTx that has succeeded
	answer Answer
	hangs  *time.Timer // fires if the attempt does not return; nil if it has no timeout

	panicked *panicked // the panic of a parallel step under Run, or nil
}

// perform calls the step and sets t.answer. It sets t.answer even if the step does not return: if the step calls
// runtime.Goexit, or panics under Run, where the panic passes through.
func (t *attempt) perform(ctx context.Context) {
	inRun, end := t.r != nil, context.CancelFunc(func() {})
	t.n = t.p.index(t.Step)
	err := errExited
	if inRun {
		err = errPanicked
	}
	t.answer = Answer{
		Step: t.Step, Op: t.Op, Number: t.Number,
		Outcome: OutcomeMaybeApplied, Final: true, Error: err.Error(), err: err, attempt: t.Command.Attempt,
	}
	if t.Timeout > 0 {
		ctx, end = context.WithTimeout(ctx, t.Timeout)
	}
	t.ctx = withAttempt(ctx, t)
	var began time.Time
	if !inRun {
		began = time.Now()
	}
	defer func() {
		if !inRun {
			t.answer.took = time.Since(began)
			err = t.settle(err, recover())
		}
		if t.tx == nil {
			end()
		} else {
			cancel := t.cancel
			t.cancel = func(cause error) { end(); cancel(cause) }
		}
		if err == nil {
			t.answer.Outcome, t.answer.Final, t.answer.Error, t.answer.err = OutcomeDone, false, "", nil
		} else if err != errPanicked {
			t.fail(err)
		}
	}()
	if !inRun {
		decode := func() (err error) { t.s, err = t.p.decode(t.State); return err }
		if err = t.guard(decode); err != nil {
			return
		}
		err = errExited
	}
	err = t.call()
}

// settle returns the error of an attempt of a Runner or another engine. It rolls back the transaction of a failed
// attempt, and encodes the state after a successful one.
func (t *attempt) settle(err error, panicked any) error {
	name := t.p.steps[t.n].name
	if panicked != nil {
		stack := debug.Stack()
		err = panics.New(fmt.Sprintf("saga: panic: %v", panicked), panicked, stack)
		log.Printf("saga: step %s of %s panicked: %v\n%s", name, t.p.name, panicked, stack)
	}
	_, isTx := t.p.steps[t.n].calls(t.Op)
	if t.s != nil && (isTx == nil || err == nil) {
		err = t.keep(err)
	}
	t.answer.waits = t.answer.waits && err == nil // keep fails if begin left a state that cannot be encoded
	if err != nil && t.tx != nil {
		if endedItself(t.ctx, t.tx.Rollback()) {
			err = Permanent(fmt.Errorf("%w: %w", errTxEnded, err))
		}
		t.tx = nil
	}
	return err
}

// keep encodes the state if it has changed. If encoding fails, the attempt has failed permanently.
func (t *attempt) keep(err error) error {
	var data []byte
	encoding := t.guard(func() (err error) { data, err = t.p.encodeFrom(t.s, t.State); return err })
	switch {
	case encoding != nil && err != nil:
		return fmt.Errorf("%w; %w", err, Permanent(encoding))
	case encoding != nil:
		return Permanent(encoding)
	case !bytes.Equal(data, t.State):
		t.answer.State = data
	}
	return err
}

// guard calls a function of the program that is not a step: a Codec, a Backoff or a method of an error. If it panics,
// the saga is stuck. Otherwise the panic would crash the process, and then each process that takes the saga over.
func (t *attempt) guard(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("saga: %s panicked outside of a step: %v\n%s", t.p.name, v, debug.Stack())
			err = fmt.Errorf("saga: panic outside of a step: %v", v)
			t.answer.broken = err
		}
	}()
	return fn()
}

// fail sets the answer of an attempt with an error.
func (t *attempt) fail(err error) {
	st := &t.p.steps[t.n]
	read := func() error {
		a := t.answer
		retryAfter := a.read(err, st, isCut(t.ctx))
		switch {
		case a.Outcome == OutcomeRefused:
			a.RetryAfter = pauseAfter(st, t.Command.Attempt+t.Refusals, retryAfter)
		case !a.Final && !t.last && a.Outcome != OutcomeInterrupted:
			a.RetryAfter = pauseAfter(st, t.Command.Attempt, retryAfter)
		}
		t.answer = a
		return nil
	}
	if t.r != nil {
		_ = read() // its panic passes through
		return
	}
	_ = t.guard(read)
}

// read sets the answer of an attempt with an error, and returns the pause that the error requests. cut reports whether
// the runner interrupted the attempt.
func (a *Answer) read(err error, st *step, cut bool) (retryAfter time.Duration) {
	e := classify(err, st.failsClean)
	a.err, a.Error, a.Final, a.refused = err, storable(err.Error()), e.final && !e.refused, e.refused
	a.Outcome = outcomeOf(e, a.Op, cut && !errors.Is(err, errTxEnded))
	return e.retryAfter
}

// errPanicked is the error of a step that did not return under Run.
var errPanicked = Permanent(errors.New("saga: step panicked"))

// isCut reports whether the ctx of an attempt was canceled because the runner stopped or lost the saga.
func isCut(ctx context.Context) bool {
	cause := context.Cause(ctx)
	return errors.Is(cause, errDraining) || errors.Is(cause, errLost)
}

// call calls the step's function.
func (t *attempt) call() (err error) {
	st := &t.p.steps[t.n]
	do, doTx := st.calls(t.Op)
	switch {
	case t.h == nil && (st.child != nil || doTx != nil):
		return Permanent(fmt.Errorf("%w: step %s needs a Runner", ErrNoTx, st.name))
	case st.child != nil:
		switch err := t.h.attend(t).(type) {
		case *errPending:
			t.answer.waits, t.answer.children, t.answer.RetryAfter = true, err.children, t.h.r.cfg.Poll
			return nil
		case *storeError: // the wait is long enough for the saga to release its place; see machine.release
			t.answer.waits, t.answer.unread, t.answer.RetryAfter = true, err, t.h.r.cfg.LeaseTTL
			return nil
		default:
			return err
		}
	case doTx == nil:
		return do(t.ctx, t.s)
	}
	begin := t.ctx
	if t.Command.Attempt+t.Refusals > 1 {
		begin = sqltx.Anew(t.ctx) // a new connection: the server of the old one may reject writes
	}
	if t.tx, err = t.h.r.tx.Begin(begin); err != nil {
		t.tx = nil
		return &notBegun{err}
	}
	return doTx(t.ctx, t.tx, t.s)
}

// A notBegun is the error of an attempt that could not start a transaction, or that lacks the definition of a child.
// The error is a refusal, because no function of the step was called. Otherwise a restart of the database would use up
// the Attempts of steps, and turn their sagas back.
type notBegun struct{ error }

func (e *notBegun) Unwrap() error { return e.error }
func (*notBegun) Refused() bool   { return true }

// leastPause is the shortest wait after a refusal. The number of refusals is not limited, and the Backoff may return
// zero.
const leastPause = 10 * time.Millisecond

// longestAsked is the maximum wait that an error can request with RetryAfter; a longer RetryAfter is shortened to it.
// Otherwise, if a server requested a wait of ten years because of a wrong unit, the saga would wait silently for ten
// years.
const longestAsked = time.Hour

// pauseAfter returns the wait after a failed attempt. after is the RetryAfter of the attempt's error.
func pauseAfter(st *step, attempt int, after time.Duration) time.Duration {
	d := st.backoff(attempt)
	if after = min(after, longestAsked); after > d {
		// The jitter spreads attempts that would otherwise start at the same time.
		d = after + rand.N(after/10+1)
	}
	return max(d, 0)
}
