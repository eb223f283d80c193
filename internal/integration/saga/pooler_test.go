package saga_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// pooled returns a PgBouncer, and the DSN of a database behind it that has the tables.
func pooled(t *testing.T) (pooler *services.PgBouncer, dsn string) {
	t.Helper()
	db, err := sql.Open("pgx", services.Postgres(t))
	require.NoError(t, err)
	name := "saga_" + strings.ToLower(rand.Text()[:12])
	_, err = db.Exec("CREATE DATABASE " + name)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := db.Exec("DROP DATABASE " + name + " WITH (FORCE)")
		require.NoError(t, err)
		require.NoError(t, db.Close())
	})
	pooler = services.NewPgBouncer(t, name)
	dsn = "postgres://postgres@" + pooler.Addr + "/" + name + "?default_query_exec_mode="
	require.NoError(t, sqlstore.New(database{Dialect: sqlstore.PostgreSQL, DSN: dsn + "exec"}.open(t),
		sqlstore.PostgreSQL, sqlstore.Config{}).Migrate(t.Context()))
	return pooler, dsn
}

func fiveSteps() *saga.Saga[nothing] {
	sg := &saga.Saga[nothing]{Name: "trip"}
	for i := range 5 {
		sg.Steps = append(sg.Steps, saga.Step[nothing]{Name: fmt.Sprint("s", i), Do: done, Undo: done})
	}
	return sg
}

// TestThroughPgBouncer runs sagas in modes of pgx. Two of them need no state of a connection.
// With the default an error says what to set. The other two describe a statement without a
// name in one round trip and run it in another, perhaps on a connection where it is one of
// another client: pgx gets rows that it does not expect, and panics.
func TestThroughPgBouncer(t *testing.T) {
	_, dsn := pooled(t)
	for _, mode := range []string{"exec", "simple_protocol", "cache_statement"} {
		t.Run(mode, func(t *testing.T) {
			var mu sync.Mutex
			var failures []error
			failed := func(err error) {
				mu.Lock()
				defer mu.Unlock()
				failures = append(failures, err)
			}
			sg := fiveSteps()
			r := saga.NewRunner(database{Dialect: sqlstore.PostgreSQL, DSN: dsn + mode}.store(t), saga.RunnerConfig{})
			r.Observe(func(_ context.Context, e saga.Event) {
				if e.Kind == saga.EventStoreFailed {
					failed(e.Err)
				}
			})
			sagas := saga.Register(r, sg)
			run(t, r)
			sound := mode == "exec" || mode == "simple_protocol"
			var wg sync.WaitGroup
			for i := range 100 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					id := fmt.Sprint(mode, i)
					_, err := sagas.Start(ctx, id, nothing{})
					if err == nil && sound {
						_, err = sagas.Result(ctx, id)
					}
					if err != nil {
						failed(err)
					}
				})
			}
			wg.Wait()
			mu.Lock()
			defer mu.Unlock()
			t.Logf("%d errors", len(failures))
			for _, err := range failures {
				require.False(t, sound, "%v", err)
				var state interface{ SQLState() string }
				if errors.As(err, &state) && (state.SQLState() == "26000" || state.SQLState() == "42P05") {
					require.ErrorContains(t, err, "default_query_exec_mode=exec")
				}
			}
		})
	}
}

// TestPgBouncerRestarts while sagas run.
func TestPgBouncerRestarts(t *testing.T) {
	pooler, dsn := pooled(t)
	sg := fiveSteps()
	store := database{Dialect: sqlstore.PostgreSQL, DSN: dsn + "exec"}.store(t)
	var completed atomic.Int64
	r := saga.NewRunner(store, saga.RunnerConfig{LeaseTTL: 3 * time.Second, Poll: 100 * time.Millisecond})
	r.Observe(func(_ context.Context, e saga.Event) {
		if e.Kind == saga.EventCompleted {
			completed.Add(1)
		}
	})
	sagas := saga.Register(r, sg)
	for i := range 300 {
		_, err := sagas.Start(t.Context(), fmt.Sprint(i), nothing{})
		require.NoError(t, err)
	}
	run(t, r)
	for _, status := range []saga.Status{saga.Running, saga.Completed} {
		for completed.Load() < 50 && status == saga.Running {
			time.Sleep(time.Millisecond)
		}
		pooler.Kill()
		pooler.Start()
	}
	for i := range 300 {
		_, err := sagas.Result(t.Context(), fmt.Sprint(i))
		require.NoError(t, err)
	}
}
