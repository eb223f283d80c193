package saga

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/go-resilience/resilience/internal/ended"
)

// Run runs a saga in memory. It returns nil if every step is done, the error of Validate, or an [*Error]. DoTx,
// UndoTx, Await and Saga need a [Runner]. Steps run on the caller's goroutine; parallel ones on their own, with
// the same s.
//
// When ctx ends, the saga turns back, on a detached ctx; after the pivot, and while a pivot without Undo is in
// doubt, it is left stuck. A panic in a Do passes through after the steps before it have been undone; one in an
// Undo leaves the rest of a sequence done.
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
	if !p.chain {
		r.running, r.results = make([]context.CancelCauseFunc, len(p.steps)), make(chan memoryResult)
	}
	r.m.quiet = true
	if p.timeout > 0 {
		r.m.CompleteBy = time.Now().Add(p.timeout)
	}
	return r.run()
}

// A memoryRun is one Run. All of it is of the caller's goroutine, but for the attempts of steps that
// run beside each other.
type memoryRun struct {
	identity
	ctx     context.Context // the caller's
	s       any
	m       *machine
	timed   bool           // the time matters
	group   errgroup.Group // of attempts beside each other
	results chan memoryResult
	running []context.CancelCauseFunc // by step
	broken  *panicked                 // the first attempt of another goroutine that did not return
}

// A memoryResult is the end of an attempt.
type memoryResult struct {
	step   int
	op     Op
	err    error
	broken *panicked
}

type panicked struct{ value any }

// errPanicked is the error of a Do or an Undo that did not return.
var errPanicked = Abort(errors.New("saga: the step panicked"))

func (r *memoryRun) run() error {
	// A panic or a runtime.Goexit of a sequence is on its way to the caller. What follows is as after an
	// attempt that has failed for good: it undoes, or goes no further. After a return nothing is left to do.
	defer r.loop()
	r.loop()
	switch {
	case r.broken != nil && r.broken.value == nil:
		runtime.Goexit()
	case r.broken != nil:
		panic(r.broken.value)
	case r.m.Status == Completed:
		return nil
	}
	return r.m.failureOf(r.m.cause, r.m.errorOf)
}

// loop makes the attempts of the steps until the saga goes no further.
func (r *memoryRun) loop() {
	for {
		if r.ctx.Err() != nil {
			r.m.wishBack(r.m.late(ended.Error(r.ctx)))
		}
		now := r.now()
		r.m.advance(now)
		if !r.m.going() && r.m.busy() == 0 {
			_ = r.group.Wait()
			return
		}
		i := -1
		if r.m.going() {
			i = r.m.next(0, now)
		}
		if i >= 0 && r.p.chain {
			r.attempt(r.ctx, i, r.m.op(i), r.m.begin(i), r.m.pivotDone())
			continue
		}
		for ; i >= 0; i = r.m.next(i+1, now) {
			ctx, cancel := context.WithCancelCause(r.ctx)
			r.running[i] = cancel
			step, op, attempt, past := i, r.m.op(i), r.m.begin(i), r.m.pivotDone()
			r.group.Go(func() error {
				r.attempt(ctx, step, op, attempt, past)
				return nil
			})
		}
		endUseless(r.m, r.running, now)
		r.wait(now)
	}
}

// wait waits for the end of an attempt, for the time of the next one, or for the end of the caller's
// ctx if that still matters.
func (r *memoryRun) wait(now time.Time) {
	var alarm <-chan time.Time
	var done <-chan struct{}
	if at, ok := r.m.wake(now, false); ok && r.m.going() {
		t := time.NewTimer(at.Sub(now))
		defer t.Stop()
		alarm = t.C
		if !r.m.Back {
			done = r.ctx.Done()
		}
	} else if r.m.busy() == 0 {
		r.m.stick("", errNothing)
		return
	}
	select {
	case res := <-r.results:
		r.finish(res)
	case <-alarm:
	case <-done:
		if r.m.pivotDone() || r.m.pivotAwaitsAnswer() {
			r.m.stick(r.m.late(ended.Error(r.ctx)))
		}
	}
}

// attempt calls a Do or an Undo. The end of the caller's ctx, and the saga's deadline, reach only a
// Do before the pivot is done. Beside other steps, its panic waits for these.
func (r *memoryRun) attempt(ctx context.Context, i int, op Op, attempt int, past bool) {
	st, res := &r.p.steps[i], memoryResult{step: i, op: op, err: errPanicked}
	defer func() {
		if r.p.chain {
			r.finish(res)
			return
		}
		if res.err == errPanicked {
			res.broken = &panicked{recover()}
		}
		r.results <- res
	}()
	timeout := st.timeout
	switch {
	case op == OpUndo || past:
		ctx = context.WithoutCancel(ctx)
		timeout = cmp.Or(timeout, defaultTimeout)
	case r.p.timeout > 0 && !r.m.isFinalPivot(i):
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, r.m.CompleteBy, &turnedBack{ErrDeadline})
		defer cancel()
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	fn, _ := st.calls(op)
	res.err = fn(withAttempt(ctx, &attempted{saga: &r.identity, step: i, attempt: attempt, op: op}), r.s)
}

// finish takes in the end of an attempt. A panic of its error or of the Backoff ends it like one of the step:
// else what is left of the saga would wait for it, or repeat it, instead of being undone.
func (r *memoryRun) finish(res memoryResult) {
	taken := false
	defer func() {
		if taken {
			return
		}
		r.m.did(res.step, res.op, end{err: errPanicked, final: true}, time.Time{})
		if !r.p.chain {
			r.broken = cmp.Or(r.broken, &panicked{recover()}) // of several that end so, each must be undone
		}
	}()
	if !r.p.chain {
		r.running[res.step](nil)
	}
	if r.broken == nil {
		r.broken = res.broken
	}
	r.timed = r.timed || res.err != nil
	stop := res.err != nil && r.ctx.Err() != nil
	name, why := r.m.Steps[res.step].Name, res.err
	if stop {
		why = withEnd(r.ctx, res.err)
		r.m.wishBack(name, why)
	}
	r.m.did(res.step, res.op, endOf(res.err, r.p.steps[res.step].failsClean), r.now())
	taken = true
	if stop && (r.m.pivotDone() || r.m.pivotAwaitsAnswer()) {
		r.m.stick(name, why)
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
