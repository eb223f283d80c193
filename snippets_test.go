package resilience_test

import (
	"context"
	"database/sql"
	"errors"
	"expvar"
	"log/slog"
	"net/http"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
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
	// Build each policy once and share it. A zero field means its default.
	retries := retry.New(retry.Config{
		Attempts: 4,
		OnRetry: func(ctx context.Context, a retry.Attempt) {
			slog.WarnContext(ctx, "retrying", "attempt", a.Number, "in", a.Delay, "err", a.Err)
		},
	})
	circuit := breaker.New(breaker.Config{Name: "users", Failures: 5, OpenFor: 30 * time.Second})
	slots := bulkhead.New(bulkhead.Config{Limit: 16, Queue: 32, MaxWait: 100 * time.Millisecond})

	// One policy, one call.
	err := slots.Do(ctx, ping)

	// Several, outermost first, and a call with a result.
	guarded := resilience.Chain(retries.Wrap, circuit.Wrap, slots.Wrap)
	user, err := resilience.Value(ctx, guarded, func(ctx context.Context) (*User, error) {
		return fetchUser(ctx, 42)
	})
	if errors.Is(err, breaker.ErrOpen) {
		user, err = cachedUser(42)
	}

	// Every request of an http.Client.
	client := &http.Client{Transport: &resiliencehttp.Transport{Middleware: guarded}}

	use(user, err, client)
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
	circuit := breaker.New(breaker.Config{Name: "users", FailureRate: 0.5, Window: 10 * time.Second})
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
		Load:         fetchUser,
		TTL:          time.Minute,
		StaleOnError: time.Hour, // serve the old value while the source is down
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
		return saga.Void(err) // for good: the bank keeps its answer under the id, and undo begins
	}
	return err // perhaps only the reply is lost: ask again, with the same id
}

func book(ctx context.Context) error { return saga.Run(ctx, trip, &Trip{}) } // or by a Runner, on a database

var _ = book

func _() {
	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Name: "payments"})

	use(client)
}

func _() {
	page := console.New(reg, console.Config{})
	http.Handle("/debug/resilience/", http.StripPrefix("/debug/resilience", page))
}

func _() {
	client := &http.Client{Transport: &resiliencehttp.Transport{
		Middleware: resilience.Timeout(2 * time.Second),
	}}

	limit := resiliencehttp.ThrottleBy(tenants, resiliencehttp.ClientIP())
	http.Handle("/", limit(handler))

	use(client)
}

func _() {
	reg := registry.New()
	reg.MustAdd(retries, circuit, slots) // each has a Name
	reg.Observe(registry.Log(slog.Default()))
	expvar.Publish("resilience", reg)

	report, err := reg.Apply([]byte(`{"breaker/users": {"Failures": 10, "OpenFor": "45s"}}`))

	use(report, err)
}

func _() error {
	store := sqllease.New(db, sqllease.PostgreSQL) // or MySQL, SQLite; redislease.New; lease.NewMemory() in tests
	err := store.Migrate(ctx)                      // creates its tables, unless they exist
	err = lease.Run(ctx, store, lease.Config{Name: "billing", TTL: 15 * time.Second},
		func(ctx context.Context, term lease.Term) error { // while this process leads; to return gives the lease up
			for next := time.Tick(time.Minute); ; {
				if err := billDue(ctx, term); err != nil {
					slog.ErrorContext(ctx, "billing", "err", err)
				}
				select {
				case <-next:
				case <-ctx.Done():
					return nil
				}
			}
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
