package benchmarks

import (
	"context"
	"testing"
	"time"

	"github.com/failsafe-go/failsafe-go"
	failsafebulkhead "github.com/failsafe-go/failsafe-go/bulkhead"
	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/failsafe-go/failsafe-go/ratelimiter"
	"github.com/failsafe-go/failsafe-go/retrypolicy"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

func BenchmarkChain(b *testing.B) { benchmark(b, chainCases) }

// chain is retry, breaker, throttle and bulkhead with their defaults, and with
// limits that are not reached.
func chain() resilience.Middleware {
	return resilience.Chain(
		retry.New(retry.Config{}).Wrap,
		breaker.New(breaker.Config{}).Wrap,
		throttle.New(throttle.Config{Rate: 1e9}).Wrap,
		bulkhead.New(bulkhead.Config{Limit: 100}).Wrap,
	)
}

func failsafeChain() failsafe.Executor[any] {
	return failsafe.With(
		retrypolicy.NewWithDefaults[any](),
		circuitbreaker.NewWithDefaults[any](),
		ratelimiter.NewBursty[any](1e9, time.Second),
		failsafebulkhead.New[any](100),
	)
}

var chainCases = []comparison{
	// The policies are put around the function anew for each call, as where it
	// captures its arguments.
	{"retry-breaker-throttle-bulkhead", []impl{
		{"resilience", func(b *testing.B) {
			guarded, ctx := chain(), context.Background()
			for b.Loop() {
				succeeded(b, guarded(answer)(ctx))
			}
		}},
		{"failsafe", failsafeChainCall},
	}},
	// The function is wrapped once and called often. failsafe has no such form.
	{"wrapped-once", []impl{
		{"resilience", func(b *testing.B) {
			fn, ctx := chain()(answer), context.Background()
			for b.Loop() {
				succeeded(b, fn(ctx))
			}
		}},
		{"failsafe", failsafeChainCall},
	}},
}

func failsafeChainCall(b *testing.B) {
	executor, ctx := failsafeChain(), context.Background()
	fn := func() error { return answer(ctx) }
	for b.Loop() {
		succeeded(b, executor.Run(fn))
	}
}
