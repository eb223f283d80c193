package saga_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga"
)

func TestConfigHasItsDefaults(t *testing.T) {
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker", Concurrency: 3})
	require.Equal(t, "worker", r.Name())
	require.Equal(t, saga.RunnerConfig{
		Name: "worker", LeaseTTL: 15 * time.Second, Poll: time.Second, Concurrency: 3, Park: 5 * time.Second,
		Drain: 10 * time.Second, MaxTakeovers: 10, DueAfter: time.Minute,
	}, r.Config())
}

// slow returns a sequence of one step that takes so long.
func slow(d time.Duration) *saga.Saga[trip] {
	st := step("flight")
	st.Timeout = 24 * time.Hour
	st.Do = func(ctx context.Context, _ *trip) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return sequence(st)
}

// heartbeats records the heartbeats of a store.
type heartbeats struct {
	store.Store
	mu   sync.Mutex
	at   []time.Time
	down atomic.Bool
}

func (h *heartbeats) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	h.mu.Lock()
	h.at = append(h.at, time.Now())
	h.mu.Unlock()
	if h.down.Load() {
		return nil, errDown
	}
	return h.Store.Heartbeat(ctx, req)
}

// since returns the times of the heartbeats after begun.
func (h *heartbeats) since(begun time.Time) []time.Time {
	synctest.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.at), func(at time.Time) bool { return at.Before(begun) })
}

// idle returns a runner that only starts sagas.
func idle(st store.Store, sg *saga.Saga[trip]) *saga.Runner {
	r := saga.NewRunner(st, saga.RunnerConfig{})
	saga.Register(r, sg)
	return r
}
