package saga_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/saga"
)

var errReadOnly = errors.New("cannot execute UPDATE in a read-only transaction")

func TestHealthReportsFailedWrites(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  saga.RunnerConfig
		want string
	}{
		"claims":     {saga.RunnerConfig{}, "saga: claim: " + errReadOnly.Error()},
		"heartbeats": {saga.RunnerConfig{Concurrency: 1}, "saga: heartbeat: " + errReadOnly.Error()}, // claims nothing
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var readOnly atomic.Bool // as of a standby, or of a database whose disk is full
				st := &hooked{saga.NewMemory(), func(
					ctx context.Context, method, _ string, call func(context.Context) error,
				) error {
					if readOnly.Load() && (method == "Claim" || method == "Heartbeat") {
						return errReadOnly
					}
					return call(ctx)
				}}
				sg := slow(time.Hour)
				r, stop := observed(t, st, c.cfg, silent, sg)
				if name == "heartbeats" {
					mustStart(t, r, sg)
				}
				time.Sleep(2 * time.Second)
				require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()))
				readOnly.Store(true)
				time.Sleep(10 * time.Second)
				health := r.Describe().Health(t.Context())
				require.Equal(t, policy.Fail, health.Status)
				require.Equal(t, "store_fails", health.State)
				require.EqualError(t, health.Err, c.want)
				require.ErrorIs(t, health.Err, errReadOnly)
				readOnly.Store(false)
				time.Sleep(20 * time.Second)
				require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()))
				readOnly.Store(true)
				stop()
				require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()), "of a runner that does not run")
			})
		})
	}
}
