package saga

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/go-resilience/resilience/internal/ended"
)

// Run runs a saga in memory: nothing survives the process. It returns nil if every step
// is done, the error of Validate if the definition is invalid, and otherwise an [*Error].
// A saga with a DoTx, an UndoTx, an Await or a Saga in its steps needs a [Runner].
//
// The steps of a sequence run on the caller's goroutine. Steps that may run in parallel
// run on goroutines of their own, with the same s. Run returns when all of them have
// returned.
//
// When ctx ends, the saga turns back. Its steps are undone on a detached ctx, until their
// attempts are spent, and for as long as a policy refuses them. After the pivot, and
// while a pivot without Undo is in doubt, the end of ctx stops the retries and leaves the
// saga stuck. A panic in a Do passes through, after the steps before it have been undone.
// So does one in an Undo, after what need not wait for that Undo has been undone: in a
// sequence nothing, as after an Undo that has failed for good.
func Run[S any](ctx context.Context, sg *Saga[S], s *S) error {
	p, err := sg.program()
	switch {
	case err != nil:
		return err
	case p.needsTx:
		return fmt.Errorf("%w: %s has a DoTx or UndoTx, which Run cannot do", errNoTx, p.name)
	case p.awaits || p.children:
		return fmt.Errorf("saga: %s has a step with an Await or a Saga: it needs a Runner", p.name)
	case ctx.Err() != nil:
		return ended.Error(ctx)
	}
	r := &memoryRun{identity: identity{p: p}, ctx: ctx, s: s, m: newMachine(p), timed: p.gated || p.timeout > 0}
	r.m.quiet = true
	if p.timeout > 0 {
		r.m.CompleteBy = time.Now().Add(p.timeout)
	}
	return r.run()
}

// A memoryRun is one Run.
type memoryRun struct {
	identity
	ctx context.Context // the caller's
	s   any

	mu     sync.Mutex // held for the rest while steps run beside each other
	m      *machine
	steps  []int                   // that have something to do
	timed  bool                    // the time matters
	stop   context.CancelCauseFunc // ends the attempts of steps that run beside each other
	broken *panicked               // the first of these that panicked or exited
}

type panicked struct{ value any }

// errPanicked is the error of a Do or an Undo that did not return.
var errPanicked = Abort(errors.New("saga: the step panicked"))

func (r *memoryRun) run() error {
	returned := false
	defer func() {
		// A panic or a runtime.Goexit of a sequence is on its way to the caller. What follows is as
		// after an attempt that has failed for good, unless that would go forward.
		if !returned && !r.m.past() {
			r.loop()
		}
	}()
	r.loop()
	returned = true
	switch {
	case r.broken == nil:
		return r.failure()
	case r.broken.value == nil:
		runtime.Goexit()
	}
	panic(r.broken.value)
}

// loop drives the steps of one group after the other, until the saga goes no further.
func (r *memoryRun) loop() {
	for {
		steps := r.advance()
		if len(steps) == 0 {
			return
		}
		if r.p.chain {
			r.drive(r.ctx, steps[0], r.next(steps[0]))
			continue
		}
		ctx, stop := context.WithCancelCause(r.ctx)
		r.stop = stop
		var group errgroup.Group
		var first []act // all begin before one of them has failed
		for _, i := range steps {
			first = append(first, r.next(i))
		}
		for n, i := range steps {
			group.Go(func() error {
				r.drive(ctx, i, first[n])
				return nil
			})
		}
		_ = group.Wait()
		stop(nil)
	}
}

// advance takes the saga as far as it comes, and returns the steps that have something to do.
func (r *memoryRun) advance() []int {
	steps := r.steps[:0]
	r.heed()
	r.m.advance(r.now())
	if !r.m.going() {
		return nil
	}
	for i := range r.m.Steps {
		if s := r.m.Steps[i].Status; s == StepWaiting || s == StepStarted || s == StepUndoing {
			steps = append(steps, i)
		}
	}
	if len(steps) == 0 {
		r.m.stick("", errors.New("saga: nothing can go on"))
	}
	r.steps = steps
	return steps
}

// An act is the next attempt of a step, or a wait for it. It is the zero act if the step needs none,
// or the saga is to turn.
type act struct {
	wait    time.Duration
	op      Op
	attempt int
	past    bool // the pivot is done
}

// drive makes the attempts of a step, the first of which has begun.
func (r *memoryRun) drive(ctx context.Context, i int, next act) {
	for ; next != (act{}); next = r.next(i) {
		if next.wait > 0 {
			r.pause(ctx, next.wait)
		} else {
			r.attempt(ctx, i, next)
		}
	}
}

