// Cache is a program that caches the prices of a shop, which are stored in SQLite. With -redis it starts a second
// process that shares the cache, and each process sees the updates of the other process.
//
//	go run ./examples/cache [-redis 127.0.0.1:6379]
package main

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/resilienceredis"
)

type price struct{ Cents, Changed int64 } // Changed is in microseconds since 1970

type shop struct {
	db      *sql.DB
	prices  *cacheaside.Cache[string, price]
	queries atomic.Int64
}

func open(file, redisAddr string) *shop {
	db, err := sql.Open("sqlite", file+"?_pragma=busy_timeout(5000)")
	check(err)
	_, err = db.Exec(`CREATE TABLE IF NOT EXISTS price (item TEXT PRIMARY KEY, cents INT, changed INT)`)
	check(err)
	s := &shop{db: db}
	cfg := cacheaside.Config[string, price]{Load: s.load, StaleIfError: time.Hour}
	if redisAddr != "" {
		cfg.Store = store(redisAddr, file)
	}
	s.prices = cacheaside.New(cfg)
	return s
}

func (s *shop) load(ctx context.Context, item string) (p price, err error) {
	s.queries.Add(1)
	err = s.db.QueryRowContext(ctx, `SELECT cents, changed FROM price WHERE item = ?`, item).Scan(&p.Cents, &p.Changed)
	return p, err
}

func (s *shop) set(item string, cents int64) {
	check(s.prices.Write(context.Background(), item, func(ctx context.Context) error {
		const insert = `INSERT OR REPLACE INTO price VALUES (?, ?, ?)`
		_, err := s.db.ExecContext(ctx, insert, item, cents, time.Now().UnixMicro())
		return err
	}))
}

func (s *shop) get(item string) price {
	p, err := s.prices.Get(context.Background(), item)
	check(err)
	return p
}

// await waits until the price of item is cents, and prints the time since the price was set.
func (s *shop) await(who, item string, cents int64) {
	p := s.get(item)
	for ; p.Cents < cents; p = s.get(item) {
		time.Sleep(100 * time.Microsecond)
	}
	age := time.Since(time.UnixMicro(p.Changed)).Round(10 * time.Microsecond)
	fmt.Printf("  %s sees %d, set %v ago\n", who, p.Cents, age)
}

// store returns a store in Redis, which both processes share.
func store(addr, file string) cacheaside.Store {
	client := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	return redisstore.New(redisstore.Config{
		Prefix:    filepath.Base(file),
		Eval:      resilienceredis.Eval(client),
		Subscribe: resilienceredis.Subscribe(client),
	})
}

func main() {
	addr := flag.String("redis", "", "the address of a Redis, for two processes")
	file := flag.String("file", "", "internal: the database, for the second process")
	flag.Parse()
	if *file != "" {
		second := open(*file, *addr)
		for cents := int64(101); cents <= 105; cents++ {
			second.await("the second process", "coffee", cents)
		}
		second.set("coffee", 106)
		check(second.prices.Close())
		return
	}
	shared := filepath.Join(os.TempDir(), fmt.Sprintf("prices-%d.db", os.Getpid()))
	defer os.Remove(shared)
	s := open(shared, *addr)
	s.set("coffee", 100)
	var callers sync.WaitGroup
	for range 1000 {
		callers.Go(func() { s.get("coffee") })
	}
	callers.Wait()
	fmt.Printf("1000 concurrent callers: %d query\n", s.queries.Load())
	if *addr != "" {
		second := exec.Command(os.Args[0], "-redis", *addr, "-file", shared)
		second.Stdout, second.Stderr = os.Stdout, os.Stderr
		check(second.Start())
		for cents := int64(101); cents <= 105; cents++ {
			time.Sleep(200 * time.Millisecond)
			s.set("coffee", cents)
		}
		s.await("the first process", "coffee", 106)
		check(second.Wait())
	}
	s.set("coffee", 120)
	fmt.Printf("after an update: %d cents\n", s.get("coffee").Cents)
	check(s.prices.Expire(context.Background(), "coffee"))
	check(s.db.Close())
	fmt.Printf("expired, and the database is closed: still %d cents\n", s.get("coffee").Cents)
	check(s.prices.Close())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
