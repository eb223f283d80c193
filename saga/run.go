package saga

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/saga/internal/machine"
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
	t, err := sg.program()
	if err != nil {
		return err
	}
	if t.plan.NeedsTx {
		return fmt.Errorf("%w: %s has a DoTx or UndoTx, which Run cannot do", errNoTx, t.plan.Name)
	}
	if t.plan.Awaits || t.plan.Children {
		return fmt.Errorf("saga: %s has a step with an Await or a Saga: it needs a Runner", t.plan.Name)
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	r := &memoryRun[S]{identity: identity{p: t.plan}, t: t, s: s, ctx: ctx, m: machine.New(t.plan), at: -1}
	r.m.Quiet, r.timed = true, t.plan.Gated
	if d := t.plan.Deadline; d > 0 {
		r.timed = true
		r.m.CompleteBy = time.Now().Add(d)
	}
	return r.run()
}

// A memoryRun is one Run.
type memoryRun[S any] struct {
	identity
	t     *typed[S]
	s     *S
	ctx   context.Context
	m     *machine.Machine
	timed bool // the time matters

	at int // the unit whose attempt runs on the caller's goroutine, or -1
	op Op

	results chan memoryResult         // of attempts beside the caller's goroutine
	cancels []context.CancelCauseFunc // by unit
	broken  *memoryResult             // the first attempt that panicked or exited
}

type memoryResult struct {
	unit  int
	op    Op
	err   error
	panic any
}

func (r *memoryRun[S]) now() time.Time {
	if !r.timed {
		return time.Time{} // nothing has failed, so nothing waits
	}
	return time.Now()
}

func (r *memoryRun[S]) run() error {
	defer r.unwind()
	r.loop()
	if r.broken != nil {
		if r.broken.panic != nil {
			panic(r.broken.panic)
		}
		runtime.Goexit()
	}
	return r.failure()
}

// failure returns the error of a saga that did not complete, or nil.
func (r *memoryRun[S]) failure() error {
	m := r.m
	if m.Status == Completed {
		return nil
	}
	e := &Error{Saga: r.t.plan.Name, Status: m.Status, Step: m.Step, Err: m.Cause}
	for i := range m.Units {
		switch u := &m.Units[i]; {
		case u.Status == StepUndoFailed:
			e.Failed = append(e.Failed, Failure{u.Name, OpUndo, m.ErrorOf(i)})
		case u.Status == StepFailed: // on the way back, it is undone
			e.Failed = append(e.Failed, Failure{u.Name, OpDo, m.ErrorOf(i)})
		}
	}
	return e
}

// errPanicked is the error of a Do or an Undo that did not return.
var errPanicked = Abort(errors.New("saga: the step panicked"))

// unwind goes on when a Do or an Undo has panicked or called runtime.Goexit, as after one
// that has failed for good, unless that would go forward.
func (r *memoryRun[S]) unwind() {
	if r.at >= 0 && !r.m.Past() {
		r.finish(r.at, r.op, errPanicked)
		r.loop()
	}
}

func (r *memoryRun[S]) loop() {
	for {
		r.heed()
		now := r.now()
		r.m.Advance(now)
		if !r.m.Going() {
			for r.m.Busy() > 0 {
				r.collect(<-r.results)
			}
			return
		}
		if r.t.plan.Chain {
			if i := r.m.Ready(0, now); i >= 0 {
				op, attempt := r.m.Begin(i)
				r.at, r.op = i, op
				err := r.attempt(r.ctx, i, op, attempt, r.m.Past())
				r.at = -1
				r.finish(i, op, err)
				continue
			}
		} else if r.spread(now) {
			continue
		}
		r.wait(now)
	}
}

// heed asks the saga to turn back when the caller's ctx has ended.
func (r *memoryRun[S]) heed() {
	if r.ctx.Err() != nil {
		r.m.WishBack(r.m.Late(ended.Error(r.ctx)))
	}
}

