package resiliencesql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
)

// A fake is a database whose transactions are empty.
type fake struct {
	t                          *testing.T
	onBegin, onCommit          func() error
	begins, commits, rollbacks int
}

func newFake(t *testing.T) *fake { return &fake{t: t} }

// open returns a pool of one connection, which no transaction may keep.
func (f *fake) open() *sql.DB {
	db := sql.OpenDB(f)
	db.SetMaxOpenConns(1)
	f.t.Cleanup(func() { require.NoError(f.t, db.Close()) })
	return db
}

func (f *fake) Connect(context.Context) (driver.Conn, error) { return fakeConn{f}, nil }
func (f *fake) Driver() driver.Driver                        { return nil }

type fakeConn struct{ *fake }

func (fakeConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("no statements") }
func (fakeConn) Close() error                        { return nil }

func (c fakeConn) Begin() (driver.Tx, error) {
	c.begins++
	if c.onBegin != nil {
		return c, c.onBegin()
	}
	return c, nil
}

func (c fakeConn) Commit() error {
	c.commits++
	if c.onCommit != nil {
		return c.onCommit()
	}
	return nil
}

func (c fakeConn) Rollback() error { c.rollbacks++; return nil }

func nothing(context.Context, *sql.Tx) error { return nil }

func TestInTxCommits(t *testing.T) {
	db := newFake(t)
	v, err := resiliencesql.Value(t.Context(), db.open(), resiliencesql.Config{},
		func(context.Context, *sql.Tx) (int, error) { return 7, nil })
	require.NoError(t, err)
	require.Equal(t, 7, v)
	require.Equal(t, 1, db.commits)
	require.Zero(t, db.rollbacks)
}

func TestInTxTriesAgainWhatHadNoEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		retries := retry.New(retry.Config{Attempts: 3})
		for _, err := range []error{state("40001"), state("57P03"), io.EOF} {
			db := newFake(t)
			runs := 0
			v, got := resiliencesql.Value(t.Context(), db.open(), resiliencesql.Config{Retry: retries.Wrap},
				func(context.Context, *sql.Tx) (int, error) {
					if runs++; runs < 3 {
						return -1, err
					}
					return runs, nil
				})
			require.NoError(t, got)
			require.Equal(t, []int{3, 3, 3, 1, 2}, []int{v, runs, db.begins, db.commits, db.rollbacks})
		}
		db := newFake(t)
		db.onCommit = func() error {
			if db.commits < 2 {
				return state("40001")
			}
			return nil
		}
		require.NoError(t, resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{Retry: retries.Wrap}, nothing))
		require.Equal(t, 2, db.commits)
	})
}

func TestInTxDoesNotRepeatAnAnswer(t *testing.T) {
	retries := retry.New(retry.Config{Attempts: 3})
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	db := newFake(t)
	cfg := resiliencesql.Config{Retry: resilience.Chain(retries.Wrap, circuit.Wrap)}
	v, err := resiliencesql.Value(t.Context(), db.open(), cfg,
		func(context.Context, *sql.Tx) (int, error) { return 7, state("23505") })
	require.ErrorIs(t, err, state("23505"))
	require.Zero(t, v)
	require.Equal(t, 1, db.begins)
	require.Equal(t, breaker.Closed, circuit.State())
}

// TestAnUnknownOutcomeIsNotRepeated: the transaction may have been committed.
func TestAnUnknownOutcomeIsNotRepeated(t *testing.T) {
	retries := retry.New(retry.Config{Attempts: 3})
	db := newFake(t)
	db.onCommit = func() error { return io.ErrUnexpectedEOF }
	err := resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{Retry: retries.Wrap}, nothing)
	require.ErrorIs(t, err, resiliencesql.ErrOutcomeUnknown)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, 1, db.begins)
}

func TestCheckSettlesTheOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := errors.New("the database is away")
		for _, c := range []struct {
			committed bool
			err       error
			commits   int
		}{{true, nil, 1}, {false, nil, 2}, {false, asked, 1}} {
			db, checks := newFake(t), 0
			db.onCommit = func() error {
				if db.commits == 1 {
					return io.EOF
				}
				return nil
			}
			err := resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{
				Retry: retry.New(retry.Config{}).Wrap,
				Check: func(_ context.Context, tx *sql.Tx) (bool, error) {
					require.NotNil(t, tx)
					checks++
					return c.committed, c.err
				},
			}, nothing)
			require.Equal(t, 1, checks)
			require.Equal(t, c.commits, db.commits)
			require.Equal(t, 1, db.rollbacks, "that of Check")
			if c.err == nil {
				require.NoError(t, err)
				continue
			}
			require.ErrorIs(t, err, resiliencesql.ErrOutcomeUnknown)
			require.ErrorIs(t, err, asked)
			require.ErrorIs(t, err, io.EOF)
		}
		db := newFake(t)
		db.onCommit = func() error { db.onBegin = func() error { return asked }; return io.EOF }
		err := resiliencesql.InTx(t.Context(), db.open(),
			resiliencesql.Config{Check: func(context.Context, *sql.Tx) (bool, error) {
				panic("there is no transaction to ask in")
			}}, nothing)
		require.ErrorIs(t, err, resiliencesql.ErrOutcomeUnknown)
		require.ErrorIs(t, err, asked)
	})
}

