package resilience_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

//lint:file-ignore SA4006 a recipe shows calls, not what becomes of each error

// This file holds the recipes of docs/cookbook.md, and tests of those that decide something.

// sqlError is a database's answer to a statement. It says what the policies need to know.
type sqlError struct {
	error
	state string // SQLSTATE: five letters and digits, of which the first two are the class
}

// classified returns err as a sqlError if it has an SQLSTATE, and else as it is: the
// connection failed.
func classified(err error) error {
	if answer, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok && answer.SQLState() != "" {
		return sqlError{err, answer.SQLState()}
	}
	return err
}

func (e sqlError) Unwrap() error { return e.error }

// Retryable reports whether the same transaction may work the next time.
func (e sqlError) Retryable() bool {
	switch e.state {
	case "40001", "40P01", "55P03": // serialization failure, deadlock, lock not available
		return true
	}
	return e.ailing()
}

// Answered reports whether the database is well and has said what is wrong with the statement.
func (e sqlError) Answered() bool { return !e.Retryable() }

// ailing: connection exceptions, too few resources, an operator's intervention, system errors.
func (e sqlError) ailing() bool {
	class := e.state[:min(2, len(e.state))]
	return class == "08" || class == "53" || class == "57" && e.state != "57014" || class == "58" // 57014: canceled
}

// inTx runs fn in a transaction, again as often as retries allows. An error of Commit is
// retried only if the database says that nothing was committed.
func inTx(ctx context.Context, retries *retry.Retrier, db *sql.DB, opts *sql.TxOptions, fn func(context.Context, *sql.Tx) error) error {
	return retries.Do(ctx, func(ctx context.Context) error {
		tx, err := db.BeginTx(ctx, opts)
		if err != nil {
			return classified(err)
		}
		defer tx.Rollback()
		if err := fn(ctx, tx); err != nil {
			return classified(err)
		}
		err = classified(tx.Commit())
		if answer, ok := errors.AsType[sqlError](err); err != nil && (!ok || answer.ailing()) {
			return retry.Permanent(err) // it may have been committed: the caller has to find out
		}
		return err
	})
}

var (
	guarded      resilience.Middleware
	redisGet     func(context.Context, string) (string, error)
	url          string
	body         io.Reader
	store        lease.Store
	oldestUnsent func(context.Context, *sql.Tx) (outboxMessage, error)
	reg          *registry.Registry
)

type outboxMessage interface {
	Publish(context.Context) error
	MarkSent(context.Context, *sql.Tx) error
}

type Message interface{ Handle(context.Context) error }

func _() {
	var errNil = errors.New("redis: nil") // redis.Nil of go-redis

	guarded := resilience.Chain(circuit.Wrap, slots.Wrap, resilience.Timeout(50*time.Millisecond))
	get := func(ctx context.Context, key string) (value string, found bool, err error) {
		err = guarded(func(ctx context.Context) error {
			var err error
			value, err = redisGet(ctx, key)
			if errors.Is(err, errNil) {
				return nil
			}
			found = err == nil
			return err
		})(ctx)
		return value, found, err
	}
	_ = get
}

func _() {
	type promptTokens struct{} // the key of the number of tokens in ctx

	tokens := throttle.New(throttle.Config{
		Name: "llm-tokens", Rate: throttle.PerMinute(90_000), Burst: 30_000, MaxWait: 20 * time.Second,
		Cost: func(ctx context.Context) int { n, _ := ctx.Value(promptTokens{}).(int); return max(n, 1) },
	})
	requests := throttle.New(throttle.Config{Name: "llm-requests", Rate: throttle.PerMinute(500), MaxWait: 20 * time.Second})
	answers := bulkhead.New(bulkhead.Config{Name: "llm", Limit: 32, Queue: 64, MaxWait: 10 * time.Second})

	client := &http.Client{Transport: &resiliencehttp.Transport{
		Middleware: resilience.Chain(
			retries.Wrap, // heeds Retry-After of a 429
			circuit.Wrap,
			tokens.Wrap, requests.Wrap,
			answers.Wrap, // a slot is held until the answer has been streamed to its end
		),
	}}
	ctx := context.WithValue(ctx, promptTokens{}, 1200)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	req.Header.Set("Idempotency-Key", "prompt-17") // without one a POST is not repeated
	resp, err := client.Do(req)
	use(resp, err)
}

func _() {
	relay := func(ctx context.Context, term lease.Term) error {
		for {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			message, err := oldestUnsent(ctx, tx)
			if err == nil {
				err = retries.Do(ctx, message.Publish) // at least once: consumers know the message by its id
			}
			if err == nil {
				err = message.MarkSent(ctx, tx)
			}
			if err == nil {
				err = term.Fence(ctx, tx) // only the process that leads commits
			}
			if err == nil {
				err = tx.Commit()
			}
			tx.Rollback()
			if err != nil {
				return err
			}
		}
	}
	for ctx.Err() == nil { // Run returns when relay does: compete again
		err := lease.Run(ctx, store, lease.Config{Name: "outbox", TTL: 15 * time.Second}, relay)
		slog.WarnContext(ctx, "outbox", "err", err)
		time.Sleep(time.Second)
	}
}

func _() {
	consume := func(ctx context.Context, message Message) (again time.Duration, err error) {
		err = guarded(message.Handle)(ctx)
		switch {
		case err == nil, resilience.Answered(err): // done, or no for good: acknowledge
			return 0, err
		case resilience.Refused(err): // nothing was tried: not an attempt of this message
			return max(time.Second, resilience.RetryAfter(err)), err
		default: // tried and failed: one of its attempts
			return 30 * time.Second, err
		}
	}
	use(consume)
}

