package saga_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// shardOf returns the name of the runner of a saga: rendezvous hashing.
func shardOf(id string, shards map[string]*saga.Runner) (of string) {
	var most [sha256.Size]byte
	for name := range shards {
		if sum := sha256.Sum256([]byte(name + "\x00" + id)); bytes.Compare(sum[:], most[:]) > 0 {
			most, of = sum, name
		}
	}
	return of
}

// TestShards has sagas on three databases, of which one hangs, refuses and comes back:
// those of the others go on meanwhile, nothing is lost or done twice, one console shows
// all, and a shard that takes no new sagas empties.
func TestShards(t *testing.T) {
	t.Parallel()
	const sagas, workers = 150, 12
	sg := &saga.Saga[nothing]{Name: "trip", Steps: []saga.Step[nothing]{
		{Name: "a", DoTx: mark, UndoTx: mark},
		{Name: "b", Do: done, Undo: done},
		{Name: "c", DoTx: mark, UndoTx: mark},
	}}
	reg, shards, dbs := registry.New(), map[string]*saga.Runner{}, map[string]*sql.DB{}
	far, proxy := proxied(t, newDatabase(t, sqlstore.PostgreSQL))
	for name, d := range map[string]database{"north": newDatabase(t, sqlstore.PostgreSQL),
		"south": newDatabase(t, sqlstore.PostgreSQL), "far": far} {
		dbs[name] = d.open(t)
		_, err := dbs[name].Exec(markTable)
		require.NoError(t, err)
		shards[name] = saga.NewRunner(sqlstore.New(dbs[name], d.Dialect, sqlstore.Config{}), saga.RunnerConfig{
			Name: name, LeaseTTL: 2 * time.Second, Poll: 50 * time.Millisecond,
		})
		shards[name].Observe(func(context.Context, saga.Event) {})
		saga.Register(shards[name], sg)
		reg.MustAdd(shards[name])
		run(t, shards[name])
	}
	// order starts a saga and waits for its end, as often as it takes.
	order := func(shards map[string]*saga.Runner, id string) {
		r := shards[shardOf(id, shards)]
		for t.Context().Err() == nil {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			_, err := saga.Register(r, sg).Start(ctx, id, nothing{})
			if err == nil {
				_, err = saga.Register(r, sg).Result(ctx, id)
			}
			cancel()
			if err == nil {
				return
			}
		}
	}
	orders := func(prefix string, shards map[string]*saga.Runner) (near, all *sync.WaitGroup) {
		near, all = new(sync.WaitGroup), new(sync.WaitGroup)
		free := map[string]chan struct{}{} // a shard that hangs takes no worker from the others
		for i := range sagas {
			id := fmt.Sprint(prefix, "-", i)
			of := shardOf(id, shards)
			if free[of] == nil {
				free[of] = make(chan struct{}, workers)
			}
			if of != "far" {
				near.Add(1)
			}
			slot := free[of]
			all.Go(func() {
				slot <- struct{}{}
				order(shards, id)
				<-slot
				if of != "far" {
					near.Done()
				}
			})
		}
		return near, all
	}
	page := func() string {
		c := console.New(reg, console.Config{})
		defer c.Close()
		rec := httptest.NewRecorder()
		c.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/", nil).WithContext(t.Context()))
		return rec.Body.String()
	}

	proxy.Hang()
	near, all := orders("first", shards)
	near.Wait() // although one of three hangs
	require.Zero(t, shards["far"].Stats().Commits)
	for name := range shards {
		require.Contains(t, page(), name)
	}
	proxy.Refuse()
	near, more := orders("second", shards)
	near.Wait()
	proxy.Heal()
	all.Wait()
	more.Wait()

	rest := map[string]*saga.Runner{"north": shards["north"], "south": shards["south"]}
	_, all = orders("third", rest)
	all.Wait()
	counts, _, err := shards["far"].Counts(t.Context())
	require.NoError(t, err)
	for _, c := range counts {
		require.Zero(t, c.Running, "far takes no new sagas, and has none left")
	}

	begun := map[string]int{}
	for _, prefix := range []string{"first", "second"} {
		for i := range sagas {
			begun[shardOf(fmt.Sprint(prefix, "-", i), shards)]++
		}
	}
	for i := range sagas {
		begun[shardOf(fmt.Sprint("third-", i), rest)]++
	}
	for name, db := range dbs {
		require.Equal(t, 2*begun[name], marks(t, db), name)
		require.Positive(t, begun[name])
	}
	_, err = shards["north"].Get(t.Context(), "no such saga")
	require.True(t, errors.Is(err, saga.ErrNotFound))
}
