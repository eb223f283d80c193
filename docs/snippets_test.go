package docs_test

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
	"github.com/go-resilience/resilience/throttle"
)

//lint:file-ignore SA4006 a snippet shows calls, not what becomes of each error

// This file holds the snippets of README.md and docs, for the compiler: see
// TestSnippetsCompile. It is not run.

// The identifiers that the snippets use.
type User struct{ ID int }

var (
	ctx       = context.Background()
	requests  *throttle.Group[string]
	tokens    *throttle.Group[string]
	tenantOf  func(context.Context) string
	pass      func(io.Writer, io.Reader) (int, error)
	used      int
	ping      = func(context.Context) error { return nil }
	fetchUser = func(context.Context, int) (*User, error) { return nil, nil }
	use       = func(...any) {}

	db *sql.DB

	retries *retry.Retrier
	circuit *breaker.Breaker

	bookFlight, cancelFlight, bookRoom, cancelRoom func(context.Context, *Trip) error

	chargeCard      func(ctx context.Context, id string, t *Trip) error
	errCardDeclined error
)

func _() {
	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments"})

	use(client)
}

func _() {
	retries := retry.New(retry.Config{Name: "users", Attempts: 4, Budget: retry.NewBudget(retry.BudgetConfig{})})
	circuit := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 5, OpenFor: 30 * time.Second})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 16, Queue: 32, MaxWait: 100 * time.Millisecond})
	guarded := resilience.Chain(retries.Wrap, circuit.Wrap, slots.Wrap, resilience.Timeout(2*time.Second))

	user, err := resilience.Do(ctx, guarded, func(ctx context.Context) (*User, error) {
		return fetchUser(ctx, 42)
	})
	if resilience.Refused(err) {
		// A policy refused the call: fetchUser was not called.
	}

	use(user, err)
}

func _(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return resilience.Answer(err)
	}
	return err
}

func _(ctx context.Context, req *http.Request, w http.ResponseWriter, first, second http.RoundTripper) error {
	limits := throttle.All(requests.For(tenantOf), tokens.For(tenantOf))      // takes from both, or from neither
	client := &http.Client{Transport: resiliencehttp.Failover(first, second)} // until the caller has read a byte
	reservation, err := limits.Reserve(ctx)
	if err != nil {
		return err // resilience.RetryAfter(err) is the time to wait
	}
	defer func() { reservation.Settle(used) }() // a higher use becomes a debt
	resp, err := client.Do(req)
	if err == nil {
		used, err = pass(w, resp.Body)
	}
	return err
}

type Trip struct{ Flight, Room string }

var trip = &saga.Saga[Trip]{
	Name: "trip", Version: 1,
	Steps: []saga.Step[Trip]{
		{Name: "flight", Do: bookFlight, Undo: cancelFlight},
		{Name: "room", Do: bookRoom, Undo: cancelRoom},
		{Name: "charge", Do: charge, Pivot: true}, // the point of no return
	},
}

func charge(ctx context.Context, t *Trip) error {
	err := chargeCard(ctx, saga.CommandFrom(ctx).ID, t) // each attempt has the same ID
	if errors.Is(err, errCardDeclined) {
		return saga.Declined(err) // final: the earlier steps are undone
	}
	return err // retried with the same ID: only the reply may be lost
}

func _() error {
	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{}) // db is a *sql.DB
	if err := store.Migrate(ctx); err != nil {                        // creates the tables if needed
		return err
	}
	runner := saga.NewRunner(store, saga.RunnerConfig{})
	trips := saga.Register(runner, trip)
	go func() { slog.Info("runner stopped", "err", runner.Run(ctx)) }() // in each process
	if _, err := trips.Start(ctx, "trip-17", Trip{}); err != nil {
		return err // safe to retry: an ID is started only once
	}
	done, err := trips.Result(ctx, "trip-17") // matches saga.ErrCompensated if it was undone

	use(done)
	return err
}
