package resilienceotel_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/codes"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
)

func TestAttemptsAreSiblingsUnderTheirCall(t *testing.T) {
	s := newSDK(t)
	tel := resilienceotel.New(s.Config)
	retries := retry.New(retry.Config{Name: "users", Attempts: 3, Backoff: retry.Constant(time.Microsecond)})
	s.observe(t, retries)
	n := 0
	err := resilience.Chain(tel.Call("users"), retries.Wrap, tel.Attempt("users"))(func(context.Context) error {
		if n++; n < 3 {
			return fmt.Errorf("secret: %w", errDown)
		}
		return nil
	})(t.Context())
	require.NoError(t, err)

	spans := s.spans.GetSpans()
	require.Len(t, spans, 4)
	call := named(spans, "users")[0]
	require.False(t, call.Parent.IsValid())
	require.Equal(t, "{attempts=3,name=users}", attrs(call))
	require.Equal(t, codes.Unset, call.Status.Code)
	for i, a := range named(spans, "users attempt") {
		require.Equal(t, call.SpanContext.SpanID(), a.Parent.SpanID())
		if i < 2 {
			require.Equal(t, fmt.Sprintf("{error.type=*errors.errorString,attempt=%d,name=users,outcome=error}", i+1), attrs(a))
			require.Equal(t, codes.Error, a.Status.Code)
			require.Empty(t, a.Status.Description)
		} else {
			require.Equal(t, "{attempt=3,name=users}", attrs(a))
		}
		require.Empty(t, a.Events)
	}
	v := s.values(t)
	require.Equal(t, 1.0, v["resilience.call.duration{name=users,outcome=ok}"])
	require.Equal(t, 2.0, v["resilience.attempt.duration{error.type=*errors.errorString,name=users,outcome=error}"])
	require.Equal(t, 1.0, v["resilience.attempt.duration{name=users,outcome=ok}"])
	require.Equal(t, 1.0, v["resilience.retry.call.attempts{name=users,outcome=recovered}"])
}

func TestAttemptsOfRetriedCalls(t *testing.T) {
	s := newSDK(t)
	budget := retry.NewBudget(retry.BudgetConfig{Ratio: retry.None, PerSecond: retry.None})
	retries := retry.New(retry.Config{Name: "users", Budget: budget})
	hedger := hedge.New[int](hedge.Config{Name: "users", Delay: time.Nanosecond, Ratio: hedge.Unlimited})
	s.observe(t, retries, hedger)
	require.Error(t, retries.Do(t.Context(), func(context.Context) error { return errDown }))
	_, err := hedger.Do(t.Context(), func(ctx context.Context) (int, error) {
		if hedger.Stats().Hedged == 0 {
			<-ctx.Done() // the other wins
		}
		return 1, nil
	})
	require.NoError(t, err)
	v := s.values(t)
	require.Equal(t, 1.0, v["resilience.retry.call.attempts{name=users,outcome=over_budget}"])
	for name := range v {
		require.NotRegexp(t, `retry.call.attempts\{.*outcome=(hedge|first)`, name, "a hedge is no attempt of a Retrier")
	}
}

func TestRefusedCallMakesNoAttempt(t *testing.T) {
	s := newSDK(t)
	tel := resilienceotel.New(s.Config)
	circuit := breaker.New(breaker.Config{Name: "users"})
	circuit.ForceOpen(errDown)
	s.observe(t, circuit)
	err := resilience.Chain(tel.Call("users"), circuit.Wrap,
		tel.Attempt("users"))(func(context.Context) error { return nil })(t.Context())
	require.ErrorIs(t, err, breaker.ErrOpen)
	spans := s.spans.GetSpans()
	require.Len(t, spans, 1)
	require.Equal(t, "{error.type=*breaker.OpenError,name=users,outcome=refused,refused_by=breaker/users}",
		attrs(spans[0]))
	v := s.values(t)
	require.Equal(t, 1.0, v["resilience.call.duration{error.type=*breaker.OpenError,name=users,outcome=refused}"])
	require.NotContains(t, v, "resilience.attempt.duration")
}

