package memory_test

import (
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga/internal/memory"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

var trip = store.Definition{Saga: "trip", Version: 1}

// started returns a store with sagas that became due one second after the other. Their ids
// are in another order.
func started(t *testing.T, n int) (*memory.Store, []string) {
	m, ids := memory.New(), make([]string, n)
	for i := range ids {
		ids[i] = strconv.Itoa((7 * i) % n)
		_, _, err := m.Start(t.Context(),
			store.StartRequest{ID: ids[i], Saga: trip.Saga, Version: trip.Version, Status: store.Running,
				State: []byte("data"), Progress: []byte("steps"), Log: []store.Entry{{Kind: "begun"}}})
		require.NoError(t, err)
		time.Sleep(time.Second)
	}
	return m, ids
}

func claim(t *testing.T, m *memory.Store, owner string, limit int) []store.Record {
	recs, err := m.Claim(t.Context(),
		store.ClaimRequest{Owner: owner, LeaseTTL: time.Minute, Limit: limit, Definitions: []store.Definition{trip}})
	require.NoError(t, err)
	return recs
}

// commit releases a saga of which a has the record.
func commit(t *testing.T, m *memory.Store, a store.Record, status store.Status, failures int) {
	_, err := m.Commit(t.Context(),
		store.CommitRequest{ID: a.ID, Epoch: a.Epoch, Seq: a.Seq, Nonce: 1, Status: status, Failures: failures,
			Progress: a.Progress, Log: []store.Entry{{Kind: "done"}}, Release: true})
	require.NoError(t, err)
}

// What has been due for longest is claimed, told of and deleted first.
func TestOldestFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		m, ids := started(t, 50)
		counts, err := m.Counts(t.Context())
		require.NoError(t, err)
		require.Equal(t, 50, counts.Sagas[0].Due)
		require.Equal(t, begun, counts.Sagas[0].OldestDue)

		for _, id := range ids {
			recs := claim(t, m, "a", 1)
			require.Equal(t, id, recs[0].ID)
			commit(t, m, recs[0], store.Completed, 0)
			time.Sleep(time.Second)
		}
		for i := range ids {
			n, err := m.DeleteEnded(t.Context(), store.Completed, 0, 1)
			require.NoError(t, err)
			require.Equal(t, 1, n)
			_, err = m.Load(t.Context(), ids[i])
			require.ErrorIs(t, err, store.ErrNotFound)
		}
	})
}

// An owner that has given a saga up cannot renew it, though it knows the epoch.
func TestHeartbeatAfterARelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := started(t, 1)
		a := claim(t, m, "a", 1)[0]
		held := store.HeartbeatRequest{Owner: "a", LeaseTTL: time.Minute, Held: []store.Held{{ID: a.ID, Epoch: a.Epoch}}}
		renewed, err := m.Heartbeat(t.Context(), held)
		require.NoError(t, err)
		require.Len(t, renewed, 1)
		commit(t, m, a, store.Running, 0)
		renewed, err = m.Heartbeat(t.Context(), held)
		require.NoError(t, err)
		require.Empty(t, renewed)
	})
}

// A record is the caller's own.
func TestRecordsAreCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, ids := started(t, 1)
		for range 2 {
			rec, err := m.Load(t.Context(), ids[0])
			require.NoError(t, err)
			require.Equal(t, "data steps", string(rec.State)+" "+string(rec.Progress))
			rec.State[0], rec.Progress[0] = 'x', 'x'
		}
	})
}

// Any two methods may be called at once. The race detector sees one that takes no lock: nothing
// else puts the two goroutines in order.
func TestStoreUnderStress(t *testing.T) {
	ctx := t.Context()
	start := func(m *memory.Store, id string) {
		_, _, _ = m.Start(ctx, store.StartRequest{ID: id, Saga: trip.Saga, Version: trip.Version, Status: store.Running,
			Owner:  "a",
			Parent: "parent", ParentStep: "step", Log: []store.Entry{{Kind: "begun"}}})
	}
	calls := []func(m *memory.Store, i int){
		func(m *memory.Store, i int) { start(m, strconv.Itoa(i)) },
		func(m *memory.Store, _ int) {
			_, _ = m.Claim(ctx, store.ClaimRequest{Owner: "a", Limit: 1, Definitions: []store.Definition{trip}})
		},
		func(m *memory.Store, i int) {
			_, _ = m.Heartbeat(ctx, store.HeartbeatRequest{Owner: "a", Held: []store.Held{{ID: "first", Epoch: int64(i)}}})
		},
		func(m *memory.Store, i int) {
			_, _ = m.Commit(ctx, store.CommitRequest{ID: "first", Epoch: 1, Seq: int64(i), Status: store.Completed,
				Log: []store.Entry{{Kind: "done"}}})
		},
		func(m *memory.Store, _ int) {
			_, _ = m.Post(ctx, store.PostRequest{ID: "first", Payload: []byte("why"), Cancel: true})
		},
		func(m *memory.Store, _ int) { _, _ = m.Load(ctx, "first") },
		func(m *memory.Store, _ int) { _, _, _ = m.List(ctx, store.Filter{}) },
		func(m *memory.Store, _ int) { _, _ = m.Counts(ctx) },
		func(m *memory.Store, _ int) { _, _ = m.History(ctx, "first", 0, 0) },
		func(m *memory.Store, _ int) { _, _ = m.DeleteEnded(ctx, store.Completed, 0, 1) },
		func(m *memory.Store, _ int) {
			_, _ = m.Children(ctx, store.ChildrenRequest{Parent: "parent", Step: "step"})
		},
		func(m *memory.Store, i int) {
			_, _ = m.Post(ctx, store.PostRequest{ID: "first", Name: strconv.Itoa(i)})
		},
		func(m *memory.Store, _ int) { _, _ = m.Messages(ctx, "first") },
		func(m *memory.Store, _ int) { _, _ = m.Post(ctx, store.PostRequest{ID: "first"}) },
	}
	for i, one := range calls {
		for _, other := range calls[:i+1] {
			m := memory.New()
			start(m, "first")
			var both sync.WaitGroup
			for _, call := range []func(*memory.Store, int){one, other} {
				both.Go(func() {
					for i := range 10 {
						call(m, i)
					}
				})
			}
			both.Wait()
		}
	}
}
