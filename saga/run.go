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

// Run runs a saga in memory, and waits until it has ended or is stuck. Run returns nil if every step is done, and an
// [*Error] if the saga did not complete. If Run cannot start the saga, the error is not an *Error; it is, for example,
// the error of [Saga.Validate]. A definition with DoTx, UndoTx, Await or Child needs a [Runner]. Steps are called on
// the caller's goroutine, or on separate goroutines if the saga has parallel steps. All steps receive the same s.
//
// When ctx is done, the saga turns back, and its Undos are called with a ctx that is not canceled. After the pivot, the
// saga does not turn back. The steps after the pivot are also called with a ctx that is not canceled. If ctx is done
// and a step after the pivot fails or must wait, the saga is stuck. The saga is also stuck if ctx is done while the
// outcome of a pivot without Undo is unknown.
//
// If a Do panics, Run treats the panic like a [Permanent] error. So before the pivot, Run undoes this step and the
// earlier steps. Run then panics with the same value. If an Undo panics, the earlier steps are not undone.
func Run[S any](ctx context.Context, sg *Saga[S], s *S) error {
	p, err := sg.program()
	switch {
	case err != nil:
		return err
	case p.needsTx:
		return fmt.Errorf("%w: %s has a DoTx or UndoTx, which Run cannot do", ErrNoTx, p.name)
	case p.awaits || p.children:
		return fmt.Errorf("saga: %s has a step with an Await or a Child: it needs a Runner", p.name)
	case ctx.Err() != nil:
		return ended.Error(ctx)
	}
	m := newMachine(p)
	m.quiet = true
	if p.timeout > 0 {
		m.CompleteBy = time.Now().Add(p.timeout)
	}
	r := &memoryRun{p: p, ctx: ctx, s: s, m: m, timed: p.gated || p.timeout > 0}
	if !p.chain {
		r.running, r.answers = make(map[string]context.CancelCauseFunc), make(chan *attempt)
	}
	return r.run()
}

// A memoryRun is one call to Run. Only the goroutine that called Run uses its fields.
type memoryRun struct {
	p       *program
	id      runID
	ctx     context.Context // the ctx that was passed to Run
	s       any
	m       *machine
	in      Input
	timed   bool           // decisions need the current time, because the saga may wait or has a Timeout
	group   errgroup.Group // the goroutines of parallel attempts
	answers chan *attempt
	running map[string]context.CancelCauseFunc // cancels the parallel attempts, by step
	broken  *panicked                          // the first parallel attempt that did not return
}

// panicked describes an attempt that did not return: it panicked with the value, or called runtime.Goexit.
type panicked struct{ value any }

func (r *memoryRun) run() error {
	// A panic or a runtime.Goexit of a step that is not parallel passes through to the caller. Before that, the deferred
	// loop undoes the done steps. If the first loop returns normally, the deferred loop has nothing to do.
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

// loop decides and performs calls until the saga has ended or is stuck, and no attempt is in progress.
func (r *memoryRun) loop() {
	for {
		r.in.Now, r.in.ended = r.now(), ended.Error(r.ctx)
		d := r.m.decide(&r.in)
		clear(r.in.Answers)
		r.in.Answers = r.in.Answers[:0]
		if !r.m.going() && r.m.busy() == 0 {
			_ = r.group.Wait()
			return
		}
		for _, c := range d.Calls {
			r.perform(c)
		}
		for _, step := range d.Stop {
			r.running[step](&turnedBack{d.why})
		}
		if len(r.in.Answers) == 0 {
			r.wait(&d)
		}
	}
}

// perform performs a call: on this goroutine, or on a separate goroutine if the saga has parallel steps.
func (r *memoryRun) perform(c Call) {
	t := &attempt{Call: c, p: r.p, r: &r.id, s: r.s}
	if r.p.chain {
		defer r.collect(t)
		ctx, end := r.limit(r.ctx, &c)
		defer end()
		t.perform(ctx)
		return
	}
	ctx, cancel := context.WithCancelCause(r.ctx)
	r.running[c.Step] = cancel
	ctx, end := r.limit(ctx, &c)
	r.group.Go(func() error {
		defer func() {
			if t.answer.err == errPanicked {
				t.panicked = &panicked{recover()}
			}
			r.answers <- t
		}()
		defer end()
		t.perform(ctx)
		return nil
	})
}

// limit returns the ctx of a call. The caller's ctx and the saga's deadline cancel only a Do, and only until the pivot
// is done. The deadline does not cancel a pivot without Undo.
func (r *memoryRun) limit(ctx context.Context, c *Call) (context.Context, context.CancelFunc) {
	switch {
	case c.detached:
		ctx = context.WithoutCancel(ctx)
	case r.p.timeout > 0 && !r.m.isFinalPivot(r.m.index(c.Step)):
		return context.WithDeadlineCause(ctx, r.m.CompleteBy, &turnedBack{ErrDeadline})
	}
	return ctx, func() {}
}

// wait waits until an attempt has ended, the next attempt may start, or the caller's ctx is done. It ignores the
// caller's ctx if the saga has turned back.
func (r *memoryRun) wait(d *Decision) {
	var alarm <-chan time.Time
	var done <-chan struct{}
	if !d.WakeAt.IsZero() {
		t := time.NewTimer(d.WakeAt.Sub(r.in.Now))
		defer t.Stop()
		alarm = t.C
		if !r.m.TurnedBack && r.in.ended == nil {
			done = r.ctx.Done()
		}
	}
	select {
	case t := <-r.answers:
		r.running[t.Step](nil)
		delete(r.running, t.Step)
		r.broken = cmp.Or(r.broken, t.panicked)
		r.collect(t)
	case <-alarm:
	case <-done:
	}
}

// collect records the answer of an attempt. If the attempt failed after the caller's ctx was done, the saga turns back
// because of both errors.
func (r *memoryRun) collect(t *attempt) {
	a := t.answer
	r.timed = r.timed || a.err != nil
	if a.err != nil && r.ctx.Err() != nil {
		a.ends = withEnd(r.ctx, a.err)
	}
	r.in.Answers = append(r.in.Answers, a)
}

func (r *memoryRun) now() time.Time {
	if !r.timed {
		return time.Time{} // no decision needs the current time
	}
	return time.Now()
}

// withEnd returns err joined with ctx's cause, unless err already includes it.
func withEnd(ctx context.Context, err error) error {
	if errors.Is(err, ctx.Err()) && errors.Is(err, context.Cause(ctx)) {
		return err
	}
	return fmt.Errorf("%w: %w", ended.Error(ctx), err)
}
