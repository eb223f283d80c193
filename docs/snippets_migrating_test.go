package docs_test

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// This file holds the snippets of docs/migrating.md, for the compiler.

var errTooMany = errors.New("too many")

func _() {
	circuit := breaker.New(breaker.Config{
		Name:                "users",
		ConsecutiveFailures: 5,
		OpenFor:             30 * time.Second,
		Probes:              3,
		Classify: func(err error) breaker.Verdict {
			if errors.Is(err, sql.ErrNoRows) {
				return breaker.Success
			}
			return breaker.DefaultClassify(err)
		},
	})
	user, err := resilience.Do(ctx, circuit.Wrap, func(ctx context.Context) (*User, error) {
		return fetchUser(ctx, 42)
	})

	use(user, err)
}

func _() {
	retries := retry.New(retry.Config{
		Attempts: 4, // the first one and three more
		RetryIf:  func(err error) bool { return resilience.Retryable(err) && !errors.Is(err, sql.ErrNoRows) },
	})
	err := retries.Do(ctx, ping)

	use(err)
}

func _() {
	retries := retry.New(retry.Config{
		Attempts: 5,
		Backoff:  retry.Exponential(100*time.Millisecond, 2*time.Second),
		MinDelay: 100 * time.Millisecond,
	})
	retries.Observe(func(ctx context.Context, e retry.Event) {
		slog.WarnContext(ctx, "retry", "event", e.Kind, "attempts", e.Attempts, "err", e.Err)
	})
	err := retries.Do(ctx, ping)

	use(err)
}

func _() {
	circuit := breaker.New(breaker.Config{Name: "users", FailureRate: 0.5, MinCalls: 20, Window: 10 * time.Second, OpenFor: 5 * time.Second})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 100})
	guarded := resilience.Chain(
		resilience.Fallback(func(ctx context.Context, err error) error { return nil }),
		circuit.Wrap,
		slots.Wrap,
		resilience.Timeout(time.Second),
	)
	err := guarded(ping)(ctx)

	use(err)
}

func _() {
	retries := retry.New(retry.Config{
		Attempts: 4,
		Backoff:  retry.Exponential(100*time.Millisecond, 2*time.Second),
		MinDelay: 100 * time.Millisecond,
	})
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 5, OpenFor: 30 * time.Second})
	guarded := resilience.Chain(retries.Wrap, circuit.Wrap)
	user, err := resilience.Do(ctx, guarded, func(ctx context.Context) (*User, error) {
		return fetchUser(ctx, 42)
	})

	use(user, err)
}

func _() {
	retries := retry.New(retry.Config{
		Attempts: 4,
		Backoff:  retry.Exponential(100*time.Millisecond, 2*time.Second),
		MinDelay: 100 * time.Millisecond,
	})
	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
		Name:           "users",
		Retry:          retries.Wrap,
		Breaker:        resiliencehttp.Disabled, // switches a default off
		Bulkhead:       resiliencehttp.Disabled,
		AttemptTimeout: 2 * time.Second,
		Timeout:        resilience.Unlimited, // of all attempts: none
	})
	resp, err := client.Get(url)

	use(resp, err)
}

func _() error {
	limit := throttle.New(throttle.Config{Rate: 100, Burst: 20, MaxWait: throttle.Unlimited}) // waits until ctx ends
	err := limit.Do(ctx, ping)
	if !limit.Allow() {
		return errTooMany
	}

	return err
}

func _() {
	var n int
	guarded := resilience.Chain(circuit.Wrap, resiliencesql.Middleware(resiliencesql.Config{}))
	err := guarded(func(ctx context.Context) error {
		return db.QueryRowContext(ctx, "SELECT count(*) FROM account").Scan(&n)
	})(ctx)
	use(err)
}
