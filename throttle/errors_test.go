package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/throttle"
)

// Every pattern reads each error of this package as a call that was not made.
func TestEveryErrorIsARefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := func(cfg throttle.Config) *throttle.Limiter {
			cfg.Rate, cfg.Burst = 1, 1
			l := throttle.New(cfg)
			require.True(t, l.Allow())
			return l
		}
		soon, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		full := limit(throttle.Config{MaxWait: -1, Queue: 1})
		go func() { _ = full.Wait(t.Context()) }()
		synctest.Wait()
		outage := func(err error) error {
			return throttle.NewShared(throttle.SharedConfig{
				Name: "api", Rate: 1, OnOutage: throttle.RefuseAll,
				Eval: func(context.Context, string, []string, ...any) (any, error) { return nil, err },
			}).Wait(t.Context(), "")
		}
		adaptive := throttle.NewAdaptive(throttle.AdaptiveConfig{})
		adaptive.SetRand(func() float64 { return 0 })
		_ = adaptive.Do(t.Context(), overloaded)
		gone, leave := context.WithCancel(t.Context())
		time.AfterFunc(time.Microsecond, leave)

		for _, c := range []struct {
			why       throttle.Reason
			err       error
			retryable bool
			after     time.Duration
		}{
			{throttle.OverLimit, limit(throttle.Config{}).Wait(t.Context()), true, time.Second},
			{throttle.WaitTooLong, limit(throttle.Config{MaxWait: time.Millisecond}).Wait(t.Context()), true, time.Second},
			{throttle.QueueFull, full.Wait(t.Context()), true, 2 * time.Second},
			{throttle.DeadlineTooClose, limit(throttle.Config{MaxWait: -1}).Wait(soon), true, time.Second},
			{throttle.ContextEnded, limit(throttle.Config{MaxWait: -1}).Wait(gone), true, time.Second - time.Microsecond},
			{throttle.TooCostly, limit(throttle.Config{Cost: func(context.Context) int { return 2 }}).Wait(t.Context()), false, 0},
			{throttle.Outage, outage(errDown), true, time.Second},
			{throttle.Outage, outage(word{answered: true, throttled: true, after: time.Hour}), true, time.Second},
			{throttle.Shed, adaptive.Do(t.Context(), ok), true, 0},
		} {
			require.Equal(t, c.why, reason(c.err))
			for _, err := range []error{c.err, fmt.Errorf("calling: %w", c.err), errors.Join(c.err, c.err)} {
				end := behavior.Read(err)
				require.Equal(t, behavior.Refused, end.Kind, c.why)
				require.Equal(t, c.retryable, end.Retryable, c.why)
				require.Equal(t, c.after, end.RetryAfter, c.why)
				require.Zero(t, end.FailedAfter, c.why)
				require.ErrorIs(t, err, throttle.ErrLimited)
			}
		}
		time.Sleep(time.Minute)
	})
}
