package saga_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// TestTenantIsStored checks the tenant in the request that starts a saga.
func TestTenantIsStored(t *testing.T) {
	sg := sequence(step("flight"))
	sg.Tenant = func(s trip) string { return strings.Join(s.Calls, "") }
	st := saga.NewMemory()
	r := saga.NewRunner(st, saga.RunnerConfig{})
	sagas := saga.Register(r, sg)
	_, err := sagas.Start(t.Context(), "trip-1", trip{Calls: []string{"acme"}})
	require.NoError(t, err)
	rec, err := st.Load(t.Context(), "trip-1")
	require.NoError(t, err)
	require.Equal(t, "acme", rec.Tenant)
	for _, invalid := range []string{strings.Repeat("x", 101), "\x00"} {
		_, err = sagas.Start(t.Context(), "trip-2", trip{Calls: []string{invalid}})
		require.ErrorContains(t, err, "tenant is ")
	}
}

// A lateReply store starts a saga, and cancels the ctx of that call before it replies.
type lateReply struct {
	saga.Store
	cancel func()
}

func (s *lateReply) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	_, _, err := s.Store.Start(ctx, req)
	if s.cancel(); err == nil {
		err = ctx.Err()
	}
	return store.Record{}, false, err
}

func (s *lateReply) Load(ctx context.Context, id string) (store.Record, error) {
	if ctx.Err() != nil {
		return store.Record{}, ctx.Err()
	}
	return s.Store.Load(ctx, id)
}

// TestCanceledStartRunsTheSaga: this runner owns the saga, so no other runner takes it before its lease expires. The
// ctx of Start does not reach the steps.
func TestCanceledStartRunsTheSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		flight := step("flight")
		flight.Do = func(ctx context.Context, _ *trip) error { return ctx.Err() }
		sg := sequence(flight)
		ctx, cancel := context.WithCancel(t.Context())
		r, _ := observed(t, &lateReply{saga.NewMemory(), cancel}, saga.RunnerConfig{},
			on(saga.EventTakenOver, func(saga.Event) { t.Error("no process has crashed") }), sg)
		synctest.Wait()
		began := time.Now()
		_, err := saga.Register(r, sg).Start(ctx, "trip-1", trip{})
		require.NoError(t, err)
		requireEnd(t, r, "trip-1", nil)
		require.Zero(t, time.Since(began))
	})
}

// A slowStart returns from Start a second after the saga exists.
type slowStart struct{ store.Store }

func (s slowStart) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	rec, created, err := s.Store.Start(ctx, req)
	time.Sleep(time.Second)
	return rec, created, err
}

// The runner starts a saga that it cannot run yet, and claims it before Start has returned. It reports the start once,
// before the saga's other events, and waits for a slow observer.
func TestStartIsReportedFirst(t *testing.T) {
	for name, observerTakes := range map[string]time.Duration{
		"claimed first": 0, "while observers run": 10 * time.Second,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var kinds []saga.EventKind
				sg := sequence(step("flight"))
				r := saga.NewRunner(slowStart{saga.NewMemory()}, saga.RunnerConfig{})
				r.Observe(func(_ context.Context, e saga.Event) {
					if e.Kind == saga.EventCreated {
						time.Sleep(observerTakes)
					}
					kinds = append(kinds, e.Kind)
				})
				trips := saga.Register(r, sg)
				var started sync.WaitGroup
				started.Go(func() {
					_, err := trips.Start(t.Context(), "trip-1", trip{})
					require.NoError(t, err)
				})
				synctest.Wait()
				if observerTakes > 0 {
					time.Sleep(2 * time.Second) // Start reports now
				}
				ctx, stop := context.WithCancel(t.Context())
				var ran sync.WaitGroup
				ran.Go(func() { require.NoError(t, r.Run(ctx)) })
				_, err := trips.Result(t.Context(), "trip-1")
				require.NoError(t, err)
				started.Wait()
				stop()
				ran.Wait()
				require.Equal(t, []saga.EventKind{
					saga.EventCreated, saga.EventAttempted, saga.EventStepDone, saga.EventCompleted,
				}, kinds)
				require.Equal(t, 1, total(r, "status=started"))
			})
		})
	}
}