func (r *memoryRun[S]) finish(i int, op Op, err error) {
	if err != nil {
		r.timed = true
	}
	if op == OpUndo {
		r.m.Undid(i, endOf(err, false), r.now())
		return
	}
	stop := err != nil && r.ctx.Err() != nil
	if stop {
		r.m.WishBack(r.m.Units[i].Name, withEnd(r.ctx, err))
	}
	r.m.Did(i, endOf(err, r.t.plan.Units[i].NoDoubt), r.now())
	if stop && (r.m.Past() || r.m.Undecided()) {
		r.m.Stick(r.m.Units[i].Name, withEnd(r.ctx, err))
	}
}

// withEnd returns err together with the end of ctx, unless err is that already.
func withEnd(ctx context.Context, err error) error {
	end := ended.Error(ctx)
	if errors.Is(err, ctx.Err()) && errors.Is(err, context.Cause(ctx)) {
		return err
	}
	return fmt.Errorf("%w: %w", end, err)
}

// attempt calls a Do or an Undo. The end of the caller's ctx, and the saga's deadline,
// reach only a Do before the pivot is done. attempt must not read the machine's state,
// which may change while it runs.
func (r *memoryRun[S]) attempt(ctx context.Context, i int, op Op, attempt int, past bool) error {
	timeout := r.t.plan.Units[i].Timeout
	switch {
	case op == OpUndo || past:
		ctx = context.WithoutCancel(ctx)
		if timeout == 0 {
			timeout = defaultTimeout
		}
	case !r.m.CompleteBy.IsZero() && !r.m.Decides(i):
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, r.m.CompleteBy, &turnedBack{ErrDeadline})
		defer cancel()
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return r.t.call(withAttempt(ctx, &r.identity, i, attempt, op), i, op, r.s)
}

// spread starts the attempts that may begin, and waits for a result or for the time of
// the next attempt. It reports false if no attempt is running.
func (r *memoryRun[S]) spread(now time.Time) bool {
	if r.results == nil {
		r.results = make(chan memoryResult, len(r.m.Units))
		r.cancels = make([]context.CancelCauseFunc, len(r.m.Units))
	}
	for i := r.m.Ready(0, now); i >= 0; i = r.m.Ready(i+1, now) {
		op, attempt := r.m.Begin(i)
		ctx, cancel := context.WithCancelCause(r.ctx)
		r.cancels[i] = cancel
		go r.beside(ctx, i, op, attempt, r.m.Past())
	}
	if r.m.Busy() == 0 {
		return false
	}
	for i, cancel := range r.cancels {
		if r.m.Useless(i, now) {
			cancel(&turnedBack{r.m.Turning(now)})
		}
	}
	var next <-chan time.Time
	if at, ok := r.m.Wake(now); ok {
		t := time.NewTimer(at.Sub(now))
		defer t.Stop()
		next = t.C
	}
	select {
	case res := <-r.results:
		r.collect(res)
	case <-next:
	}
	return true
}

// beside runs an attempt on a goroutine of its own, and passes its panic on to the caller.
func (r *memoryRun[S]) beside(ctx context.Context, i int, op Op, attempt int, past bool) {
	res := memoryResult{unit: i, op: op, err: errPanicked}
	defer func() {
		if res.err == errPanicked {
			res.panic = recover()
		}
		r.results <- res
	}()
	res.err = r.attempt(ctx, i, op, attempt, past)
}

func (r *memoryRun[S]) collect(res memoryResult) {
	r.cancels[res.unit](nil)
	if res.err == errPanicked && r.broken == nil {
		r.broken = &res
	}
	r.finish(res.unit, res.op, res.err)
}

// wait waits for the time of the next attempt, or for the end of ctx if that still
// matters.
func (r *memoryRun[S]) wait(now time.Time) {
	at, ok := r.m.Wake(now)
	if !ok {
		r.m.Stick("", errors.New("saga: nothing can go on"))
		return
	}
	t := time.NewTimer(at.Sub(now))
	defer t.Stop()
	if r.m.Back {
		<-t.C
		return
	}
	select {
	case <-t.C:
	case <-r.ctx.Done():
		if r.m.Past() || r.m.Undecided() {
			r.m.Stick(r.m.Late(ended.Error(r.ctx)))
		}
	}
}