func _() {
	mux := http.NewServeMux()
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.Handle("/readyz", resiliencehttp.Health(resiliencehttp.Check{
		Name: "database", Probe: db.PingContext, Critical: true, // without it there is nothing to serve
	}))
	mux.Handle("/healthz", resiliencehttp.HealthOf(reg.Health)) // for people: every policy
	use(mux)
}

// An HTTP server whose database may hang.
func _() {
	var (
		api     resiliencehttp.Server
		slots   *bulkhead.Bulkhead
		handler http.Handler
	)
	bounded := resiliencehttp.Guard(resilience.Timeout(5 * time.Second))
	http.Handle("/", api.Bulkhead(slots)(bounded(handler)))
}

// An HTTP API with plans, on several instances.
func _() {
	var (
		eval         func(context.Context, string, []string, ...any) (any, error)
		paid         map[string]bool
		slots        *bulkhead.Group[string]
		accountFrom  func(context.Context) string
		authenticate func(http.Handler) http.Handler
	)

	plans := throttle.NewShared(throttle.SharedConfig{
		Name: "plans", Eval: eval, Instances: 8, // at most, for the time when Redis is down
		Rate: 10, Quotas: []throttle.Quota{{N: 1000, Per: throttle.Day}}, // the free plan
		LimitFor: func(account string) throttle.Limit {
			if paid[account] { // it is asked for each request
				return throttle.Limit{Rate: 100}
			}
			return throttle.Limit{} // free
		},
	})
	api := resiliencehttp.Server{
		LimitName: "plan",
		Exempt:    func(r *http.Request) bool { return r.Method == http.MethodOptions || r.URL.Path == "/readyz" },
		OnRefuse: func(w http.ResponseWriter, r *http.Request, err error) {
			limited, ok := errors.AsType[*throttle.LimitedError](err)
			if ok && limited.Reason == throttle.OverQuota {
				_, _ = io.WriteString(w, "Your requests of today are used up. The paid plan has no such limit.\n")
			} // otherwise the client gets a problem document
		},
	}
	account := func(r *http.Request) string { return accountFrom(r.Context()) } // as authenticated
	http.Handle("/", authenticate(api.ThrottleBy(plans, account)(api.BulkheadBy(slots, account)(handler))))
}

// stateError is an error with an SQLSTATE, as pgx and lib/pq have it.
type stateError string

func (e stateError) Error() string    { return "SQLSTATE " + string(e) }
func (e stateError) SQLState() string { return string(e) }

func TestCookbookReadsSQLSTATE(t *testing.T) {
	for _, c := range []struct {
		err       error
		retryable bool
		answered  bool
	}{
		{stateError("40001"), true, false},
		{stateError("40P01"), true, false},
		{stateError("08006"), true, false},
		{stateError("53300"), true, false},
		{stateError("57P01"), true, false},
		{stateError("57014"), false, true},
		{stateError("23505"), false, true},
		{stateError("42601"), false, true},
		{driver.ErrBadConn, true, false},
	} {
		for _, err := range []error{c.err, fmt.Errorf("orders: %w", c.err)} {
			require.Equal(t, c.retryable, retry.Retryable(classified(err)), "%v", err)
			require.Equal(t, c.answered, resilience.Answered(classified(err)), "%v", err)
		}
	}
	require.NoError(t, classified(nil))
}

func TestCookbookRetriesATransactionThatWasNotCommitted(t *testing.T) {
	retries := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(0)})
	for _, c := range []struct {
		name   string
		work   error // of the first transaction
		commit error // of the first transaction
		begun  int
		okThen bool
	}{
		{name: "well", begun: 1, okThen: true},
		{name: "a deadlock", work: stateError("40P01"), begun: 2, okThen: true},
		{name: "a serialization failure at commit", commit: stateError("40001"), begun: 2, okThen: true},
		{name: "a duplicate", work: stateError("23505"), begun: 1},
		{name: "a connection that is lost before commit", work: io.ErrUnexpectedEOF, begun: 2, okThen: true},
		{name: "a connection that is lost at commit", commit: io.ErrUnexpectedEOF, begun: 1},
		{name: "a shutdown at commit", commit: stateError("57P01"), begun: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			fake := &fakeDB{commits: []error{c.commit}}
			db := sql.OpenDB(fake)
			defer db.Close()
			works := []error{c.work}
			err := inTx(t.Context(), retries, db, nil, func(context.Context, *sql.Tx) error {
				var err error
				if len(works) > 0 {
					err, works = works[0], works[1:]
				}
				return err
			})
			require.Equal(t, c.begun, fake.begun)
			if c.okThen {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, errors.Join(c.work, c.commit).(interface{ Unwrap() []error }).Unwrap()[0])
			}
		})
	}
}

// fakeDB counts transactions; commits are what Commit returns, one after the other.
type fakeDB struct {
	begun   int
	commits []error
}

func (d *fakeDB) Connect(context.Context) (driver.Conn, error) { return fakeConn{d}, nil }
func (d *fakeDB) Driver() driver.Driver                        { return nil }

type fakeConn struct{ db *fakeDB }

func (c fakeConn) Prepare(string) (driver.Stmt, error) { return nil, errors.ErrUnsupported }
func (c fakeConn) Close() error                        { return nil }
func (c fakeConn) Begin() (driver.Tx, error)           { c.db.begun++; return c, nil }
func (c fakeConn) Rollback() error                     { return nil }

func (c fakeConn) Commit() error {
	if len(c.db.commits) == 0 {
		return nil
	}
	err := c.db.commits[0]
	c.db.commits = c.db.commits[1:]
	return err
}