// next begins the next attempt of a step.
func (r *memoryRun) next(i int) act {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heed()
	now := r.now()
	if r.m.Steps[i].Status == StepWaiting && !r.m.turns(now) {
		r.m.advance(now) // its wait may be over
	}
	gated := r.m.Steps[i].Status == StepWaiting && !r.m.turns(now)
	if !r.m.going() || !gated && !r.m.waits(i, now) {
		return act{}
	}
	at := r.m.Steps[i].NotBefore
	if by, ok := r.m.deadline(now); ok && by.Before(at) {
		at = by
	}
	if wait := at.Sub(now); wait > 0 {
		return act{wait: wait}
	}
	op, attempt := r.m.begin(i)
	return act{op: op, attempt: attempt, past: r.m.past()}
}

// pause waits for the time of the next attempt, or for the end of ctx if that still matters.
func (r *memoryRun) pause(ctx context.Context, wait time.Duration) {
	t := time.NewTimer(wait)
	defer t.Stop()
	r.mu.Lock()
	back := r.m.Back
	r.mu.Unlock()
	if back {
		<-t.C
		return
	}
	select {
	case <-t.C:
	case <-ctx.Done():
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.ctx.Err() != nil && (r.m.past() || r.m.undecided()) {
			r.m.stick(r.m.late(ended.Error(r.ctx)))
		}
	}
}

// attempt calls a Do or an Undo. The end of the caller's ctx, and the saga's deadline, reach only a
// Do before the pivot is done. Beside other steps, its panic waits for these.
func (r *memoryRun) attempt(ctx context.Context, i int, a act) {
	st, err := &r.p.steps[i], errPanicked
	defer func() {
		var broken *panicked
		if err == errPanicked && !r.p.chain {
			broken = &panicked{recover()}
		}
		r.finish(i, a.op, err, broken)
	}()
	timeout := st.timeout
	switch {
	case a.op == OpUndo || a.past:
		ctx = context.WithoutCancel(ctx)
		if timeout == 0 {
			timeout = defaultTimeout
		}
	case r.p.timeout > 0 && !r.m.decides(i):
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, r.m.CompleteBy, &turnedBack{ErrDeadline})
		defer cancel()
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	fn := st.do
	if a.op == OpUndo {
		fn = st.undo
	}
	err = fn(withAttempt(ctx, &r.identity, i, a.attempt, a.op), r.s)
}

// finish takes in the end of an attempt.
func (r *memoryRun) finish(i int, op Op, err error, broken *panicked) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.broken == nil {
		r.broken = broken
	}
	r.timed = r.timed || err != nil
	name, stop := r.m.Steps[i].Name, op == OpDo && err != nil && r.ctx.Err() != nil
	if stop {
		r.m.wishBack(name, withEnd(r.ctx, err))
	}
	now := r.now()
	r.m.did(i, op, endOf(err, op == OpDo && r.p.steps[i].noDoubt), now)
	if stop && (r.m.past() || r.m.undecided()) {
		r.m.stick(name, withEnd(r.ctx, err))
	}
	if _, why := r.m.turning(now); why != nil && r.stop != nil {
		r.stop(&turnedBack{why})
	}
}

// heed asks the saga to turn back when the caller's ctx has ended.
func (r *memoryRun) heed() {
	if r.ctx.Err() != nil {
		r.m.wishBack(r.m.late(ended.Error(r.ctx)))
	}
}

func (r *memoryRun) now() time.Time {
	if !r.timed {
		return time.Time{} // nothing has failed, so nothing waits
	}
	return time.Now()
}

// withEnd returns err together with the end of ctx, unless err is that already.
func withEnd(ctx context.Context, err error) error {
	if errors.Is(err, ctx.Err()) && errors.Is(err, context.Cause(ctx)) {
		return err
	}
	return fmt.Errorf("%w: %w", ended.Error(ctx), err)
}

// failure returns the error of a saga that did not complete, or nil.
func (r *memoryRun) failure() error {
	m := r.m
	if m.Status == Completed {
		return nil
	}
	e := &Error{Saga: r.p.name, Status: m.Status, Step: m.Step, Err: m.cause}
	for i := range m.Steps {
		switch st := &m.Steps[i]; st.Status {
		case StepUndoFailed:
			e.Failed = append(e.Failed, Failure{st.Name, OpUndo, m.errorOf(i)})
		case StepFailed: // on the way back, it is undone
			e.Failed = append(e.Failed, Failure{st.Name, OpDo, m.errorOf(i)})
		}
	}
	return e
}
