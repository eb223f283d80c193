package benchmarks

import (
	"context"
	"database/sql"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
)

// dataCases are what the adapters add to a call of a server, with the policies that are
// recommended for it, and without.
var dataCases = []comparison{
	{"select-1", []impl{{"resilience", guardedSelect}, {"plain", plainSelect}}},
	{"select-1-in-tx", []impl{{"resilience", guardedTx}, {"plain", plainTx}}},
	{"redis-get", []impl{{"resilience", func(b *testing.B) { redisGet(b, true) }},
		{"plain", func(b *testing.B) { redisGet(b, false) }}}},
}

func BenchmarkData(b *testing.B) { benchmark(b, dataCases) }

func dataDB(b *testing.B) *sql.DB {
	db, err := sql.Open("pgx", postgresDSN())
	if err == nil {
		err = db.Ping()
	}
	if err != nil {
		b.Skip("PostgreSQL cannot be reached: ", err)
	}
	b.Cleanup(func() { _ = db.Close() })
	return db
}

// timed also reports the CPU time of this process for each call.
func timed(b *testing.B, call func() error) {
	succeeded(b, call())
	before := cpu()
	for b.Loop() {
		succeeded(b, call())
	}
	b.ReportMetric((cpu()-before).Seconds()*1e6/float64(b.N), "cpu-us/op")
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func selectOne(ctx context.Context, q interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}) error {
	return q.QueryRowContext(ctx, "SELECT 1").Scan(new(int))
}

func recommended() resilience.Middleware {
	return resilience.Chain(retry.New(retry.Config{}).Wrap, breaker.New(breaker.Config{}).Wrap,
		bulkhead.New(bulkhead.Config{Limit: 16}).Wrap)
}

func guardedSelect(b *testing.B) {
	db := dataDB(b)
	guarded := resilience.Chain(recommended(),
		resiliencesql.Middleware(resiliencesql.Config{}))(func(ctx context.Context) error { return selectOne(ctx, db) })
	timed(b, func() error { return guarded(context.Background()) })
}

func plainSelect(b *testing.B) {
	db := dataDB(b)
	timed(b, func() error { return selectOne(context.Background(), db) })
}

func guardedTx(b *testing.B) {
	db, cfg := dataDB(b), resiliencesql.Config{Retry: recommended()}
	timed(b, func() error {
		return resiliencesql.InTx(context.Background(), db, cfg,
			func(ctx context.Context, tx *sql.Tx) error { return selectOne(ctx, tx) })
	})
}

func plainTx(b *testing.B) {
	db := dataDB(b)
	timed(b, func() error {
		tx, err := db.BeginTx(context.Background(), nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := selectOne(context.Background(), tx); err != nil {
			return err
		}
		return tx.Commit()
	})
}

func redisGet(b *testing.B, guarded bool) {
	rdb := redis.NewClient(throttleRedis(b).Options())
	b.Cleanup(func() { _ = rdb.Close() })
	if guarded {
		circuit, slots := breaker.New(breaker.Config{}), bulkhead.New(bulkhead.Config{Limit: 16})
		resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(string) resilience.Middleware {
			return resilience.Chain(circuit.Wrap, slots.Wrap)
		}})
	}
	succeeded(b, rdb.Set(context.Background(), "benchmarks:data", "value", time.Minute).Err())
	timed(b, func() error { return rdb.Get(context.Background(), "benchmarks:data").Err() })
}
