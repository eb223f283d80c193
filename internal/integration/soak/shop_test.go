package soak_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
	"github.com/go-resilience/resilience/throttle"
)

const (
	openFor = time.Second
	knownID = 100 // users with a lower number exist
)

// A shop is a program that uses every pattern as the README recommends, around a
// database, a cache, a service and its own handlers.
type shop struct {
	t        *testing.T
	rules    rules
	payments *payments
	database *faultproxy.Proxy // between the shop and the users' database
	cache    *faultproxy.Proxy // between the shop and Redis

	db       *sql.DB // the sagas' own, which has no faults
	usersDSN string
	users    *cacheaside.Cache[int, string]
	client   *http.Client // of payments
	old      *http.Client // of payments, with a breaker and nothing else
	runner   *saga.Runner
	order    *saga.Saga[order]
	frontend *httptest.Server

	breakers map[string]*breaker.Breaker
	sparse   atomic.Bool // one call of 50 is made
	mu       sync.Mutex
	opened   []breaker.Event
	orders   []string
}

type order struct{ Customer string }

var errDeclined = errors.New("card declined")

func newShop(t *testing.T, r rules) *shop {
	s := &shop{t: t, rules: r, payments: newPayments(t), breakers: map[string]*breaker.Breaker{}}
	s.openDatabases()
	s.buildUsers(r)
	s.buildClients(r)
	s.buildSagas(r)
	s.buildFrontend(r)
	return s
}

// breaker returns a new breaker whose openings are noted. It opens for a few failures,
// so that one answer in ten that is taken for a failure would show.
func (s *shop) breaker(cfg breaker.Config) *breaker.Breaker {
	cfg.OpenFor = openFor
	cfg.ConsecutiveFailures, cfg.FailuresInWindow, cfg.Window = 5, 5, time.Second
	b := breaker.New(cfg)
	b.Observe(func(_ context.Context, c breaker.Event) {
		if c.To == breaker.Open {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.opened = append(s.opened, c)
		}
	})
	s.breakers[cfg.Name] = b
	return b
}

// chain is the one that the README recommends.
func (s *shop) chain(circuit resilience.Middleware, limit time.Duration) resilience.Middleware {
	retries := retry.New(retry.Config{
		Attempts: 3, Backoff: retry.Exponential(10*time.Millisecond, 100*time.Millisecond),
		Budget: retry.NewBudget(retry.BudgetConfig{}),
	})
	rate := throttle.New(throttle.Config{Rate: 2000, MaxWait: 100 * time.Millisecond})
	slots := bulkhead.New(bulkhead.Config{Limit: 32, Queue: 64, MaxWait: 100 * time.Millisecond})
	return resilience.Chain(retries.Wrap, circuit, rate.Wrap, slots.Wrap, resilience.Timeout(limit))
}

func (s *shop) openDatabases() {
	dsn := services.Postgres(s.t)
	u, err := url.Parse(dsn)
	require.NoError(s.t, err)
	admin, err := sql.Open("pgx", dsn)
	require.NoError(s.t, err)
	schema := "soak_" + strings.ToLower(rand.Text()[:12])
	_, err = admin.Exec("CREATE SCHEMA " + schema)
	require.NoError(s.t, err)
	s.t.Cleanup(func() {
		_, err := admin.Exec("DROP SCHEMA " + schema + " CASCADE")
		require.NoError(s.t, err)
		require.NoError(s.t, admin.Close())
	})
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	s.db, err = sql.Open("pgx", u.String())
	require.NoError(s.t, err)
	s.db.SetMaxOpenConns(12)
	s.t.Cleanup(func() { s.db.Close() })
	for _, statement := range []string{
		`CREATE TABLE orders (id text PRIMARY KEY)`,
		`CREATE TABLE users (id int PRIMARY KEY, name text NOT NULL)`,
		fmt.Sprintf(`INSERT INTO users SELECT n, 'user ' || n FROM generate_series(0, %d) n`, knownID-1),
	} {
		_, err = s.db.Exec(statement)
		require.NoError(s.t, err)
	}

	s.database = faultproxy.New(s.t, u.Host)
	u.Host = s.database.Addr()
	s.usersDSN = u.String()
	s.cache = faultproxy.New(s.t, services.Redis(s.t))
	redis.SetLogger(nothing{}) // its pool would write a line for each connection refused
}

// buildUsers is a cache in memory and on Redis, whose loads go to the database.
func (s *shop) buildUsers(r rules) {
	db, err := sql.Open("pgx", s.usersDSN)
	require.NoError(s.t, err)
	db.SetMaxOpenConns(16)
	s.t.Cleanup(func() { db.Close() })
	rdb := redis.NewClient(&redis.Options{Addr: s.cache.Addr(), ContextTimeoutEnabled: true, MaxRetries: -1})
	s.t.Cleanup(func() { rdb.Close() })

	circuit := s.breaker(breaker.Config{Name: "users"})
	s.users = cacheaside.New(cacheaside.Config[int, string]{
		Name: "users", TTL: 50 * time.Millisecond,
		Load: func(ctx context.Context, id int) (name string, err error) {
			err = db.QueryRowContext(ctx, `SELECT name FROM users WHERE id = $1`, id).Scan(&name)
			if errors.Is(err, sql.ErrNoRows) {
				err = cacheaside.ErrNotFound
			}
			return name, err
		},
		Middleware: resilience.Chain(s.chain(circuit.Wrap, 300*time.Millisecond), deaf(r.notFoundIsAFailure)),
		Store: redisstore.New(redisstore.Config{
			Prefix: "soak-" + rand.Text(),
			Eval:   resilienceredis.Eval(rdb),
		}),
	})
	s.t.Cleanup(func() { s.users.Close() })
}

