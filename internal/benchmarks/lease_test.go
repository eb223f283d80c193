package benchmarks

import (
	"context"
	"crypto/rand"
	"database/sql"
	"database/sql/driver"
	"sync"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/redislease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/resilienceredis"
)

// leaseCases are how long nobody leads after a leader has died, and what it costs to keep a
// hundred leases for a second: both renew each third of the TTL.
var leaseCases = []comparison{
	{"takeover-redis", []impl{{"resilience", func(b *testing.B) { takeover(b, redisLeases(b)) }},
		{"redsync", takeoverRedsync}}},
	{"takeover-postgres", []impl{{"resilience", func(b *testing.B) { takeover(b, sqlLeases(b)) }},
		{"advisory lock", takeoverAdvisory}}},
	{"held-redis-100", []impl{{"resilience", heldLeases}, {"redsync", heldRedsync}}},
}

const (
	leaseTTL = 300 * time.Millisecond
	held     = 100 // leases, and so a thousand renewals a second: of fewer, the wake-ups of threads are measured
)

func BenchmarkLease(b *testing.B) { benchmark(b, leaseCases) }

func redisLeases(b *testing.B) lease.Store {
	return redislease.New(redislease.Config{Prefix: "benchmarks:lease:", Eval: resilienceredis.Eval(throttleRedis(b))})
}

func sqlLeases(b *testing.B) lease.Store {
	db := dataDB(b)
	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{Prefix: "benchmarks_"})
	succeeded(b, store.Migrate(context.Background()))
	b.Cleanup(func() {
		_, err := db.Exec("DROP TABLE benchmarks_lease, benchmarks_lease_schema")
		succeeded(b, err)
	})
	return store
}

// takeover has a candidate wait for the lease of a leader that has died.
func takeover(b *testing.B, store lease.Store) {
	ctx, cfg := context.Background(), lease.Config{Name: rand.Text(), TTL: leaseTTL}
	c := lease.New(store, cfg)
	for b.Loop() {
		_, err := store.Acquire(ctx, lease.Request{Name: cfg.Name, Token: "dead", Holder: "dead", TTL: cfg.TTL})
		succeeded(b, err)
		term, err := c.Campaign(ctx)
		succeeded(b, err)
		b.StopTimer()
		succeeded(b, term.Resign(ctx))
		b.StartTimer()
	}
}

func newRedsync(rdb *redis.Client) *redsync.Redsync { return redsync.New(goredis.NewPool(rdb)) }

func takeoverRedsync(b *testing.B) {
	rs, name := newRedsync(throttleRedis(b)), "benchmarks:redsync:"+rand.Text()
	for b.Loop() {
		succeeded(b, rs.NewMutex(name, redsync.WithExpiry(leaseTTL)).Lock())
		next := rs.NewMutex(name, redsync.WithExpiry(leaseTTL))
		succeeded(b, next.Lock())
		b.StopTimer()
		_, err := next.Unlock()
		succeeded(b, err)
		b.StartTimer()
	}
}

// takeoverAdvisory has a connection wait for the lock of one that ends, which the server hears of.
func takeoverAdvisory(b *testing.B) {
	db, ctx := dataDB(b), context.Background()
	lock := func() *sql.Conn {
		conn, err := db.Conn(ctx)
		succeeded(b, err)
		_, err = conn.ExecContext(ctx, "SELECT pg_advisory_lock(81)")
		succeeded(b, err)
		return conn
	}
	for b.Loop() {
		dead, locked := lock(), make(chan *sql.Conn)
		go func() { locked <- lock() }()
		b.StopTimer()
		time.Sleep(5 * time.Millisecond) // until it waits
		b.StartTimer()
		_ = dead.Raw(func(any) error { return driver.ErrBadConn })
		next := <-locked
		b.StopTimer()
		_ = next.Raw(func(any) error { return driver.ErrBadConn })
		b.StartTimer()
	}
}

// hold reports the CPU time of a second in which leases are held.
func hold(b *testing.B) {
	before := cpu()
	for b.Loop() {
		time.Sleep(time.Second)
	}
	b.ReportMetric((cpu()-before).Seconds()*1e6/float64(b.N), "cpu-us/op")
}

func heldLeases(b *testing.B) {
	store, terms := redisLeases(b), make([]lease.Term, held)
	for i := range terms {
		var err error
		terms[i], err = lease.New(store, lease.Config{Name: rand.Text(), TTL: leaseTTL}).Campaign(context.Background())
		succeeded(b, err)
	}
	hold(b)
	for _, term := range terms {
		succeeded(b, term.Err())
		succeeded(b, term.Resign(context.Background()))
	}
}

func heldRedsync(b *testing.B) {
	rs, end := newRedsync(throttleRedis(b)), make(chan struct{})
	var wg sync.WaitGroup
	for range held {
		m := rs.NewMutex("benchmarks:redsync:"+rand.Text(), redsync.WithExpiry(leaseTTL))
		succeeded(b, m.Lock())
		wg.Go(func() {
			tick := time.NewTicker(leaseTTL / 3)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					if _, err := m.Extend(); err != nil {
						b.Error(err)
					}
				case <-end:
					return
				}
			}
		})
	}
	hold(b)
	close(end)
	wg.Wait()
}
