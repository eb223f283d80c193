package resiliencehttp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/throttle"
)

func TestMiddlewareOfNilPanicsWhenBuilt(t *testing.T) {
	for want, build := range map[string]func(){
		"resiliencehttp: Throttle needs a Limiter, not nil":  func() { resiliencehttp.Throttle(nil) },
		"resiliencehttp: ThrottleBy needs a Group, not nil":  func() { resiliencehttp.ThrottleBy(nil, nil) },
		"resiliencehttp: Bulkhead needs a Bulkhead, not nil": func() { resiliencehttp.Bulkhead(nil) },
	} {
		require.PanicsWithError(t, want, build)
	}
}

func TestBulkheadRefusesWhenFull(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	h := resiliencehttp.Bulkhead(slots)(hello)
	require.Equal(t, "hello", get(h).Body.String())
	release, _ := slots.TryAcquire()
	w := get(h)
	require.Equal(t, 503, w.Code)
	require.Equal(t, "1", w.Header().Get("Retry-After"))
	require.Equal(t, problemTypes+"temporary-reduced-capacity", problemOf(t, w).Type)
	require.NotContains(t, w.Body.String(), "bulkhead", "how the server works is nobody's business")
	release()
	require.Equal(t, 200, get(h).Code)
}

func TestBulkheadQueueTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1, Queue: 1, MaxWait: time.Second})
		release, _ := slots.TryAcquire()
		defer release()
		start := time.Now()
		require.Equal(t, 503, get(resiliencehttp.Bulkhead(slots)(hello)).Code)
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestRequestCannotChooseItsPriority(t *testing.T) {
	type account struct{}
	synctest.Test(t, func(t *testing.T) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1, Queue: 10, Levels: 2, Priority: func(ctx context.Context) int {
			if ctx.Value(account{}) == "paying" {
				return 0
			}
			return 1
		}})
		release, _ := slots.TryAcquire()
		h := resiliencehttp.Bulkhead(slots)(hello)
		claims := func(r *http.Request) {
			r.Header.Set("Priority", "u=0")
			r.Header.Set("X-Priority", "0")
			r.Header.Set("Account", "paying")
		}
		go get(h, claims)
		synctest.Wait()
		require.Equal(t, []int{0, 1}, slots.Stats().Queued)
		go get(h, func(r *http.Request) { *r = *r.WithContext(context.WithValue(t.Context(), account{}, "paying")) })
		synctest.Wait()
		require.Equal(t, []int{1, 1}, slots.Stats().Queued)
		release()
		synctest.Wait()
		require.Zero(t, slots.Stats().InFlight)
	})
}

func TestClientThatHangsUpFreesItsPlaceAtOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1, Queue: 1})
		release, _ := slots.TryAcquire()
		ended := make(chan struct{})
		server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
			recorder := httptest.NewRecorder()
			resiliencehttp.Bulkhead(slots)(hello).ServeHTTP(recorder, r)
			if recorder.Body.Len() > 0 || len(recorder.Result().Header) > 0 {
				t.Error("something was written for a client that has gone")
			}
			close(ended)
		})
		ctx, cancel := context.WithCancel(t.Context())
		req, _ := http.NewRequestWithContext(ctx, "GET", server.URL, nil)
		go func() {
			for slots.Stats().Queued[0] == 0 {
				time.Sleep(time.Millisecond)
			}
			cancel()
		}()
		_, err := (&http.Client{Transport: server.Base}).Do(req)
		require.ErrorIs(t, err, context.Canceled)
		<-ended
		require.Zero(t, slots.Stats().Queued[0])
		require.Equal(t, 1, slots.Stats().InFlight)
		release()
		require.Zero(t, slots.Stats().InFlight)
	})
}

func TestBulkheadPanicFreesTheSlot(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	h := resiliencehttp.Bulkhead(slots)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { get(h) })
	require.Zero(t, slots.Stats().InFlight)
}

func TestGuardTellsABreakerOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		code := 200
		circuit := breaker.New(breaker.Config{Failures: 2, OpenFor: 10 * time.Second, Jitter: -1})
		h := resiliencehttp.Guard(circuit.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(code)
			_, _ = io.WriteString(w, "as it is")
		}))
		for _, code = range []int{200, 404, 429, 501, 500, 503} {
			w := get(h)
			require.Equal(t, "as it is", w.Body.String())
			require.Empty(t, w.Header().Get("Retry-After"))
		}
		require.Equal(t, breaker.Open, circuit.State())
		time.Sleep(2500 * time.Millisecond)
		w := get(h)
		require.Equal(t, 503, w.Code)
		require.Equal(t, "8", w.Header().Get("Retry-After"))
		require.Equal(t, problemTypes+"temporary-reduced-capacity", problemOf(t, w).Type)
		time.Sleep(8 * time.Second)
		code = 200
		require.Equal(t, 200, get(h).Code)
		require.Equal(t, breaker.Closed, circuit.State())
	})
}

