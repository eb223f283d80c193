package lease_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
)

// counting counts statements.
type counting struct{ n atomic.Int64 }

func (c *counting) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (*counting) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TestIdleCandidateCostsOneStatementAPoll counts what PostgreSQL is sent.
func TestIdleCandidateCostsOneStatementAPoll(t *testing.T) {
	t.Parallel()
	const ttl = 600 * time.Millisecond
	d := newDatabase(t, "pgx")
	leader, err := lease.New(d.newStore(t), lease.Config{Name: "a", TTL: time.Minute}).Campaign(t.Context())
	require.NoError(t, err)
	cfg, err := pgx.ParseConfig(d.DSN)
	require.NoError(t, err)
	statements := &counting{}
	cfg.Tracer = statements
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*ttl)
	defer cancel()
	_, err = lease.New(store, lease.Config{Name: "a", TTL: ttl, Poll: ttl / 3}).Campaign(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	n := statements.n.Load()
	t.Logf("%d statements in %v, TTL %v", n, 10*ttl, ttl)
	require.LessOrEqual(t, n, int64(10*3+1))
	require.NoError(t, leader.Resign(t.Context()))
}

// BenchmarkFence is a transaction of one insert, with and without a fence.
func BenchmarkFence(b *testing.B) {
	for _, driver := range drivers {
		d := newDatabase(b, driver)
		db := d.open(b)
		store, err := d.store(b.Context(), db)
		require.NoError(b, err)
		_, err = db.Exec("CREATE TABLE written (n bigint NOT NULL)")
		require.NoError(b, err)
		term, err := lease.New(store, lease.Config{Name: "a"}).Campaign(b.Context())
		require.NoError(b, err)
		for _, fenced := range []bool{false, true} {
			b.Run(driver+map[bool]string{false: "/bare", true: "/fenced"}[fenced], func(b *testing.B) {
				for b.Loop() {
					tx, err := db.BeginTx(b.Context(), nil)
					require.NoError(b, err)
					if fenced {
						require.NoError(b, term.Fence(b.Context(), tx))
					}
					_, err = tx.ExecContext(b.Context(), "INSERT INTO written (n) VALUES (1)")
					require.NoError(b, err)
					require.NoError(b, tx.Commit())
				}
			})
		}
		require.NoError(b, term.Resign(b.Context()))
	}
}
