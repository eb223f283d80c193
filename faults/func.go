package faults

import (
	"cmp"
	"context"
	"fmt"
	"syscall"

	"github.com/go-resilience/resilience/internal/ended"
)

// Func returns a function that calls next and injects the faults of a script:
//
//	guarded := resilience.Chain(retries.Wrap, breaker.Wrap)(faults.Func(script, fetch))
func Func(s *Script, next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		f := s.next()
		if err := wait(ctx, f.delay); err != nil {
			return err
		}
		if f.plan == nil {
			return next(ctx)
		}
		return f.plan.call(ctx, next)
	}
}

// call ends a call to Func's function as the plan specifies.
func (p *Plan) call(ctx context.Context, next func(context.Context) error) error {
	switch p.Kind {
	case Reset:
		if err := next(ctx); err != nil {
			return err
		}
		return errReset
	case SlowBody:
		if err := next(ctx); err != nil {
			return err
		}
		return wait(ctx, p.Delay)
	case Status:
		return &statusError{p.status(), p.RetryAfter}
	case Refuse:
		return errRefused
	case Hang:
		<-ctx.Done()
		return ended.Error(ctx)
	default:
		return cmp.Or(p.Err, ErrInjected)
	}
}

var (
	errRefused = fmt.Errorf("faults: injected: %w", syscall.ECONNREFUSED)
	errReset   = fmt.Errorf("faults: injected: %w", syscall.ECONNRESET)
)
