package saga

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

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
	t, err := sg.program()
	if err != nil {
		return err
	}
	if t.plan.needsTx {
		return fmt.Errorf("%w: %s has a DoTx or UndoTx, which Run cannot do", ErrNoTx, t.plan.name)
	}
	if t.plan.awaits || t.plan.children {
		return fmt.Errorf("%w: %s has a step with an Await or a Saga", ErrNoRunner, t.plan.name)
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	r := &memoryRun[S]{identity: identity{p: t.plan}, t: t, s: s, ctx: ctx, m: newMachine(t.plan), at: -1}
	r.m.quiet, r.timed = true, t.plan.gated
	if d := t.plan.deadline; d > 0 {
		r.timed = true
		r.m.completeBy = time.Now().Add(d)
	}
	return r.run()
}

// A memoryRun is one Run.
type memoryRun[S any] struct {
	identity
	t     *typed[S]
	s     *S
	ctx   context.Context
	m     *machine
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
	return r.m.failure("")
}

// errPanicked is the error of a Do or an Undo that did not return.
var errPanicked = Abort(errors.New("saga: the step panicked"))

// unwind undoes the steps that were done when a Do has panicked or called
// runtime.Goexit. After an Undo that has done so nothing is undone: in a sequence the
// steps before it wait for it.
func (r *memoryRun[S]) unwind() {
	if r.at < 0 || r.op != OpDo || r.m.past() {
		return
	}
	r.finish(r.at, OpDo, errPanicked)
	r.at = -1
	r.loop()
}

func (r *memoryRun[S]) loop() {
	for {
		r.heed()
		now := r.now()
		r.m.advance(now)
		if r.m.status != Running && r.m.status != Compensating {
			for r.m.busy() > 0 {
				r.receive()
			}
			return
		}
		if r.t.plan.chain {
			if i := r.m.ready(0, now); i >= 0 {
				op, attempt := r.m.begin(i)
				r.at, r.op = i, op
				err := r.attempt(r.ctx, i, op, attempt, r.m.past())
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
	if r.m.back || r.ctx.Err() == nil {
		return
	}
	r.timed = true
	r.m.wishBack(r.m.late(ended.Error(r.ctx)))
}

func (r *memoryRun[S]) finish(i int, op Op, err error) {
	if err != nil {
		r.timed = true
	}
	if op == OpUndo {
		r.m.undid(i, err, r.now())
		return
	}
	past := r.m.past()
	stop := err != nil && r.ctx.Err() != nil
	if stop && !past {
		r.m.wishBack(r.m.units[i].Name, withEnd(r.ctx, err))
	}
	r.m.did(i, err, r.now())
	if stop && (past || r.m.undecided()) && r.m.status == Running {
		r.m.stick(r.m.units[i].Name, withEnd(r.ctx, err))
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
	timeout := r.t.plan.units[i].timeout
	switch {
	case op == OpUndo || past:
		ctx = context.WithoutCancel(ctx)
		if timeout == 0 {
			timeout = defaultTimeout
		}
	case !r.m.completeBy.IsZero() && !r.m.decides(i):
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, r.m.completeBy, &turnedBack{ErrDeadline})
		defer cancel()
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return r.t.call(&attemptContext{ctx, &r.identity, i, attempt, op}, i, op, r.s)
}

// spread starts the attempts that may begin, and waits for a result or for the time of
// the next attempt. It reports false if no attempt is running.
func (r *memoryRun[S]) spread(now time.Time) bool {
	if r.results == nil {
		r.results = make(chan memoryResult, len(r.m.units))
		r.cancels = make([]context.CancelCauseFunc, len(r.m.units))
	}
	for i := r.m.ready(0, now); i >= 0; i = r.m.ready(i+1, now) {
		op, attempt := r.m.begin(i)
		ctx, cancel := context.WithCancelCause(r.ctx)
		r.cancels[i] = cancel
		go r.beside(ctx, i, op, attempt, r.m.past())
	}
	if r.m.busy() == 0 {
		return false
	}
	if r.m.turning(now) {
		for i, cancel := range r.cancels {
			if r.m.work[i].busy && r.m.units[i].Status == StepStarted && !r.m.mustKnow(i) {
				cancel(&turnedBack{r.m.wish})
			}
		}
	}
	var next <-chan time.Time
	if at, ok := r.m.wake(now); ok {
		t := time.NewTimer(at.Sub(now))
		defer t.Stop()
		next = t.C
	}
	select {
	case res := <-r.results:
		r.take(res)
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

func (r *memoryRun[S]) receive() { r.take(<-r.results) }

func (r *memoryRun[S]) take(res memoryResult) {
	r.cancels[res.unit](nil)
	if res.err == errPanicked && r.broken == nil {
		r.broken = &res
	}
	r.finish(res.unit, res.op, res.err)
}

// wait waits for the time of the next attempt, or for the end of ctx if that still
// matters.
func (r *memoryRun[S]) wait(now time.Time) {
	at, ok := r.m.wake(now)
	if !ok {
		r.m.stick("", errors.New("saga: nothing can go on"))
		return
	}
	t := time.NewTimer(at.Sub(now))
	defer t.Stop()
	if r.m.back {
		<-t.C
		return
	}
	select {
	case <-t.C:
	case <-r.ctx.Done():
		if r.m.past() || r.m.undecided() {
			r.m.stick(r.m.late(ended.Error(r.ctx)))
		}
	}
}
