package breaker_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

// No result is lost or counted twice, and no counter decreases. After a Reset the window has only the results
// of calls that began after it.
func TestBreakerCountsExactlyStress(t *testing.T) {
	for name, cfg := range map[string]breaker.Config{
		"last calls":   {FailureRate: 1, WindowCalls: 1 << 17, MinCalls: 1 << 17},
		"long window":  {FailureRate: 1, Window: time.Hour, MinCalls: 1e9},
		"short window": {FailureRate: 1, Window: time.Millisecond, MinCalls: 1e9},
		"slow":         {ConsecutiveFailures: 1e9, SlowAfter: time.Hour, Window: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			const (
				workers = 8
				rounds  = 6000
			)
			b := breaker.New(cfg)
			var succeeded, failed atomic.Int64
			calls := func(seed uint64) {
				r := rand.New(rand.NewPCG(9, seed))
				for range rounds {
					if r.IntN(50) == 0 {
						_ = do(b, down)
						failed.Add(1)
					} else {
						_ = do(b, ok)
						succeeded.Add(1)
					}
				}
			}
			requireExact := func() {
				s := b.Stats()
				require.Equal(t, succeeded.Load(), s.Succeeded)
				require.Equal(t, failed.Load(), s.Failed)
				if cfg.Window != time.Millisecond {
					require.Equal(t, succeeded.Load(), s.Window.Succeeded)
					require.Equal(t, failed.Load(), s.Window.Failed)
				}
			}
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() { calls(uint64(w)) })
			}
			wg.Go(func() {
				var last breaker.Stats
				for range 200 {
					s := b.Stats()
					require.GreaterOrEqual(t, s.Succeeded, last.Succeeded)
					require.GreaterOrEqual(t, s.Failed, last.Failed)
					last = s
					time.Sleep(10 * time.Microsecond)
				}
			})
			wg.Wait()
			requireExact()

			// The results of calls that began before a Reset go into the totals alone.
			var begun []func(error)
			for range 100 {
				done, err := b.Begin(context.Background())
				require.NoError(t, err)
				begun = append(begun, done)
			}
			hold := make(chan struct{})
			for i, done := range begun {
				wg.Go(func() {
					if i%2 == 0 {
						<-hold
					}
					done(nil)
					succeeded.Add(1)
				})
			}
			b.Reset()
			require.Zero(t, b.Stats().Window)
			close(hold)
			wg.Wait()
			s := b.Stats()
			require.Zero(t, s.Window)
			require.Equal(t, succeeded.Load(), s.Succeeded)
			require.Equal(t, failed.Load(), s.Failed)
		})
	}
}
