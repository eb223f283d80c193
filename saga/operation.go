package saga

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// An Operation is an [Action] with its arguments.
type Operation struct {
	Action Action
	Step   string // of ActionSkip; "" means the step that keeps a stuck saga from going on
	Note   string // for the log

	// Seq is the Seq of the [Instance] that the operator has seen. If the log has grown since,
	// the operation is not allowed, except for ActionCancel. Zero means any.
	Seq int64
}

// Operated is the result of [Runner.OperateAll].
type Operated struct {
	Done       int // sagas to which the operation was applied
	NotAllowed int // sagas that do not allow it, whose definition is not registered, or that are no longer there
}

// Operate applies an operation to a saga. It calls Cancel, Retry, SkipStep, Compensate or
// Abandon.
func (r *Runner) Operate(ctx context.Context, id string, op Operation) error {
	switch op.Action {
	case ActionCancel:
		return r.Cancel(ctx, id, op.Note)
	case ActionRetry:
		return r.retry(ctx, id, op)
	case ActionSkip:
		if op.Step == "" {
			in, err := r.Get(ctx, id)
			if err != nil {
				return err
			}
			op.Step = in.stuckAt()
		}
		return r.skip(ctx, id, op)
	case ActionCompensate:
		return r.compensate(ctx, id, op)
	case ActionAbandon:
		return r.abandon(ctx, id, op)
	}
	return fmt.Errorf("saga: Operation.Action is %q: must be cancel, retry, skip, compensate or abandon", op.Action)
}

// stuckAt returns the step that keeps the saga from going on, or "".
func (in *Instance) stuckAt() string {
	if !in.Back {
		return in.Step
	}
	for _, u := range in.Steps {
		if u.Status == StepUndoFailed {
			return u.Name
		}
	}
	return "" // Step is where the saga turned
}

// operators is how many operations OperateAll has under way. Their commits share
// transactions.
const operators = 8

// OperateAll applies an operation to every saga that the filter admits and that was
// started before the call, page after page, and yields what it has done so far after each.
// Filter.Limit is the size of a page. Sagas that do not allow the operation are left as
// they are, and counted.
//
// If the store fails or ctx ends, OperateAll yields the error with what it has done, and
// ends. It may then be called again.
func (r *Runner) OperateAll(ctx context.Context, f Filter, op Operation) iter.Seq2[Operated, error] {
	f.WithoutState = true
	return func(yield func(Operated, error) bool) {
		f := f // each range begins anew
		var done, notAllowed atomic.Int64
		for first := true; ; {
			page, err := r.List(ctx, f)
			if err == nil {
				if first && len(page.Sagas) > 0 {
					// Stores keep times to the millisecond at least.
					now := page.Sagas[0].Now.Add(time.Millisecond)
					if f.CreatedBefore.IsZero() || now.Before(f.CreatedBefore) {
						f.CreatedBefore = now
					}
					first = false
				}
				err = r.operateEach(ctx, page.Sagas, op, &done, &notAllowed)
			}
			f.After = page.Next
			if !yield(Operated{int(done.Load()), int(notAllowed.Load())}, err) || err != nil || f.After == "" {
				return
			}
		}
	}
}

// operateEach applies an operation to some sagas, and counts.
func (r *Runner) operateEach(ctx context.Context, sagas []*Instance, op Operation, done, notAllowed *atomic.Int64) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(operators)
	for _, in := range sagas {
		g.Go(func() error {
			err := r.Operate(ctx, in.ID, op)
			switch {
			case err == nil:
				done.Add(1)
			case errors.Is(err, ErrNotAllowed), errors.Is(err, ErrNotRegistered), errors.Is(err, ErrNotFound):
				notAllowed.Add(1)
			default:
				return err
			}
			return nil
		})
	}
	return g.Wait()
}
