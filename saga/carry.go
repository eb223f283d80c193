package saga

import (
	"context"
	"fmt"
	"unicode/utf8"
)

// maxCarried is how many bytes a saga carries at most.
const maxCarried = 4096

// inject returns what a saga carries that is started under ctx.
func (r *Runner) inject(ctx context.Context) (carried string, err error) {
	fn := r.config().Inject
	if fn == nil {
		return "", nil
	}
	func() {
		defer caught(&err)
		carried = fn(ctx)
	}()
	if err != nil {
		return "", fmt.Errorf("saga: Inject: %w", err)
	}
	if len(carried) > maxCarried || !utf8.ValidString(carried) {
		return "", nil
	}
	return carried, nil
}

// extract puts what the saga carries into the ctx of its attempts and hooks.
func (e *execution) extract() {
	fn := e.r.config().Extract
	if fn == nil || e.m.carried == "" {
		return
	}
	hook(e.ctx, "Extract", func(ctx context.Context, carried string) {
		if with := fn(ctx, carried); with != nil {
			e.ctx = with
		}
	}, e.m.carried)
}
