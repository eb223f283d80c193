package whole_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// Each policy is a Policy.
var (
	_ resilience.Policy = (*retry.Retrier)(nil)
	_ resilience.Policy = (*breaker.Breaker)(nil)
	_ resilience.Policy = (*throttle.Limiter)(nil)
	_ resilience.Policy = (*bulkhead.Bulkhead)(nil)
)

// A gauge counts the calls that pass between two policies.
type gauge struct{ began, ended, inside, most atomic.Int64 }

func (g *gauge) wrap(next resilience.Func) resilience.Func {
	return func(ctx context.Context) error {
		g.began.Add(1)
		inside := g.inside.Add(1)
		for most := g.most.Load(); inside > most && !g.most.CompareAndSwap(most, inside); most = g.most.Load() {
		}
		defer func() {
			g.inside.Add(-1)
			g.ended.Add(1)
		}()
		return next(ctx)
	}
}

// TestChainAccountsForEveryCall sends calls that succeed, fail, are told to come
// back later, hang, panic, exit and are canceled, through all the policies at
// once, and then counts: each call has ended once, and everything that a policy
// lends is back.
func TestChainAccountsForEveryCall(t *testing.T) {
	const (
		workers = 64
		slots   = 4
	)
	calls := 500 // of each worker
	if testing.Short() {
		calls = 100
	}
	synctest.Test(t, func(t *testing.T) {
		retries := retry.New(retry.Config{
			Attempts: 4,
			Backoff:  retry.Exponential(time.Millisecond, 10*time.Millisecond),
			Budget:   retry.NewBudget(retry.BudgetConfig{}),
		})
		circuit := breaker.New(breaker.Config{FailureRate: 0.4, Window: time.Second, OpenFor: 10 * time.Millisecond})
		limit := throttle.New(throttle.Config{Rate: 4000, Burst: 50, MaxWait: time.Millisecond})
		places := bulkhead.New(bulkhead.Config{Limit: slots, Queue: 16, MaxWait: 2 * time.Millisecond})
		var outside, called, admitted, sent, worked gauge
		fn := resilience.Chain(
			outside.wrap, retries.Wrap, called.wrap, circuit.Wrap, admitted.wrap, limit.Wrap, sent.wrap, places.Wrap,
			worked.wrap, resilience.Timeout(5*time.Millisecond),
		)(anything)

		var outcomes [4]atomic.Int64 // answered, failed, panicked, exited
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for range calls {
					time.Sleep(time.Duration(rand.Int64N(int64(10 * time.Millisecond))))
					outcomes[endOf(t, fn)].Add(1)
				}
			})
		}
		wg.Wait()

		var total int64
		for i := range outcomes {
			require.Positive(t, outcomes[i].Load(), "outcome %d", i)
			total += outcomes[i].Load()
		}
		require.EqualValues(t, workers*calls, total)
		for _, g := range []*gauge{&outside, &called, &admitted, &sent, &worked} {
			require.Equal(t, g.began.Load(), g.ended.Load())
			require.Zero(t, g.inside.Load())
		}

		require.EqualValues(t, sent.began.Load(), limit.Stats().Admitted)
		require.EqualValues(t, sent.began.Load(), limit.Stats().Spent)
		require.Positive(t, limit.Stats().Refused)
		require.Zero(t, limit.Stats().Queued)

		s := places.Stats()
		require.LessOrEqual(t, worked.most.Load(), int64(slots))
		require.EqualValues(t, worked.began.Load(), s.Admitted)
		require.Positive(t, s.Refused)
		require.Equal(t, s.Refused, limit.Stats().Refunded, "tokens of the calls that the bulkhead refused")
		require.Zero(t, s.InFlight)
		require.Equal(t, []int{0}, s.Queued)
		for range slots {
			_, err := places.Begin(t.Context())
			require.NoError(t, err, "every slot is back")
		}

		// The breaker has every permit back: it closes when all is well.
		time.Sleep(time.Minute)
		require.NoError(t, circuit.Do(t.Context(), func(context.Context) error { return nil }))
		require.Equal(t, breaker.Closed, circuit.State())
	})
}

// endOf runs fn on a goroutine of its own, with a ctx that may end early, and
// returns which way it ended.
func endOf(t *testing.T, fn resilience.Func) int {
	end := make(chan int, 1)
	go func() {
		way := 3 // exited, unless it gets to say something else
		defer func() {
			if recover() != nil {
				way = 2
			}
			end <- way
		}()
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.Int64N(int64(20*time.Millisecond))))
		defer cancel()
		if fn(ctx) == nil {
			way = 0
		} else {
			way = 1
		}
	}()
	return <-end
}

type comeBack struct{ error }

func (comeBack) RetryAfter() time.Duration { return 2 * time.Millisecond }

// anything does one of all the things that a call can do.
func anything(ctx context.Context) error {
	switch n := rand.IntN(100); {
	case n < 60:
		time.Sleep(time.Duration(rand.Int64N(int64(time.Millisecond))))
		return nil
	case n < 85:
		return errors.New("down")
	case n < 87:
		return comeBack{errors.New("overloaded")}
	case n < 95: // hangs, and heeds its ctx
		<-ctx.Done()
		return ctx.Err()
	case n < 97: // takes too long, and does not
		time.Sleep(8 * time.Millisecond)
		return nil
	case n < 99:
		panic("boom")
	default:
		runtime.Goexit()
		return nil
	}
}
