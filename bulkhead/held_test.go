package bulkhead_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/linger"
)

// A done that is never called, or a body that is never closed, is seen in the figures.
func TestStatsTellHowLongTheLongestSlotHasBeenHeld(t *testing.T) {
	for name, cfg := range map[string]bulkhead.Config{
		"plain":    {Limit: 9},
		"levels":   {Limit: 9, Levels: 2, Priority: levelOf},
		"adaptive": {Adaptive: &bulkhead.AdaptiveLimit{}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := bulkhead.New(cfg)
				held := func() time.Duration { return b.Stats().LongestHeld }
				require.Zero(t, held())
				body := func() *linger.Work {
					ctx, work := linger.Begin(t.Context())
					require.NoError(t, b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }))
					return work
				}

				time.Sleep(time.Minute)
				first := hold(t, b)
				time.Sleep(time.Second)
				second := body()
				time.Sleep(time.Second)
				third := hold(t, b)
				time.Sleep(time.Second)
				require.Equal(t, 3*time.Second, held())
				first()
				first()
				require.Equal(t, 2*time.Second, held())
				fourth := hold(t, b)
				third() // from the middle
				fourth()
				require.Equal(t, 2*time.Second, held())
				fourth = hold(t, b)
				fifth := body()
				fourth()
				second.End(nil)
				require.Zero(t, held())
				time.Sleep(time.Second)
				require.Equal(t, time.Second, held())
				fifth.End(nil)
				require.Zero(t, held())
				require.NoError(t, b.Do(t.Context(), func(context.Context) error {
					time.Sleep(time.Second)
					require.Zero(t, held(), "such calls are not timed")
					return nil
				}))
			})
		})
	}
}
