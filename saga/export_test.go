package saga

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// SetChance replaces the random pauses between two calls to the store.
func (r *Runner) SetChance(f func(below time.Duration) time.Duration) { r.chance = f }

// ResultOf waits for a saga of any definition whose state is an S.
func ResultOf[S any](ctx context.Context, r *Runner, id string) (s S, err error) {
	in, err := r.Wait(ctx, id)
	if err != nil {
		return s, err
	}
	p, err := r.program(in.Saga, in.Version)
	if err != nil {
		return s, err
	}
	return (&Handle[S]{engine: r, current: &Definition{p}, versions: map[int]*program{in.Version: p}}).Result(ctx, id)
}

// DescribeEvent returns e as a registry receives it from the runner of that name.
func DescribeEvent(e Event, runner string) policy.Event { return e.describe(runner) }
