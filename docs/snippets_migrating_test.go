package docs_test

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// This file holds the snippets of docs/migrating.md, for the compiler, and tests of some of them.

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
	circuit := breaker.New(breaker.Config{
		Name: "users", FailureRate: 0.5, MinCalls: 20, Window: 10 * time.Second, OpenFor: 5 * time.Second,
	})
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
	limit := throttle.New(throttle.Config{Rate: 100, Burst: 20, MaxWait: throttle.Unlimited})
	err := limit.Do(ctx, ping) // waits until ctx is done
	if !limit.Allow() {
		return errTooMany
	}

	return err
}

func _(ctx context.Context, export func(context.Context) error) error {
	slots := bulkhead.New(bulkhead.Config{Name: "exports", Limit: 10, MaxWait: bulkhead.Unlimited})
	err := slots.Do(ctx, export)

	return err
}

func TestCacheasideAsSingleflight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		loads := 0
		fetchUser := func(context.Context, int) (*User, error) {
			loads++
			time.Sleep(time.Second)
			return &User{42}, nil
		}
		users := cacheaside.New(cacheaside.Config[int, *User]{
			Name: "users",
			Load: func(ctx context.Context, id int) (*User, error) {
				cacheaside.SetTTL(ctx, 0) // share the load, store nothing
				return fetchUser(ctx, id)
			},
		})
		defer users.Close()
		user, err := users.Get(ctx, 42)

		require.NoError(t, err)
		require.Equal(t, &User{42}, user)
		var callers sync.WaitGroup
		for range 10 {
			callers.Go(func() { _, _ = users.Get(ctx, 42) })
		}
		callers.Wait()
		require.Equal(t, 2, loads, "nothing is stored, and ten callers share a load")
	})
}

func TestLastErrorOfARetrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("down")
		err := retry.New(retry.Config{Attempts: 2}).Do(ctx, func(context.Context) error { return cause })
		require.NotEqual(t, cause, err)
		if stopped, ok := errors.AsType[*retry.Error](err); ok {
			err = stopped.Err
		}

		require.Equal(t, cause, err)
	})
}

func _() {
	transport := &resiliencehttp.Transport{
		RetryAfter: func(resp *http.Response) time.Duration {
			ms, _ := strconv.Atoi(resp.Header.Get("retry-after-ms"))
			return time.Duration(ms) * time.Millisecond // 0 means that the header Retry-After decides
		},
	}

	use(transport)
}

// A quotaError is a 429 with the delay that its body asks for.
type quotaError struct {
	*resiliencehttp.StatusError
	after time.Duration
}

func (e quotaError) RetryAfter() time.Duration { return e.after }

var retryDelay = regexp.MustCompile(`"retryDelay":\s*"([^"]+)"`)

func judgeQuota(resp *http.Response, ahead *resiliencehttp.Ahead) error {
	err := resiliencehttp.DefaultJudge(resp, ahead)
	status, ok := errors.AsType[*resiliencehttp.StatusError](err)
	if !ok || status.StatusCode != http.StatusTooManyRequests {
		return err
	}
	body, _ := ahead.Bytes(64 << 10)
	if found := retryDelay.FindSubmatch(body); found != nil {
		after, _ := time.ParseDuration(string(found[1]))
		return quotaError{status, after}
	}
	return err
}

func TestRetryAfterInABody(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTooManyRequests)
		_, _ = io.WriteString(w, `{"error": {"details": [{"retryDelay": "34.5s"}]}}`)
	}))
	defer server.Close()
	var seen error
	watch := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { seen = next(ctx); return seen }
	}
	client := http.Client{Transport: &resiliencehttp.Transport{Middleware: watch, Judge: judgeQuota}}
	resp, err := client.Get(server.URL)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 34500*time.Millisecond, resilience.RetryAfter(seen))
	require.True(t, resilience.Answered(seen))
	require.True(t, resilience.Throttled(seen))
}

// Without the recipe, Shutdown waits for the request until its own ctx is done.
func TestShutdownEndsWaitingRequests(t *testing.T) {
	started, grace, shutdownCtx := make(chan error), time.Millisecond, t.Context()
	handler := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(started)
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(context.Background())
	server := &http.Server{
		Handler:     handler,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	server.RegisterOnShutdown(func() { time.AfterFunc(grace, cancel) })

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = server.Serve(l) }()
	go func() {
		if resp, err := http.Get("http://" + l.Addr().String()); err == nil {
			resp.Body.Close()
		}
	}()
	<-started
	err = server.Shutdown(shutdownCtx)
	require.NoError(t, err)
}
