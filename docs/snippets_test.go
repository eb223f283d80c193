package docs_test

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
	"github.com/go-resilience/resilience/throttle"
)

//lint:file-ignore SA4006 a snippet shows calls, not what becomes of each error

// This file holds the snippets of README.md and docs, for the compiler: see
// TestSnippetsCompile. It is not run.

// What the snippets use of the programs around them.
type User struct{ ID int }

var (
	ctx        = context.Background()
	handler    http.Handler
	tenants    *throttle.Group[string]
	ping       = func(context.Context) error { return nil }
	fetchUser  = func(context.Context, int) (*User, error) { return nil, nil }
	cachedUser = func(int) (*User, error) { return nil, nil }
	use        = func(...any) {}

	db   *sql.DB
	bill func(context.Context, *sql.Tx) error

	retries *retry.Retrier
	circuit *breaker.Breaker
	slots   *bulkhead.Bulkhead

	bookFlight, cancelFlight, bookRoom, cancelRoom func(context.Context, *Trip) error

	chargeCard      func(ctx context.Context, id string, t *Trip) error
	errCardDeclined error
)

func _() {
	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments"})

	use(client)
}

func _() {
	retries := retry.New(retry.Config{Name: "users", Attempts: 4}) // a zero field means its default
	circuit := breaker.New(breaker.Config{Name: "users", Failures: 5, OpenFor: 30 * time.Second})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 16, Queue: 32, MaxWait: 100 * time.Millisecond})
	guarded := resilience.Chain(retries.Wrap, circuit.Wrap, slots.Wrap, resilience.Timeout(2*time.Second))

	user, err := resilience.Value(ctx, guarded, func(ctx context.Context) (*User, error) {
		return fetchUser(ctx, 42)
	})
	if errors.Is(err, breaker.ErrOpen) {
		user, err = cachedUser(42)
	}

	use(user, err)
}

func _() {
	retries := retry.New(retry.Config{
		Attempts: 4,
		Budget:   retry.NewBudget(retry.BudgetConfig{}), // share it among the retriers of one dependency
	})
	err := retries.Do(ctx, ping)

	use(err)
}

func _() {
	circuit := breaker.New(breaker.Config{Name: "users", Failures: 5}) // or FailureRate, of MinCalls (20) or more in a Window
	if err := circuit.Do(ctx, ping); errors.Is(err, breaker.ErrOpen) {
		use(cachedUser(42))
	}
}

func _() {
	slots := bulkhead.New(bulkhead.Config{Limit: 16, Queue: 32, MaxWait: 100 * time.Millisecond})
	err := slots.Do(ctx, ping)

	use(err)
}

func _() {
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Rate: throttle.PerMinute(60), Burst: 10},
	})
	err := tenants.Do(ctx, "tenant-7", ping)
	if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
		slog.Warn("come back later", "in", limited.RetryAfter())
	}
}

func _() {
	users := cacheaside.New(cacheaside.Config[int, *User]{
		Load:         fetchUser, // cacheaside.ErrNotFound if there is none
		TTL:          time.Minute,
		StaleOnError: time.Hour, // serve the old value while the source is down
		Store:        nil,       // or redisstore.New(...)
	})
	user, err := users.Get(ctx, 42)
	err = users.Write(ctx, 42, ping) // write to the source, then invalidate, in the only right order

	use(user, err)
}

type Trip struct{ Flight, Room string }

var trip = &saga.Saga[Trip]{
	Name: "trip",
	Steps: []saga.Step[Trip]{
		{Name: "flight", Do: bookFlight, Undo: cancelFlight},
		{Name: "room", Do: bookRoom, Undo: cancelRoom},
		{Name: "charge", Do: charge, Pivot: true}, // from here on there is no way back
	},
}

func charge(ctx context.Context, t *Trip) error {
	err := chargeCard(ctx, saga.CommandFrom(ctx).ID, t)
	if errors.Is(err, errCardDeclined) {
		return saga.Void(err) // for good: undo begins
	}
	return err // perhaps only the reply is lost: ask again, with the same id
}

func _() error {
	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{}) // a *sql.DB; or MySQL, SQLite
	if err := store.Migrate(ctx); err != nil {                        // creates its tables, unless they exist
		return err
	}
	runner := saga.NewRunner(store, saga.RunnerConfig{})
	saga.Register(runner, trip)
	go func() { slog.Info("sagas end", "err", runner.Run(ctx)) }() // in each process
	if _, err := saga.Start(ctx, runner, trip, "trip-17", Trip{}); err != nil {
		return err // start it again with the same id: it is started once
	}
	done, err := trip.Result(ctx, runner, "trip-17") // errors.Is(err, saga.ErrCompensated): it was undone

	use(done)
	return err
}

func _() {
	client := &http.Client{Transport: &resiliencehttp.Transport{Middleware: guarded}}

	server := resiliencehttp.Server{}
	limit := server.ThrottleBy(tenants, resiliencehttp.ClientIP()) // behind a load balancer: ClientIP(its networks)
	http.Handle("/", limit(server.Bulkhead(slots)(handler)))

	use(client)
}

func _() error {
	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{}) // or MySQL, SQLite
	err := store.Migrate(ctx)
	err = lease.Every(ctx, store, lease.Config{Name: "billing"}, time.Minute, func(ctx context.Context, term lease.Term) error {
		if err := billDue(ctx, term); err != nil { // its transaction begins with term.Fence(ctx, tx)
			slog.Error("billing", "err", err)
		}
		return nil // an error would end Every
	})
	return err
}

func billDue(ctx context.Context, term lease.Term) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := term.Fence(ctx, tx); err != nil { // the term holds, and no other begins before tx ends
		return err
	}
	if err := bill(ctx, tx); err != nil {
		return err
	}
	return tx.Commit()
}