func TestGuardIsToldTheFinalStatus(t *testing.T) {
	var seen watch
	server := serve(t, false, resiliencehttp.Guard(seen.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(502)
		w.WriteHeader(200) // which net/http ignores
	})).ServeHTTP)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	resp, err := (&http.Client{Transport: server.Base}).Get(server.URL)
	answer(t, resp, err)
	require.Equal(t, 502, resp.StatusCode)
	status, ok := errors.AsType[*resiliencehttp.StatusError](seen.seen()[0])
	require.True(t, ok)
	require.Equal(t, 502, status.StatusCode)
}

func TestGuardUnderOtherPolicies(t *testing.T) {
	twice := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { _ = next(ctx); return next(ctx) }
	}
	answerTo := func(err error) resilience.Middleware {
		return func(resilience.Func) resilience.Func { return func(context.Context) error { return err } }
	}
	limit := throttle.New(throttle.Config{Rate: 0.001, Burst: 1})
	limit.Allow()
	for name, c := range map[string]struct {
		mw     resilience.Middleware
		status int
	}{
		"None":     {nil, 500},
		"Twice":    {twice, 500},
		"Limit":    {limit.Wrap, 429},
		"Error":    {answerTo(errors.New("no")), 503},
		"Limited":  {answerTo(throttle.ErrLimited), 429},
		"Shed":     {answerTo(&throttle.LimitedError{Reason: throttle.Shed}), 503},
		"Swallows": {answerTo(nil), 503},
		"LosesCtx": {func(next resilience.Func) resilience.Func {
			return func(context.Context) error { return next(context.Background()) }
		}, 503},
	} {
		t.Run(name, func(t *testing.T) {
			served := 0
			w := get(resiliencehttp.Guard(c.mw)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				served++
				w.WriteHeader(500)
			})))
			require.Equal(t, c.status, w.Code)
			require.Equal(t, c.status == 500, served == 1)
		})
	}
}

func TestGuardPassesTheCtxOfThePolicies(t *testing.T) {
	h := resiliencehttp.Guard(resilience.Timeout(time.Hour))(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, ok := r.Context().Deadline()
		require.True(t, ok)
	}))
	require.Equal(t, 200, get(h).Code)
}

func TestGuardKeepsWhatTheResponseWriterCanDo(t *testing.T) {
	server := serve(t, false, resiliencehttp.Guard(nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			upgrade(w, r)
			return
		}
		require.NoError(t, http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Minute)))
		_, err := w.(io.ReaderFrom).ReadFrom(bytes.NewReader([]byte("copied")))
		require.NoError(t, err)
		w.(http.Flusher).Flush()
	})).ServeHTTP)
	client := &http.Client{Transport: server.Base}
	resp, err := client.Get(server.URL)
	require.Equal(t, "copied", answer(t, resp, err))
	resp, err = client.Do(upgradeRequest(t, server.URL))
	require.NoError(t, err)
	requireEcho(t, resp.Body.(io.ReadWriter), "one")
	require.NoError(t, resp.Body.Close())
}

func TestRefuse(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	for name, c := range map[string]struct {
		err     error
		ctx     context.Context
		refused bool
		status  int
	}{
		"Nothing":  {nil, t.Context(), false, 200},
		"Other":    {errors.New("no such user"), t.Context(), false, 200},
		"Limit":    {fmt.Errorf("asking: %w", &throttle.LimitedError{Reason: throttle.OverLimit}), t.Context(), true, 429},
		"Full":     {&bulkhead.FullError{}, t.Context(), true, 503},
		"Open":     {&breaker.OpenError{}, t.Context(), true, 503},
		"Deadline": {context.DeadlineExceeded, t.Context(), true, 503},
		"Late":     {context.DeadlineExceeded, late, true, 503},
		"Gone":     {&bulkhead.FullError{}, gone, true, 200},
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			require.Equal(t, c.refused, resiliencehttp.Refuse(w, httptest.NewRequest("GET", "/", nil).WithContext(c.ctx), c.err))
			require.Equal(t, c.status, w.Code)
			require.Equal(t, c.status != 200, w.Body.Len() > 0)
		})
	}
}
