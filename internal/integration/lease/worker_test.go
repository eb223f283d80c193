package lease_test

import (
	"context"
	cryptorand "crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience/internal/integration/services/etcd"
	"github.com/go-resilience/resilience/lease"
)

// A workerConfig is what a test tells a process that it starts.
type workerConfig struct {
	Number   int
	Database database
	TTL      time.Duration
	Hold     bool          // lead, and do nothing
	Job      bool          // make the runs of a schedule
	Offset   time.Duration // of the clock of the process, for Job
	Long     int           // one in so many terms lasts for some renewals
	Mutant   mutant
}

// A mutant is a worker without one of the things that keep terms apart.
type mutant string

const (
	withoutFence  mutant = "without the fence"
	ttlFromAnswer mutant = "with a TTL that counts from the answer"
	processClock  mutant = "with the clock of the process"

	// clocksAreSet is none, but a worker that may believe for a while that it leads.
	clocksAreSet mutant = "the clock of the store is set"
)

// chaosName is the lease that the workers compete for.
const chaosName = "chaos"

func TestMain(m *testing.M) {
	etcd.Main()
	text := os.Getenv("LEASE_WORKER")
	if text == "" {
		os.Exit(m.Run())
	}
	var w worker
	if err := json.Unmarshal([]byte(text), &w.workerConfig); err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }() // until the test ends
	w.run(ctx)
}

type worker struct {
	workerConfig
	store lease.Store
	epoch func(ctx context.Context) (int64, error) // of the lease
	write func(ctx context.Context, term lease.Term, id string) error
}

// quiet returns a Candidate whose store may fail without a warning.
func quiet(store lease.Store, cfg lease.Config) *lease.Candidate {
	c := lease.New(store, cfg)
	c.Observe(func(context.Context, lease.Event) {})
	return c
}

// say writes a line that the test reads: what is forbidden begins with VIOLATION.
func say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (w *worker) run(ctx context.Context) {
	switch {
	case w.Database.Driver == "redis":
		w.inRedis()
	case w.Database.Driver == "etcd":
		w.inEtcd()
	case w.Database.Driver == "kubernetes":
		w.inKubernetes()
	case !w.inDatabase(ctx):
		return
	}
	cfg := lease.Config{Name: chaosName, TTL: w.TTL, Holder: fmt.Sprint("worker ", w.Number)}
	if w.Job {
		w.job(ctx, cfg)
		return
	}
	c := quiet(w.store, cfg)
	for ctx.Err() == nil {
		_ = c.Run(ctx, w.lead)
	}
}

// inRedis has the worker lead, and write, by Redis.
func (w *worker) inRedis() {
	client := redis.NewClient(&redis.Options{Addr: w.Database.DSN, ContextTimeoutEnabled: true, MaxRetries: -1})
	w.store = &outages{Store: redisStore(client, "")}
	w.epoch = func(ctx context.Context) (int64, error) { return client.HGet(ctx, "lease:"+chaosName, "epoch").Int64() }
	w.write = func(ctx context.Context, term lease.Term, id string) error {
		w.stall()
		written, err := appendEpoch.Run(ctx, client, []string{"chaos_last", "chaos_write"}, term.Epoch(), id).Int()
		if err == nil && written == 0 {
			err = lease.ErrLost
		}
		return err
	}
}

// inDatabase has the worker lead, and write, by the database, unless ctx ends before it can.
func (w *worker) inDatabase(ctx context.Context) bool {
	db, err := w.Database.connect()
	if err != nil {
		panic(err)
	}
	store, err := w.Database.store(ctx, db)
	for ; err != nil; store, err = w.Database.store(ctx, db) {
		if ctx.Err() != nil {
			return false
		}
		time.Sleep(w.TTL / 10)
	}
	w.store = store
	if !w.Hold {
		w.store = &outages{Store: store}
	}
	switch w.Mutant {
	case ttlFromAnswer:
		w.store = &answering{Store: w.store, sent: make(map[string]chan error)}
	case processClock:
		w.store = &skewed{Store: w.store, db: db, skew: time.Duration(w.Number) * 2 * time.Hour}
	}
	w.epoch = func(ctx context.Context) (epoch int64, err error) {
		err = db.QueryRowContext(ctx, "SELECT epoch FROM lease WHERE name = 'chaos'").Scan(&epoch)
		return epoch, err
	}
	w.write = func(ctx context.Context, term lease.Term, _ string) error { return w.inTx(ctx, db, store, term) }
	return true
}