func TestOutcomes(t *testing.T) {
	gone, leave := context.WithCancel(context.Background())
	leave()
	for _, tc := range []struct {
		name    string
		ctx     context.Context
		err     error
		outcome string
		kind    string
	}{
		{name: "nil", outcome: "ok"},
		{name: "answered", err: cacheaside.ErrNotFound, outcome: "ok"},
		{name: "failed", err: fmt.Errorf("a: %w", &net.ParseError{}), outcome: "error", kind: "*net.ParseError"},
		{name: "late", err: fmt.Errorf("a: %w", context.DeadlineExceeded), outcome: "timeout",
			kind: "context.deadlineExceededError"},
		{name: "timed out", err: &resilience.TimeoutError{}, outcome: "timeout", kind: "*resilience.TimeoutError"},
		{name: "left", ctx: gone, err: context.Canceled, outcome: "canceled", kind: "*errors.errorString"},
		{name: "canceled by another", err: context.Canceled, outcome: "error", kind: "*errors.errorString"},
		{name: "refused", err: &bulkhead.FullError{}, outcome: "refused", kind: "*bulkhead.FullError"},
		{name: "status", err: &resiliencehttp.StatusError{StatusCode: 503}, outcome: "error", kind: "503"},
		{name: "gave up", err: &retry.Error{Cause: retry.ErrExhausted, Err: &net.ParseError{}}, outcome: "error",
			kind: "*net.ParseError"},
		{name: "says it", err: typed{errDown}, outcome: "error", kind: "disk_full"},
		{name: "joined", err: errors.Join(errDown, io.EOF), outcome: "error", kind: "*errors.joinError"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSDK(t)
			ctx := tc.ctx
			if ctx == nil {
				ctx = t.Context()
			}
			err := resilienceotel.New(s.Config).Call("x")(func(context.Context) error { return tc.err })(ctx)
			require.Equal(t, tc.err, err)
			want := fmt.Sprintf("{name=x,outcome=%s}", tc.outcome)
			if tc.kind != "" {
				want = fmt.Sprintf("{error.type=%s,name=x,outcome=%s}", tc.kind, tc.outcome)
			}
			require.Equal(t, map[string]float64{"resilience.call.duration" + want: 1}, s.values(t))
			spans := s.spans.GetSpans()
			require.Len(t, spans, 1)
			require.Equal(t, tc.outcome != "ok" && tc.outcome != "canceled", spans[0].Status.Code == codes.Error)
			if want = "{name=x}"; tc.outcome != "ok" {
				want = fmt.Sprintf("{error.type=%s,name=x,outcome=%s}", tc.kind, tc.outcome)
			}
			require.Equal(t, want, attrs(spans[0]))
			require.Empty(t, spans[0].Status.Description)
			require.Empty(t, spans[0].Events)
		})
	}
}

type typed struct{ error }

func (typed) ErrorType() string { return "disk_full" }

func TestPanicEndsTheSpans(t *testing.T) {
	s := newSDK(t)
	tel := resilienceotel.New(s.Config)
	guarded := resilience.Chain(tel.Call("x"), tel.Attempt("x"))
	require.PanicsWithValue(t, "oops", func() {
		left, leave := context.WithCancel(t.Context())
		_ = guarded(func(context.Context) error { leave(); panic("oops") })(left)
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = guarded(func(context.Context) error { runtime.Goexit(); return nil })(t.Context())
	}()
	<-done
	v := s.values(t)
	require.Equal(t, 2.0, v["resilience.call.duration{error.type=panic,name=x,outcome=error}"])
	require.Equal(t, 2.0, v["resilience.attempt.duration{error.type=panic,name=x,outcome=error}"])
	require.Len(t, s.spans.GetSpans(), 4)
}

func TestWaitsAndStaleValuesAreOnTheCurrentSpan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSDK(t)
		tel := resilienceotel.New(s.Config)
		slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 1, MaxWait: 2 * time.Second})
		broken := false
		users := cacheaside.New(cacheaside.Config[int, string]{Name: "users", TTL: time.Second, StaleIfError: time.Hour,
			Load: func(context.Context, int) (string, error) {
				if broken {
					return "", errDown
				}
				return "ada", nil
			}})
		s.observe(t, slots, users)
		go func() { _ = slots.Do(t.Context(), func(context.Context) error { time.Sleep(time.Second); return nil }) }()
		synctest.Wait()
		require.NoError(t, resilience.Chain(tel.Call("slow"),
			slots.Wrap)(func(context.Context) error { time.Sleep(3 * time.Second); return nil })(t.Context()))
		require.Equal(t, "{name=slow,waited=1}", attrs(named(s.spans.GetSpans(), "slow")[0]))

		go func() {
			_ = slots.Do(t.Context(), func(context.Context) error { time.Sleep(3 * time.Second); return nil })
		}()
		synctest.Wait()
		require.Error(t, resilience.Chain(tel.Call("full"),
			slots.Wrap)(func(context.Context) error { return nil })(t.Context()))
		require.Contains(t, attrs(named(s.spans.GetSpans(), "full")[0]), "refused_by=bulkhead/users,waited=2")

		get := tel.Call("get")(func(ctx context.Context) error { _, err := users.Get(ctx, 1); return err })
		require.NoError(t, get(t.Context()))
		broken = true
		time.Sleep(time.Minute)
		require.NoError(t, get(t.Context()))
		got := named(s.spans.GetSpans(), "get")
		require.Equal(t, "{name=get}", attrs(got[0]))
		require.Equal(t, "{name=get,stale=true}", attrs(got[1]))

		m := s.metrics(t)
		require.Equal(t, "s", m["resilience.bulkhead.wait.duration"].Unit)
		v := s.values(t)
		require.Equal(t, 1.0, v["resilience.bulkhead.wait.duration{name=users,outcome=admitted}"])
		require.Equal(t, 1.0, v["resilience.bulkhead.wait.duration{name=users,outcome=refused}"])
		require.Equal(t, 1.0, v["resilience.cache.load.duration{name=users,outcome=loaded}"])
		require.Equal(t, 1.0, v["resilience.cache.load.duration{name=users,outcome=failed}"])
	})
}