// buildClients are those of the payments service.
func (s *shop) buildClients(r rules) {
	cfg := breaker.Config{Name: "payments"}
	if r.retryAfterIsForever {
		cfg.MaxRetryAfter = math.MaxInt64
	}
	chain := resilience.Chain(s.chain(s.breaker(cfg).Wrap, 300*time.Millisecond), deaf(r.declinedIsAFailure))
	s.client = &http.Client{Transport: &resiliencehttp.Transport{
		Middleware: chain,
		Judge: func(resp *http.Response, ahead *resiliencehttp.Ahead) error {
			if resp.StatusCode == http.StatusPaymentRequired {
				return resilience.Answer(errDeclined)
			}
			return resiliencehttp.DefaultJudge(resp, ahead)
		},
	}}
	if r.badRequestIsAFailure {
		s.client.Transport = naive{chain}
	}

	cfg = breaker.Config{Name: "old"}
	if r.callersDeadlineIsNobodys {
		cfg.Patience = -1
	}
	s.old = &http.Client{Transport: &resiliencehttp.Transport{Middleware: s.breaker(cfg).Wrap}}
}

func (s *shop) buildSagas(r rules) {
	store := sqlstore.New(s.db, sqlstore.PostgreSQL, sqlstore.Config{})
	require.NoError(s.t, store.Migrate(s.t.Context()))
	s.runner = saga.NewRunner(store, saga.RunnerConfig{Poll: 200 * time.Millisecond})
	backoff := saga.Exponential(10*time.Millisecond, 200*time.Millisecond)
	s.order = &saga.Saga[order]{
		Name: "order", Timeout: 5 * time.Second,
		Steps: []saga.Step[order]{
			{
				Name: "charge", Do: s.charge, Undo: s.charge,
				Attempts: 10, Backoff: backoff, Timeout: 2 * time.Second,
				Middleware: deaf(r.refusalIsAnAttempt),
			},
			{
				Name: "order",
				DoTx: func(ctx context.Context, tx *sql.Tx, o *order) error {
					if strings.Contains(o.Customer, "soldout") {
						return saga.Declined(errors.New("sold out"))
					}
					_, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES ($1)`, o.Customer)
					return err
				},
				UndoTx: func(ctx context.Context, tx *sql.Tx, o *order) error {
					_, err := tx.ExecContext(ctx, `DELETE FROM orders WHERE id = $1`, o.Customer)
					return err
				},
			},
		},
	}
	saga.Register(s.runner, s.order)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = s.runner.Run(ctx) })
	s.t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}

// charge sends the command of its step to the payments service.
func (s *shop) charge(ctx context.Context, o *order) error {
	command := saga.CommandFrom(ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.payments.URL, strings.NewReader(command.ID))
	if err != nil {
		return err
	}
	req.Header.Set("Idempotency-Key", command.ID)
	resp, err := s.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusPaymentRequired:
		return saga.Declined(errDeclined)
	default:
		return fmt.Errorf("payments: %s", resp.Status)
	}
}

// under has each request served under policies.
func under(mw resilience.Middleware) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			served, aborted := false, false
			err := mw(func(ctx context.Context) error {
				served = true
				defer func() { aborted = recover() != nil }()
				next.ServeHTTP(w, r.WithContext(ctx))
				return ctx.Err()
			})(r.Context())
			if aborted {
				panic(http.ErrAbortHandler)
			}
			if err != nil && !served {
				resiliencehttp.Server{}.Refuse(w, r, err)
			}
		})
	}
}

// buildFrontend is the shop's own server.
func (s *shop) buildFrontend(r rules) {
	circuit := s.breaker(breaker.Config{Name: "frontend"})
	slots := bulkhead.New(bulkhead.Config{Limit: 200})
	guarded := under(resilience.Chain(
		blind(r.hangUpIsAFailure, circuit.Wrap), slots.Wrap, resilience.Timeout(5*time.Second),
	))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /user/{id}", func(w http.ResponseWriter, r *http.Request) {
		id, _ := strconv.Atoi(r.PathValue("id"))
		switch name, err := s.users.Get(r.Context(), id); {
		case err == nil:
			_, _ = io.WriteString(w, name)
		case errors.Is(err, cacheaside.ErrNotFound):
			http.NotFound(w, r)
		default: // it answers, without a name
			w.WriteHeader(http.StatusNoContent)
		}
	})
	mux.HandleFunc("GET /slow", func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done() // until the browser leaves
		panic(http.ErrAbortHandler)
	})
	s.frontend = httptest.NewServer(guarded(mux))
	s.t.Cleanup(s.frontend.Close)
}

func (s *shop) get(ctx context.Context, path string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.frontend.URL+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close())
}

// look asks the payments service for a payment that does not exist.
func (s *shop) look(ctx context.Context, client *http.Client, header string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.payments.URL, nil)
	if err != nil {
		return
	}
	req.Header.Set("Trace", header)
	resp, err := client.Do(req)
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}

// nothing logs nothing.
type nothing struct{}

func (nothing) Printf(context.Context, string, ...any) {}