// lead works for a while and returns, so that another leads.
func (w *worker) lead(ctx context.Context, term lease.Term) error {
	if w.Hold {
		say("LEADS %d", term.Epoch())
		<-ctx.Done()
		return nil
	}
	until := time.Now()
	if rand.N(w.Long) == 0 {
		until = until.Add(rand.N(6 * w.TTL))
	}
	id := cryptorand.Text()
	for n := rand.N(4); ctx.Err() == nil && (n >= 0 || time.Now().Before(until)); n-- {
		w.look(ctx, term)
		// A process that was stopped after it had looked at its ctx, and before it sent.
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), 4*w.TTL)
		err := w.write(call, term, id)
		cancel()
		if errors.Is(err, lease.ErrLost) {
			say("FENCED %d", term.Epoch())
		}
	}
	return nil
}

// look checks the promise of the ctx: if it is alive after the store has answered, the
// term held when the store was asked.
func (w *worker) look(ctx context.Context, term lease.Term) {
	epoch, err := w.epoch(ctx)
	if err == nil && term.Err() == nil && epoch != term.Epoch() && w.Mutant != clocksAreSet {
		say("VIOLATION worker %d believes that it leads in term %d, in the middle of %d", w.Number, term.Epoch(), epoch)
	}
}

// inTx writes in the order of commits: the row of the counter is locked until then.
func (w *worker) inTx(ctx context.Context, db *sql.DB, fence lease.Fencer, term lease.Term) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	w.stall()
	switch {
	case w.Mutant == withoutFence:
	case rand.N(2) == 0: // what the store says, whatever the local clock does
		err = fence.Fence(ctx, tx, chaosName, term.Epoch())
	default:
		err = term.Fence(ctx, tx)
	}
	if err != nil {
		return err
	}
	w.stall()
	var n int64
	if _, err := tx.ExecContext(ctx, "UPDATE chaos_counter SET n = n + 1"); err != nil {
		return err
	}
	if err := tx.QueryRowContext(ctx, "SELECT n FROM chaos_counter").Scan(&n); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO chaos_write (n, epoch) VALUES (%d, %d)", n, term.Epoch()))
	if err != nil {
		return err
	}
	return tx.Commit()
}

// stall is a pause, sometimes past the end of the term.
func (w *worker) stall() {
	if rand.N(200) == 0 {
		time.Sleep(w.TTL + rand.N(w.TTL))
	}
}

// outages has no renewal reach the store for a while, now and then.
type outages struct {
	lease.Store
	mu    sync.Mutex
	until time.Time
}

var errOutage = errors.New("renewals do not reach the store")

func (s *outages) Renew(ctx context.Context, req lease.Request) error {
	s.mu.Lock()
	if rand.N(10) == 0 {
		s.until = time.Now().Add(rand.N(2 * req.TTL))
	}
	out := time.Now().Before(s.until)
	s.mu.Unlock()
	if out {
		return errOutage
	}
	return s.Store.Renew(ctx, req)
}

// answering returns from each Renew with the answer of the one before: the candidate then
// counts the TTL from the answer, a third of the TTL after the request.
type answering struct {
	lease.Store
	mu   sync.Mutex
	sent map[string]chan error // by token
}

func (s *answering) Renew(ctx context.Context, req lease.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, answer := s.sent[req.Token], make(chan error, 1)
	s.sent[req.Token] = answer
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), req.TTL/4)
		defer cancel()
		answer <- s.Store.Renew(ctx, req)
	}()
	if before == nil {
		return nil
	}
	return <-before
}

// skewed judges by its own clock whether a lease has ended.
type skewed struct {
	lease.Store
	db   *sql.DB
	skew time.Duration
}

func (s *skewed) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	if rec, err := s.Load(ctx, req.Name); err == nil && rec.Held() && rec.Left <= s.skew {
		_, _ = s.db.ExecContext(ctx, "UPDATE lease SET expires = 0")
	}
	return s.Store.Acquire(ctx, req)
}
