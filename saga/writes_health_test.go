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
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A readOnly store is a standby, or a database whose disk is full, while on is set.
type readOnly struct {
	store.Store
	on atomic.Bool
}

var errReadOnly = errors.New("cannot execute UPDATE in a read-only transaction")

func (s *readOnly) Claim(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
	if s.on.Load() {
		return nil, errReadOnly
	}
	return s.Store.Claim(ctx, req)
}

func (s *readOnly) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if s.on.Load() {
		return nil, errReadOnly
	}
	return s.Store.Heartbeat(ctx, req)
}

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
				st, sg := &readOnly{Store: saga.NewMemory()}, slow(time.Hour)
				r, stop := observed(t, store.Store(st), c.cfg, silent, sg)
				if name == "heartbeats" {
					mustStart(t, r, sg)
				}
				time.Sleep(2 * time.Second)
				require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()))
				st.on.Store(true)
				time.Sleep(10 * time.Second)
				health := r.Describe().Health(t.Context())
				require.Equal(t, policy.Fail, health.Status)
				require.Equal(t, "store_fails", health.State)
				require.EqualError(t, health.Err, c.want)
				require.ErrorIs(t, health.Err, errReadOnly)
				st.on.Store(false)
				time.Sleep(20 * time.Second)
				require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()))
				st.on.Store(true)
				stop()
				require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()), "of a runner that does not run")
			})
		})
	}
}