func TestPanicAndGoexitRollBack(t *testing.T) {
	db := newFake(t)
	pool := db.open()
	require.PanicsWithValue(t, "boom", func() {
		_ = resiliencesql.InTx(t.Context(), pool, resiliencesql.Config{},
			func(context.Context, *sql.Tx) error { panic("boom") })
	})
	var work sync.WaitGroup
	work.Go(func() {
		_ = resiliencesql.InTx(t.Context(), pool, resiliencesql.Config{}, func(context.Context, *sql.Tx) error {
			runtime.Goexit()
			return nil
		})
	})
	work.Wait()
	require.Equal(t, 2, db.rollbacks)
	require.Zero(t, db.commits)
	require.Zero(t, pool.Stats().InUse)
}

func TestEndedContextIsHonoredBeforeAnythingElse(t *testing.T) {
	why := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	db := newFake(t)
	err := resiliencesql.InTx(ctx, db.open(), resiliencesql.Config{},
		func(context.Context, *sql.Tx) error { panic("called") })
	require.ErrorIs(t, err, why)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, db.begins)
	err = resiliencesql.Middleware(resiliencesql.Config{})(func(context.Context) error { panic("called") })(ctx)
	require.ErrorIs(t, err, why)
}

// TestACtxThatEndsBeforeCommitRollsBack, and opens no breaker.
func TestACtxThatEndsBeforeCommitRollsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		db := newFake(t)
		err := resiliencesql.InTx(ctx, db.open(), resiliencesql.Config{Retry: circuit.Wrap},
			func(context.Context, *sql.Tx) error {
				cancel()
				return nil
			})
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, resiliencesql.ErrOutcomeUnknown)
		synctest.Wait()
		require.Equal(t, []int{0, 1}, []int{db.commits, db.rollbacks})
		require.Equal(t, breaker.Closed, circuit.State())
	})
}

func TestFallbackLeavesNoValueOfAFailedTransaction(t *testing.T) {
	db := newFake(t)
	db.onCommit = func() error { return state("23505") }
	cfg := resiliencesql.Config{Retry: resilience.Fallback(func(context.Context, error) error { return nil })}
	v, err := resiliencesql.Value(t.Context(), db.open(), cfg,
		func(context.Context, *sql.Tx) (int, error) { return 7, nil })
	require.NoError(t, err)
	require.Zero(t, v)
}

func TestThereIsNoValueWithAnError(t *testing.T) {
	late := errors.New("the lease is lost")
	cfg := resiliencesql.Config{Retry: func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error { return errors.Join(next(ctx), late) }
	}}
	v, err := resiliencesql.Value(t.Context(), newFake(t).open(), cfg,
		func(context.Context, *sql.Tx) (int, error) { return 7, nil })
	require.ErrorIs(t, err, late)
	require.Zero(t, v)
}

func TestPoolDescribesTheDatabase(t *testing.T) {
	db := newFake(t).open()
	d := resiliencesql.Pool("orders", db).Describe()
	require.Equal(t, []string{"pool", "orders"}, []string{d.Kind, d.Name})
	metrics := func() map[string]float64 {
		all := map[string]float64{}
		for _, m := range d.Metrics() {
			all[m.Name] = m.Value
		}
		return all
	}
	db.SetMaxOpenConns(0)
	conn, err := db.Conn(t.Context())
	require.NoError(t, err)
	require.Equal(t, policy.Health{}, d.Health(t.Context()), "there is no limit")
	db.SetMaxOpenConns(1)
	want := policy.Health{Status: policy.Warn, State: "full", Detail: "all of 1 in use"}
	require.Equal(t, want, d.Health(t.Context()))
	require.Equal(t, map[string]float64{
		"pool.limit": 1, "pool.in_use": 1, "pool.idle": 0, "pool.waits": 0, "pool.wait.time_seconds": 0,
	}, metrics())

	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error)
	go func() { _, err := db.Conn(ctx); waited <- err }()
	for db.Stats().WaitCount == 0 {
		runtime.Gosched()
	}
	cancel()
	require.ErrorIs(t, <-waited, context.Canceled)
	require.NoError(t, conn.Close())
	require.Equal(t, policy.Health{}, d.Health(t.Context()))
	after := metrics()
	require.Equal(t, []float64{1, 0, 1, 1},
		[]float64{after["pool.limit"], after["pool.in_use"], after["pool.idle"], after["pool.waits"]})
}
