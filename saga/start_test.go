package saga_test

import (
	"context"
	"strings"
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
		require.ErrorContains(t, err, "the tenant is ")
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

// TestCanceledStartRunsTheSaga: this runner owns the saga, so no other runner takes it before its lease expires.
func TestCanceledStartRunsTheSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(step("flight"))
		ctx, cancel := context.WithCancel(t.Context())
		r, _ := observed(t, &lateReply{saga.NewMemory(), cancel}, saga.RunnerConfig{},
			on(saga.EventTakenOver, func(saga.Event) { t.Error("no process has crashed") }), sg)
		synctest.Wait()
		began := time.Now()
		_, err := saga.Register(r, sg).Start(ctx, "trip-1", trip{})
		require.NoError(t, err)
		_, err = result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Zero(t, time.Since(began))
	})
}
