package docs_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagahttp"
	"github.com/go-resilience/resilience/saga/sqlstore"
	"github.com/go-resilience/resilience/throttle/fleet"
)

//lint:file-ignore SA4006 a recipe shows calls, not what becomes of each error

// This file holds the recipes of docs/cookbook.md, and tests of those that decide something.

func _() {
	var transfer func(context.Context, *sql.Tx, int) error
	cfg := resiliencesql.Config{Retry: resilience.Chain(retries.Wrap, circuit.Wrap)}
	err := resiliencesql.InTx(ctx, db, cfg, func(ctx context.Context, tx *sql.Tx) error { return transfer(ctx, tx, 42) })
	// For a read outside a transaction.
	row := resilience.Chain(circuit.Wrap, resiliencesql.Middleware(resiliencesql.Config{}))
	use(err, row)
}

var (
	url string
	reg *registry.Registry
)

// The last good answer while a server is down.
func _() {
	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "products"})
	products := cacheaside.New(cacheaside.Config[string, []byte]{ // by URL: all callers get the same response
		TTL:          time.Second,
		StaleIfError: time.Hour,
		Load: func(ctx context.Context, url string) ([]byte, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return nil, err
			}
			resp, err := client.Do(req)
			if err != nil {
				return nil, err
			}
			defer resp.Body.Close()
			if err := resiliencehttp.DefaultJudge(resp, nil); err != nil {
				return nil, err // 5xx: the stale response is served
			}
			if resp.StatusCode != http.StatusOK {
				return nil, cacheaside.ErrNotFound // even a 401 removes the response
			}
			return io.ReadAll(resp.Body)
		},
	})
	use(products)
}

type Order struct {
	ID    string
	Total int
}

func (o *Order) body() io.Reader { return nil }

// A saga whose participants are HTTP services.
func _() {
	var (
		mux   *http.ServeMux
		debit func(*sql.Tx, *http.Request) (bool, error)
	)
	payments := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments", AttemptTimeout: 2 * time.Second})

	charge := func(ctx context.Context, o *Order) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/charges", o.body())
		if err != nil {
			return err
		}
		return sagahttp.Send(payments, req, nil)
	}

	mux.Handle("POST /charges", &sagahttp.Handler{DB: db, Apply: func(tx *sql.Tx, r *http.Request) error {
		ok, err := debit(tx, r)
		if err == nil && !ok {
			return saga.Declined(errors.New("declined")) // final, which a pivot needs: see docs/saga.md
		}
		return err
	}})
	use(charge)
}

var (
	leases     lease.Store
	closeBooks func(context.Context, lease.Term) error
)

func _() error {
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		return err
	}
	nightly := lease.New(leases, lease.Config{Name: "close-books"})
	return nightly.Every(ctx, lease.Daily(2, 30, berlin), func(ctx context.Context, term lease.Term) error {
		return closeBooks(ctx, term) // in transactions with term.Fence
	})
}

var (
	reserve, unreserve, chargeOrder func(context.Context, *Order) error

	runner      *saga.Runner
	orders      *saga.Handle[Order]
	server      *http.Server
	stopping    atomic.Bool
	deadline    context.Context
	stopWorkers func()
	workers     sync.WaitGroup
)

var order = &saga.Saga[Order]{Name: "order", Steps: []saga.Step[Order]{
	{Name: "reserve", Do: reserve, Undo: unreserve},
	{Name: "approved", Await: "approval", AwaitFor: 48 * time.Hour, Do: checkApproval, ReadOnly: true},
	{Name: "charge", Do: chargeOrder, Pivot: true},
}}

// orders is saga.Register(runner, order).
func place(ctx context.Context, tx *sql.Tx, id string, o Order) error {
	if err := orders.StartTx(ctx, tx, id, o); err != nil {
		return err
	}
	if o.Total > 1000 {
		return nil // the approver's page calls orders.Signal(ctx, id, "approval", []byte("yes")), or "no"
	}
	return orders.SignalTx(ctx, tx, id, "approval", []byte("yes"))
}

func checkApproval(ctx context.Context, _ *Order) error {
	if answer, _ := saga.SignalFrom(ctx, "approval"); string(answer) != "yes" {
		return saga.Declined(errors.New("not approved")) // the reservation is undone
	}
	return nil
}

var placed = &saga.Saga[Order]{Name: "placed", Steps: []saga.Step[Order]{
	{Name: "opened", DoTx: mark("processing"), UndoTx: mark("rejected")},
	{Name: "reserve", Do: reserve, Undo: unreserve},
	{Name: "charge", Do: chargeOrder, Pivot: true},
	{Name: "completed", DoTx: mark("completed")},
}}

func mark(status string) func(context.Context, *sql.Tx, *Order) error {
	return func(ctx context.Context, tx *sql.Tx, o *Order) error {
		_, err := tx.ExecContext(ctx, `UPDATE orders SET status = $2 WHERE id = $1`, o.ID, status)
		return err
	}
}

func _(users *cacheaside.Cache[int, *User], limits *fleet.Limits) {
	use(place, placed, order)
	stopping.Store(true)          // fails /readyz
	time.Sleep(5 * time.Second)   // until the load balancer has noticed
	_ = server.Shutdown(deadline) // accepts no request; waits for those in progress
	stopWorkers()                 // cancels the ctx of Runner.Run, which releases its sagas, and of Candidate.Loop
	workers.Wait()                // at most Drain and LeaseTTL
	users.Close()                 // cancels loads
	_ = limits.Close(deadline)    // sends the settlements and releases the slots
	_ = db.Close()
}

// shardOf chooses the same shard for an id each time (rendezvous hashing).
func shardOf(id string, shards map[string]*saga.Runner) (of string) {
	var most [sha256.Size]byte
	for name := range shards {
		if sum := sha256.Sum256([]byte(name + "\x00" + id)); bytes.Compare(sum[:], most[:]) > 0 {
			most, of = sum, name
		}
	}
	return of
}

func _(databases map[string]*sql.DB, id string, state Trip) {
	runners := map[string]*saga.Runner{}
	trips := map[string]*saga.Handle[Trip]{}

	for name, db := range databases {
		store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
		runners[name] = saga.NewRunner(store, saga.RunnerConfig{Name: name})
		trips[name] = saga.Register(runners[name], trip)
		reg.MustAdd(runners[name]) // one console and one set of metrics for all
	}
	_, err := trips[shardOf(id, runners)].Start(ctx, id, state)
	use(err)
}
