package saga_test

import (
	"context"
	cryptorand "crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// TestMain runs the tests or, where a test has started it again as one, a
// worker process.
func TestMain(m *testing.M) {
	if config := os.Getenv("SAGA_WORKER"); config != "" {
		if err := work(config); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if config := os.Getenv("SAGA_DRAIN"); config != "" {
		if err := drainAway(config); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if config := os.Getenv("SAGA_ORDERS"); config != "" {
		slog.SetDefault(slog.New(slog.DiscardHandler))
		if err := workOnOrders(config); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the failures are intended
	os.Exit(m.Run())
}

// A workerConfig configures a worker process.
type workerConfig struct {
	Database  database
	Store     database // the same, as the store reaches it
	Number    int      // of this worker
	Workers   int      // in all
	Sagas     int      // started by all of them together
	Every     time.Duration
	LeaseTTL  time.Duration
	Takeovers int // RunnerConfig.MaxTakeovers
	Faults    faults
	Mutant    mutant
}

// faults are the probabilities of failures, and durations.
type faults struct {
	Refuse     float64 // the participant says no: certainly without effect
	Fail       float64 // it cannot be reached
	LoseReply  float64 // it does what it is asked to, and the answer is lost
	Late       float64 // it does so long after its caller has given up
	Stall      float64 // the process stops before a write, until its leases are over
	LoseCommit float64 // the answer to a commit is lost
	LateCommit float64 // the COMMIT of a transaction arrives after its sender has given it up
}

// A mutant lacks one of the rules of the guarantee.
type mutant string

const (
	withoutFence   mutant = "without the fence"                // a write happens whichever owner has the saga
	withoutNonce   mutant = "without the nonce"                // a record in its epoch that is long enough is its own
	withoutBarrier mutant = "without the barrier"              // an id is applied once, also after its Undo
	withoutDoubt   mutant = "without undoing what is in doubt" // every failure counts as without effect
)

// A chaosTrip is the state of the sagas, to which each step writes.
type chaosTrip struct{ Account, Quote, Rate, Hotel, Car, Charge, Ticket string }

// work is the life of a worker process: it starts its share of the sagas and
// runs sagas until its standard input ends.
func work(config string) error {
	var c workerConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	db, err := c.Store.connect()
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(8)
	own := sqlstore.New(db, c.Database.Dialect, sqlstore.Config{})
	remote, err := c.Database.connect() // the participant's
	if err != nil {
		return err
	}
	defer remote.Close()
	remote.SetMaxOpenConns(8)

	p := &participant{db: remote, timeout: c.LeaseTTL / 2, c: &c}
	defer p.late.Wait()
	runner := saga.NewRunner(&troubledStore{Store: own, c: &c, last: make(map[string]store.CommitRequest)},
		saga.RunnerConfig{
			Name: fmt.Sprintf("worker-%d", c.Number), LeaseTTL: c.LeaseTTL, Poll: c.LeaseTTL / 10,
			Concurrency: 48, Drain: 2 * c.LeaseTTL, MaxTakeovers: c.Takeovers,
		})
	trip := chaosSaga(p)
	trips := saga.Register(runner, trip)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { _ = runner.Run(ctx) })

	// The worker before this one may have died before it counted its last start.
	next := c.Number
	var last sql.NullString
	for {
		err := remote.QueryRowContext(ctx, c.Database.sql(`SELECT max(id) FROM saga WHERE id LIKE $1`),
			fmt.Sprintf("trip-%d-%%", c.Number)).Scan(&last)
		if err == nil || ctx.Err() != nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if last.Valid {
		if _, err := fmt.Sscanf(last.String, fmt.Sprintf("trip-%d-%%d", c.Number), &next); err != nil {
			return err
		}
	}
	for ; next < c.Sagas && ctx.Err() == nil; next += c.Workers {
		id := fmt.Sprintf("trip-%d-%06d", c.Number, next)
		for {
			// As a server does, since a connection may never answer.
			call, cancel := context.WithTimeout(ctx, c.LeaseTTL)
			_, err := trips.Start(call, id, chaosTrip{})
			cancel()
			if err == nil || ctx.Err() != nil {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		if next%20 == 0 {
			call, cancel := context.WithTimeout(ctx, c.LeaseTTL)
			_ = runner.Operate(call, id, saga.Operation{Action: saga.ActionCancel, Note: "changed my mind"}) // too late for some
			cancel()
		}
		time.Sleep(rand.N(2 * c.Every))
	}
	<-ctx.Done()
	return nil
}

// chaosSaga is account, then quote and rate, which have another result each time, then hotel
// beside car, then charge, the pivot, of what quote and rate have said, and ticket, which has to
// work.
func chaosSaga(p *participant) *saga.Saga[chaosTrip] {
	step := func(name string, note func(*chaosTrip) *string) saga.Step[chaosTrip] {
		return saga.Step[chaosTrip]{
			Name: name, Timeout: p.timeout, Attempts: 3, UndoAttempts: saga.Unlimited,
			Backoff: func(int) time.Duration { return rand.N(20 * time.Millisecond) },
			Do: func(ctx context.Context, s *chaosTrip) error {
				*note(s) = name
				return p.do(context.WithValue(ctx, quotedKey{}, s.Quote+s.Rate), name)
			},
			Undo: func(ctx context.Context, s *chaosTrip) error { return p.undo(ctx, name) },
		}
	}
	inTx := func(name string, attempts int) saga.Step[chaosTrip] {
		return saga.Step[chaosTrip]{
			Name: name, Timeout: p.timeout / 2, Attempts: attempts, UndoAttempts: saga.Unlimited,
			Backoff: func(int) time.Duration { return rand.N(20 * time.Millisecond) },
			DoTx: func(ctx context.Context, tx *sql.Tx, s *chaosTrip) error {
				s.Account = cryptorand.Text()[:6] // another one each time, so that two attempts are not taken for one
				return p.effect(context.WithValue(ctx, quotedKey{}, s.Account), tx, name, "done")
			},
			UndoTx: func(ctx context.Context, tx *sql.Tx, s *chaosTrip) error {
				return p.effect(ctx, tx, name, "undone")
			},
		}
	}
	shared := func(name string, note func(*chaosTrip) *string) saga.Step[chaosTrip] {
		return saga.Step[chaosTrip]{
			Name: name, Timeout: p.timeout, Attempts: saga.Unlimited, ReadOnly: true,
			Backoff: func(int) time.Duration { return rand.N(20 * time.Millisecond) },
			Do: func(_ context.Context, s *chaosTrip) error {
				if *note(s) = cryptorand.Text()[:6]; chance(p.c.Faults.Fail) {
					return errUnreachable
				}
				return nil
			},
		}
	}
	// A COMMIT that is late must find a saga that has turned back, and one that tries again.
	account := inTx("account", 1)
	if p.c != nil && p.c.Number%2 == 1 {
		account = inTx("account", 3)
	}
	hotel := step("hotel", func(s *chaosTrip) *string { return &s.Hotel })
	car := step("car", func(s *chaosTrip) *string { return &s.Car })
	car.Parallel = true
	charge := step("charge", func(s *chaosTrip) *string { return &s.Charge })
	charge.Pivot = true
	ticket := step("ticket", func(s *chaosTrip) *string { return &s.Ticket })
	ticket.Undo = nil
	quote := shared("quote", func(s *chaosTrip) *string { return &s.Quote })
	rate := shared("rate", func(s *chaosTrip) *string { return &s.Rate })
	return &saga.Saga[chaosTrip]{Name: "trip", Version: 1,
		Steps: []saga.Step[chaosTrip]{account, quote, rate, hotel, car, charge, ticket}}
}

// quotedKey is the key of what quote and rate had said when a step began, and of what account says.
type quotedKey struct{}

const effectTable = `CREATE TABLE effect (
	saga_id varchar(200) NOT NULL, step varchar(200) NOT NULL, done integer NOT NULL, undone integer NOT NULL,
	quoted varchar(200) NOT NULL DEFAULT '', PRIMARY KEY (saga_id, step))`

const appliedTable = `CREATE TABLE applied (id varchar(250) PRIMARY KEY)`

// effect counts how often the effect of a step has taken place, or was undone.
func (p *participant) effect(ctx context.Context, tx *sql.Tx, step, column string) error {
	id := saga.CommandFrom(ctx).ID
	var sagaID string
	for i := range id {
		if id[i] == '/' {
			sagaID = id[:i]
			break
		}
	}
	_, err := tx.ExecContext(ctx, p.c.Database.sql(`INSERT INTO effect (saga_id, step, done, undone) VALUES ($1, $2, 0, 0) ON CONFLICT DO NOTHING`), sagaID, step)
	if err == nil {
		_, err = tx.ExecContext(ctx, p.c.Database.sql(`UPDATE effect SET `+column+` = `+column+` + 1 WHERE saga_id = $1 AND step = $2`), sagaID, step)
	}
	if quoted, ok := ctx.Value(quotedKey{}).(string); ok && err == nil {
		_, err = tx.ExecContext(ctx, p.c.Database.sql(`UPDATE effect SET quoted = $1 WHERE saga_id = $2 AND step = $3`),
			quoted, sagaID, step)
	}
	return err
}

// A participant is the service of a step, with tables of its own.
type participant struct {
	db      *sql.DB
	timeout time.Duration // of its callers
	c       *workerConfig
	late    sync.WaitGroup
}

var (
	errRefused     = errors.New("refused")
	errUnreachable = errors.New("cannot be reached")
	errReplyLost   = errors.New("connection reset by peer")
)

func chance(p float64) bool { return rand.Float64() < p }

func (p *participant) do(ctx context.Context, step string) error {
	f := p.c.Faults
	err := func() error {
		if chance(f.Refuse) && step != "ticket" {
			return saga.Permanent(errRefused) // it does not remember: an attempt before may have had its effect
		}
		return p.request(ctx, step, "done")
	}()
	if err != nil && p.c.Mutant == withoutDoubt {
		return saga.Declined(err)
	}
	return err
}

func (p *participant) undo(ctx context.Context, step string) error {
	return p.request(ctx, step, "undone")
}

// request sends a command over a bad network.
func (p *participant) request(ctx context.Context, step, column string) error {
	f := p.c.Faults
	if chance(f.Fail) {
		return errUnreachable
	}
	if column == "done" && chance(f.Late) {
		late := context.WithoutCancel(ctx)
		p.late.Go(func() {
			time.Sleep(p.timeout + rand.N(p.c.LeaseTTL))
			_ = p.apply(late, step, column)
		})
		<-ctx.Done()
		return ctx.Err()
	}
	time.Sleep(rand.N(p.timeout / 8)) // on the way
	err := p.apply(ctx, step, column)
	time.Sleep(rand.N(p.timeout / 8))
	if err == nil && chance(f.LoseReply) {
		return errReplyLost
	}
	return err
}

// apply applies a command in the participant.s database.
func (p *participant) apply(ctx context.Context, step, column string) error {
	change := func(tx *sql.Tx) error { return p.effect(ctx, tx, step, column) }
	if p.c.Mutant != withoutBarrier {
		return saga.Apply(ctx, p.db, change)
	}
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := applyOnce(ctx, tx, step, column, change); err != nil {
		return err
	}
	return tx.Commit()
}

// applyOnce knows which commands it has applied, and undoes only what was done.
func applyOnce(ctx context.Context, tx *sql.Tx, step, column string, change func(*sql.Tx) error) error {
	id := saga.CommandFrom(ctx).ID
	res, err := tx.ExecContext(ctx, `INSERT INTO applied (id) VALUES ($1) ON CONFLICT DO NOTHING`, id)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return err
	}
	if column == "undone" {
		var n int
		do := id[:len(id)-len("undo")] + "do"
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM applied WHERE id = $1`, do).Scan(&n); err != nil || n == 0 {
			return err
		}
	}
	return change(tx)
}

// A troubledStore is a store whose writes happen long after they were called
// for, and whose answers get lost.
type troubledStore struct {
	*sqlstore.Store
	c       *workerConfig
	stopped sync.RWMutex // held for writing while the process seems to be

	mu   sync.Mutex
	last map[string]store.CommitRequest // by saga
}

// stall is what happens to a process that is stopped after it has looked at the
// clock: it sends nothing, no heartbeat either, and when it goes on what it was
// about to write is written, though others have gone on meanwhile.
func (s *troubledStore) stall(ctx context.Context) context.Context {
	if !chance(s.c.Faults.Stall) {
		return ctx
	}
	s.stopped.Lock()
	defer s.stopped.Unlock()
	time.Sleep(s.c.LeaseTTL + rand.N(s.c.LeaseTTL))
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	time.AfterFunc(4*s.c.LeaseTTL, cancel) // a connection may never answer
	return ctx
}

func (s *troubledStore) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	s.stopped.RLock()
	defer s.stopped.RUnlock()
	return s.Store.Heartbeat(ctx, req)
}

func (s *troubledStore) answer(err error) error {
	if err == nil && chance(s.c.Faults.LoseCommit) {
		return errReplyLost
	}
	return err
}

func (s *troubledStore) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	rec, created, err := s.Store.Start(s.stall(ctx), req)
	return rec, created, s.answer(err)
}

func (s *troubledStore) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	s.asked(req)
	ctx = s.stall(ctx)
	rc, err := s.Store.Commit(ctx, req)
	if errors.Is(err, store.ErrFenced) && s.unfence(ctx, &req) {
		rc, err = s.Store.Commit(ctx, req)
	}
	return rc, s.answer(err)
}

func (s *troubledStore) CommitTx(ctx context.Context, tx *sql.Tx, req store.CommitRequest) (store.Receipt, error) {
	s.asked(req)
	ctx = s.stall(ctx)
	rc, err := s.Store.CommitTx(ctx, tx, req)
	if errors.Is(err, store.ErrFenced) && s.unfence(ctx, &req) {
		rc, err = s.Store.CommitTx(ctx, tx, req)
	}
	return rc, err
}

func (s *troubledStore) asked(req store.CommitRequest) {
	if s.c.Mutant != withoutNonce {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last[req.ID] = req
}

// Load takes, in the mutant, a record that is long enough for the one that was
// asked for.
func (s *troubledStore) Load(ctx context.Context, id string) (store.Record, error) {
	rec, err := s.Store.Load(ctx, id)
	if s.c.Mutant == withoutNonce {
		s.mu.Lock()
		defer s.mu.Unlock()
		if req, ok := s.last[id]; ok && rec.Epoch == req.Epoch && rec.Seq >= req.After() {
			rec.Nonce = req.Nonce
		}
	}
	return rec, err
}

// unfence makes of a write that was refused one that is not, in the mutant.
func (s *troubledStore) unfence(ctx context.Context, req *store.CommitRequest) bool {
	if s.c.Mutant != withoutFence {
		return false
	}
	rec, err := s.Load(ctx, req.ID)
	req.Epoch, req.Seq = rec.Epoch, rec.Seq
	return err == nil
}