func TestTransportCountsResends(t *testing.T) {
	s := newSDK(t)
	tel := resilienceotel.New(s.Config)
	var sent int
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if sent++; sent == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, strings.Repeat("hello", 100_000)) // more than a client reads ahead
	}))
	defer server.Close()
	retries := retry.New(retry.Config{Backoff: retry.Constant(time.Microsecond)})
	chain := &http.Client{Transport: &resiliencehttp.Transport{Middleware: resilience.Chain(tel.Call("api"),
		retries.Wrap, tel.Attempt("api"))}}
	made := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
		Retry: retries.Wrap,
		Base:  &resiliencehttp.Transport{Middleware: tel.Attempt("api")},
	})
	made.Transport = &resiliencehttp.Transport{Base: made.Transport, Middleware: tel.Call("api")}
	for name, client := range map[string]*http.Client{"a chain": chain, "a client of NewClient": made} {
		t.Run(name, func(t *testing.T) {
			sent = 0
			s.spans.Reset()
			resends(t, s, client, server.URL)
		})
	}
}

func resends(t *testing.T, s *otelSDK, client *http.Client, url string) {
	resp, err := client.Get(url)
	require.NoError(t, err)
	require.Len(t, s.spans.GetSpans(), 1, "the response is being read: its attempt and its call go on")
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	spans := s.spans.GetSpans()
	require.Len(t, spans, 3)
	attempts := named(spans, "api attempt")
	require.Equal(t, "{error.type=503,attempt=1,name=api,outcome=error}", attrs(attempts[0]))
	require.Equal(t, "{http.request.resend_count=1,attempt=2,name=api}", attrs(attempts[1]))
}

func TestManyCallsAtOnce(t *testing.T) {
	s := newSDK(t)
	tel := resilienceotel.New(s.Config)
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: 2, MaxWait: -1})
	s.observe(t, slots)
	call := resilience.Chain(tel.Call("users"), slots.Wrap,
		tel.Attempt("users"))(func(context.Context) error { return nil })
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range 100 {
				_ = call(t.Context())
			}
		})
	}
	for range 20 {
		s.values(t)
	}
	callers.Wait()
	v := s.values(t)
	require.Equal(t, 800.0, v["resilience.call.duration{name=users,outcome=ok}"])
	require.Equal(t, 800.0, v["resilience.attempt.duration{name=users,outcome=ok}"])
	require.Equal(t, 800.0, v["resilience.bulkhead.calls{name=users,outcome=admitted,reason=}"])
	require.Len(t, s.spans.GetSpans(), 1600)
}

// The histogram of loads has the same outcomes as the metric that counts them.
func TestLoadHistogramHasOutcomesOfMetric(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSDK(t)
		users := cacheaside.New(cacheaside.Config[string, int]{Name: "users", LoadTimeout: time.Second,
			Load: func(ctx context.Context, key string) (int, error) {
				switch key {
				case "failed":
					return 0, errDown
				case "panicked":
					panic("at the disco")
				case "timed_out":
					<-ctx.Done()
				case "not_found":
					return 0, cacheaside.ErrNotFound
				}
				return 1, ctx.Err()
			}})
		s.observe(t, users)
		outcomes := []string{"loaded", "not_found", "failed", "panicked", "timed_out"}
		for _, key := range outcomes {
			_, _ = users.Get(t.Context(), key)
		}
		require.NoError(t, users.Close())
		v := s.values(t)
		for _, outcome := range outcomes {
			require.Equal(t, 1.0, v["resilience.cache.loads{name=users,outcome="+outcome+"}"], outcome)
			require.Equal(t, 1.0, v["resilience.cache.load.duration{name=users,outcome="+outcome+"}"], outcome)
		}
	})
}
