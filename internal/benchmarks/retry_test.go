package benchmarks

import (
	"context"
	"errors"
	"testing"
	"time"

	avast "github.com/avast/retry-go/v5"
	"github.com/cenkalti/backoff/v6"
	"github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/retrypolicy"
	sethvargo "github.com/sethvargo/go-retry"

	"github.com/go-resilience/resilience/retry"
)

func BenchmarkRetry(b *testing.B) { benchmark(b, retryCases) }

// Each is used as its documentation has it. What holds the state of one call (a
// BackOff of backoff, a Backoff of sethvargo) is made for each call; what may be
// shared is made once.
var retryCases = []comparison{
	{"first-try", []impl{
		{"resilience", func(b *testing.B) {
			r := retry.New(retry.Config{})
			ctx := context.Background()
			for b.Loop() {
				succeeded(b, r.Do(ctx, answer))
			}
		}},
		{"backoff", func(b *testing.B) {
			ctx := context.Background()
			for b.Loop() {
				_, err := backoff.Retry(ctx, func() (any, error) { return nil, answer(ctx) })
				succeeded(b, err)
			}
		}},
		{"failsafe", func(b *testing.B) {
			executor := failsafe.With(retrypolicy.NewBuilder[any]().WithBackoff(100*time.Millisecond, 10*time.Second).Build())
			ctx := context.Background()
			for b.Loop() {
				succeeded(b, executor.Run(func() error { return answer(ctx) }))
			}
		}},
		{"avast", func(b *testing.B) {
			r := avast.New()
			ctx := context.Background()
			for b.Loop() {
				succeeded(b, r.Do(func() error { return answer(ctx) }))
			}
		}},
		{"sethvargo", func(b *testing.B) {
			ctx := context.Background()
			for b.Loop() {
				succeeded(b, sethvargo.Exponential(ctx, 100*time.Millisecond, answer))
			}
		}},
	}},
	{"two-failures", []impl{
		{"resilience", func(b *testing.B) {
			r := retry.New(retry.Config{Backoff: retry.Constant(0)})
			ctx := context.Background()
			for b.Loop() {
				calls := 0
				succeeded(b, r.Do(ctx, func(context.Context) error { return third(&calls) }))
			}
		}},
		{"backoff", func(b *testing.B) {
			ctx := context.Background()
			for b.Loop() {
				calls := 0
				_, err := backoff.Retry(ctx, func() (any, error) { return nil, third(&calls) },
					backoff.WithBackOff(&backoff.ZeroBackOff{}), backoff.WithMaxTries(3))
				succeeded(b, err)
			}
		}},
		{"failsafe", func(b *testing.B) {
			executor := failsafe.With(retrypolicy.NewWithDefaults[any]())
			for b.Loop() {
				calls := 0
				succeeded(b, executor.Run(func() error { return third(&calls) }))
			}
		}},
		{"avast", func(b *testing.B) {
			r := avast.New(avast.Attempts(3), avast.Delay(0), avast.DelayType(avast.FixedDelay))
			for b.Loop() {
				calls := 0
				succeeded(b, r.Do(func() error { return third(&calls) }))
			}
		}},
		{"sethvargo", func(b *testing.B) {
			ctx := context.Background()
			atOnce := sethvargo.BackoffFunc(func() (time.Duration, bool) { return 0, false })
			for b.Loop() {
				calls := 0
				succeeded(b, sethvargo.Do(ctx, sethvargo.WithMaxRetries(2, atOnce), func(context.Context) error {
					return sethvargo.RetryableError(third(&calls))
				}))
			}
		}},
	}},
}

var errThirdTime = errors.New("not yet")

// third fails twice and then succeeds.
func third(calls *int) error {
	if *calls++; *calls < 3 {
		return errThirdTime
	}
	return nil
}
