package saga_test

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// run runs a runner until the test ends.
func run(t *testing.T, r *saga.Runner) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
}

type nothing struct{}

func done(context.Context, *nothing) error { return nil }

// markTable has no key: what an open transaction has written keeps nobody else
// from writing the same.
const markTable = `CREATE TABLE mark (id text)`

// mark returns a DoTx or UndoTx that inserts a mark.
func mark(ctx context.Context, tx *sql.Tx, _ *nothing) error {
	// each database has its own placeholders
	_, err := tx.ExecContext(ctx, `INSERT INTO mark (id) VALUES ('`+saga.CommandFrom(ctx).ID+`')`)
	return err
}

func marks(t *testing.T, db *sql.DB) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRow(`SELECT count(*) FROM mark`).Scan(&n))
	return n
}

// TestTransactionThatIsLongPoisonsNoSaga has a DoTx take longer than the lease.
// On SQLite it keeps every heartbeat out.
func TestTransactionThatIsLongPoisonsNoSaga(t *testing.T) {
	onEach(t, func(t *testing.T, d database) {
		t.Parallel()
		const lease = 2 * time.Second
		r := saga.NewRunner(d.store(t), saga.RunnerConfig{LeaseTTL: lease, Poll: 20 * time.Millisecond})
		ended := make(chan error, 1)
		long := &saga.Saga[nothing]{Name: "long", Steps: []saga.Step[nothing]{{
			Name: "long", Attempts: 2, UndoTx: mark, Backoff: func(int) time.Duration { return 0 },
			DoTx: func(ctx context.Context, tx *sql.Tx, _ *nothing) error {
				select {
				case <-ctx.Done():
				case <-time.After(lease + lease/2):
				}
				return ctx.Err()
			},
		}}}
		bystander := &saga.Saga[nothing]{Name: "bystander", Steps: []saga.Step[nothing]{{
			Name: "step", Undo: done,
			Do: func(ctx context.Context, _ *nothing) error {
				select {
				case <-ctx.Done():
				case err := <-ended:
					ended <- err
				}
				return ctx.Err()
			},
		}}}
		saga.Register(r, long)
		saga.Register(r, bystander)
		run(t, r)
		_, err := saga.Register(r, bystander).Start(t.Context(), "b", nothing{})
		require.NoError(t, err)
		_, err = saga.Register(r, long).Start(t.Context(), "a", nothing{})
		require.NoError(t, err)
		_, err = result(t.Context(), r, "a")
		ended <- err
		if d.Dialect == sqlstore.SQLite {
			require.ErrorIs(t, err, saga.ErrCompensated)
		} else {
			require.NoError(t, err)
		}
		_, err = result(t.Context(), r, "b")
		require.NoError(t, err)
		require.Zero(t, r.Stats().TakenOver)
	})
}

// result waits for a saga of any definition.
func result(ctx context.Context, r *saga.Runner, id string) (*saga.Instance, error) {
	in, err := r.Wait(ctx, id)
	if err == nil && in.Status != saga.Completed {
		err = &saga.Error{Saga: in.Saga, ID: id, Status: in.Status, Step: in.Step, Err: errors.New(in.Cause)}
	}
	return in, err
}
