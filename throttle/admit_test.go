package throttle_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// Admit is what servers call that tell clients what is left.
func TestAdmitTellsWhatIsLeft(t *testing.T) {
	cfg := throttle.Config{Rate: 1, Burst: 4, Cost: func(context.Context) int { return 3 }}
	limiter := throttle.New(cfg)
	group := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
	shared := throttle.NewShared(throttle.SharedConfig{
		Timeout: time.Minute,
		Name:    "limit", Rate: cfg.Rate, Burst: cfg.Burst, Cost: cfg.Cost, Instances: 1,
		Eval: func(context.Context, string, []string, ...any) (any, error) {
			return nil, errors.New("connection refused")
		},
	})
	for name, admit := range map[string]func(context.Context) (throttle.Decision, error){
		"Limiter": limiter.Admit,
		"Group":   func(ctx context.Context) (throttle.Decision, error) { return group.Admit(ctx, "a") },
		"Shared":  func(ctx context.Context) (throttle.Decision, error) { return shared.Admit(ctx, "a") },
	} {
		t.Run(name, func(t *testing.T) {
			d, err := admit(t.Context())
			require.NoError(t, err)
			require.Equal(t, 4, d.Limit)
			require.Equal(t, 1, d.Remaining)
			d, err = admit(t.Context())
			limited, ok := errors.AsType[*throttle.LimitedError](err)
			require.True(t, ok)
			require.Equal(t, throttle.OverLimit, limited.Reason)
			require.Equal(t, 3, limited.Cost)
			require.Equal(t, 1, d.Remaining)
			canceled, cancel := context.WithCancel(t.Context())
			cancel()
			_, err = admit(canceled)
			require.ErrorIs(t, err, context.Canceled)
			require.NotErrorIs(t, err, throttle.ErrLimited)
		})
	}
}

func TestAdmitWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1})
		require.True(t, limiter.Allow())
		start := time.Now()
		d, err := limiter.Admit(t.Context())
		require.NoError(t, err)
		require.Equal(t, time.Second, time.Since(start))
		require.Zero(t, d.Remaining)
		require.Equal(t, time.Second, d.ResetAfter)
	})
}

// A server with levels tells each client what is left for it, not for the least important.
func TestAdmitTellsWhatIsLeftForTheLevel(t *testing.T) {
	cfg := throttle.Config{
		Rate: 1, Burst: 10, Levels: 2, Priority: levelOf, Reserve: []float64{0.5},
		Quotas: []throttle.Quota{{N: 8, Per: throttle.Day}},
	}
	for name, quotas := range map[string][]throttle.Quota{"rate": nil, "quota": cfg.Quotas} {
		cfg.Quotas = quotas
		limiter := throttle.New(cfg)
		group := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		set := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		require.NoError(t, set.Set("a", throttle.Limit{Rate: 1, Burst: 10, Quotas: quotas}))
		left := 9 // for level 0
		if quotas != nil {
			left = 7
		}
		for name2, admit := range map[string]func(context.Context) (throttle.Decision, error){
			"Limiter": limiter.Admit,
			"Group":   func(ctx context.Context) (throttle.Decision, error) { return group.Admit(ctx, "a") },
			"Set":     func(ctx context.Context) (throttle.Decision, error) { return set.Admit(ctx, "a") },
		} {
			t.Run(name+" "+name2, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d, err := admit(at(t.Context(), 0))
					require.NoError(t, err)
					require.Equal(t, left, d.Remaining)
					d, err = admit(at(t.Context(), 1))
					require.NoError(t, err)
					require.Equal(t, left-1-(left+1)/2, d.Remaining)
				})
			})
		}
	}
}
