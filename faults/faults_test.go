package faults_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/faults"
)

func script(plans ...faults.Plan) *faults.Script {
	return faults.New(faults.Config{Name: "backend", Enabled: true, Plans: plans})
}

var errFull = errors.New("disk full")

func ok(context.Context) error { return nil }

func TestScriptIsOffUntilEnabled(t *testing.T) {
	s := faults.New(faults.Config{Plans: []faults.Plan{{Kind: faults.Fail}}})
	fn := faults.Func(s, ok)
	require.NoError(t, fn(t.Context()))
	s.Enable(true)
	require.ErrorIs(t, fn(t.Context()), faults.ErrInjected)
	s.Enable(false)
	require.NoError(t, fn(t.Context()))
	require.Equal(t, faults.Stats{Calls: 3, Injected: map[faults.Kind]int64{faults.Fail: 1}}, s.Stats())
}

func TestFuncEndsAsThePlanSays(t *testing.T) {
	for _, c := range []struct {
		plan faults.Plan
		made bool
		took time.Duration
		err  error
	}{
		{faults.Plan{Kind: faults.Latency, Delay: time.Second}, true, time.Second, nil},
		{faults.Plan{Kind: faults.Fail}, false, 0, faults.ErrInjected},
		{faults.Plan{Kind: faults.Fail, Err: errFull}, false, 0, errFull},
		{faults.Plan{Kind: faults.Refuse}, false, 0, syscall.ECONNREFUSED},
		{faults.Plan{Kind: faults.Reset}, true, 0, syscall.ECONNRESET},
		{faults.Plan{Kind: faults.Hang}, false, time.Minute, context.DeadlineExceeded},
		{faults.Plan{Kind: faults.SlowBody, Delay: 2 * time.Second}, true, 2 * time.Second, nil},
		{faults.Plan{Kind: faults.Latency, Delay: time.Hour}, false, time.Minute, context.DeadlineExceeded},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			made, start := false, time.Now()
			err := faults.Func(script(c.plan), func(context.Context) error { made = true; return nil })(ctx)
			require.ErrorIs(t, err, c.err)
			require.Equal(t, c.made, made, "%+v", c.plan)
			require.Equal(t, c.took, time.Since(start), "%+v", c.plan)
		})
	}
}

func TestFuncStatusSaysWhenToComeBack(t *testing.T) {
	err := faults.Func(script(faults.Plan{Kind: faults.Status, Status: 429, RetryAfter: time.Second}), ok)(t.Context())
	var status *faults.StatusError
	require.ErrorAs(t, err, &status)
	require.Equal(t, 429, status.Code)
	require.Equal(t, time.Second, status.RetryAfter())
	require.EqualError(t, err, "faults: injected status 429")
}

func TestPlanKeepsItsTimeAndCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(
			faults.Plan{Kind: faults.Fail, At: 2 * time.Second, For: time.Second},
			faults.Plan{Kind: faults.Fail, Err: errFull, At: 5 * time.Second, Count: 2},
		), ok)
		var got []error
		for range 8 {
			got = append(got, fn(t.Context()))
			time.Sleep(time.Second)
		}
		require.Equal(t, []error{nil, nil, faults.ErrInjected, nil, nil, errFull, errFull, nil}, got)
	})
}

func TestLatencyGrowsAndAddsUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(
			faults.Plan{Kind: faults.Latency, Delay: 10 * time.Millisecond, Growth: 5 * time.Millisecond},
			faults.Plan{Kind: faults.Latency, Delay: time.Second, Count: 1},
			faults.Plan{Kind: faults.Fail, At: time.Hour},
		), ok)
		for _, want := range []time.Duration{1010, 15, 20} {
			start := time.Now()
			require.NoError(t, fn(t.Context()))
			require.Equal(t, want*time.Millisecond, time.Since(start))
		}
	})
}

func TestSpreadStaysWithinItsBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(faults.Plan{Kind: faults.Latency, Delay: 100, Spread: 50}), ok)
		seen := map[time.Duration]bool{}
		for range 2000 {
			start := time.Now()
			require.NoError(t, fn(t.Context()))
			seen[time.Since(start)] = true
		}
		require.Len(t, seen, 51)
		require.Contains(t, seen, time.Duration(100))
		require.Contains(t, seen, time.Duration(150))
	})
}

func TestSameSeedSameFaults(t *testing.T) {
	run := func(seed uint64) (pattern string) {
		s := faults.New(faults.Config{Enabled: true, Seed: seed, Plans: []faults.Plan{{Kind: faults.Fail, Share: 0.3}}})
		fn := faults.Func(s, ok)
		for range 1000 {
			if fn(t.Context()) != nil {
				pattern += "x"
			} else {
				pattern += "."
			}
		}
		return pattern
	}
	require.Equal(t, run(7), run(7))
	require.NotEqual(t, run(7), run(8))
	require.InDelta(t, 300, strings.Count(run(7), "x"), 60)
}

func TestCountIsExactUnderConcurrency(t *testing.T) {
	s := script(faults.Plan{Kind: faults.Fail, Count: 500})
	fn := faults.Func(s, ok)
	var failed atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				if fn(t.Context()) != nil {
					failed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 500, failed.Load())
	require.EqualValues(t, 8000, s.Stats().Calls)
}

func TestUpdateBeginsAnewAndRefusesWhatMeansNothing(t *testing.T) {
	s := script(faults.Plan{Kind: faults.Fail, Count: 1})
	var events []faults.Event
	stop := s.Observe(func(_ context.Context, e faults.Event) { events = append(events, e) })
	defer stop()
	fn := faults.Func(s, ok)
	require.Error(t, fn(t.Context()))
	require.NoError(t, fn(t.Context()))
	require.NoError(t, s.Update(func(c *faults.Config) { c.Plans[0].Count = 2 }))
	require.Error(t, fn(t.Context()))
	require.Error(t, fn(t.Context()))
	require.NoError(t, fn(t.Context()))

	require.EqualError(t, s.Update(func(c *faults.Config) { c.Plans[0].Share = 2 }),
		"faults.Config.Plans[0].Share is 2: must be in [0, 1]")
	require.ErrorContains(t, s.Update(func(c *faults.Config) { c.Plans[0].Kind = "typo" }), `"typo"`)
	require.EqualError(t, s.Update(func(c *faults.Config) { c.Name = "other" }), "faults: backend: Name cannot change")
	require.Equal(t, 2, s.Config().Plans[0].Count)

	s.Enable(false)
	injected := faults.Event{Kind: faults.Injected, Name: "backend", Fault: faults.Fail}
	require.Equal(t, []faults.Event{injected, injected, injected, {Kind: faults.Switched, Name: "backend"}}, events)
	require.Panics(t, func() { faults.New(faults.Config{Plans: []faults.Plan{{}}}) })
}

// get returns what a client sees of one request: the status, the body as far as it came,
// and the first error.
func get(t *testing.T, client *http.Client, url string) (status int, body string, err error) {
	req, err := http.NewRequestWithContext(t.Context(), "POST", url, strings.NewReader("request"))
	require.NoError(t, err)
	res, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	return res.StatusCode, string(b), err
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	_, _ = io.WriteString(w, "hello, world")
})

func TestTransportAndHandlerInjectEachFault(t *testing.T) {
	for _, c := range []struct {
		plan   faults.Plan
		status int
		body   string
		fails  bool
	}{
		{faults.Plan{Kind: faults.Latency, Delay: time.Microsecond}, 200, "hello, world", false},
		{faults.Plan{Kind: faults.Status}, 503, "Service Unavailable\n", false},
		{faults.Plan{Kind: faults.Status, Status: 429, RetryAfter: time.Second}, 429, "Too Many Requests\n", false},
		{faults.Plan{Kind: faults.Refuse}, 0, "", true},
		{faults.Plan{Kind: faults.Reset, Bytes: 5}, 200, "hello", true},
		{faults.Plan{Kind: faults.SlowBody, Rate: 10_000}, 200, "hello, world", false},
	} {
		t.Run(string(c.plan.Kind), func(t *testing.T) {
			plain := httptest.NewServer(hello)
			defer plain.Close()
			client := &http.Client{Transport: faults.Transport(script(c.plan), nil)}
			status, body, err := get(t, client, plain.URL)
			require.Equal(t, c.status, status)
			require.Equal(t, c.body, body)
			require.Equal(t, c.fails, err != nil, "%v", err)

			faulty := httptest.NewServer(faults.Handler(script(c.plan), hello))
			defer faulty.Close()
			status, body, err = get(t, faulty.Client(), faulty.URL)
			require.Equal(t, c.status, status)
			require.Equal(t, c.body, body)
			require.Equal(t, c.fails, err != nil, "%v", err)
		})
	}
}

func TestTransportFailAndHandlerFail(t *testing.T) {
	client := &http.Client{Transport: faults.Transport(script(faults.Plan{Kind: faults.Fail, Err: errFull}), nil)}
	_, _, err := get(t, client, "http://127.0.0.1:1/")
	require.ErrorIs(t, err, errFull)

	server := httptest.NewServer(faults.Handler(script(faults.Plan{Kind: faults.Fail, Status: 500}), hello))
	defer server.Close()
	status, _, err := get(t, server.Client(), server.URL)
	require.NoError(t, err)
	require.Equal(t, 500, status)
}

func TestHangEndsWithTheCallersContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		body := &closed{Reader: strings.NewReader("x")}
		req, err := http.NewRequestWithContext(ctx, "POST", "http://backend/", body)
		require.NoError(t, err)
		start := time.Now()
		_, err = faults.Transport(script(faults.Plan{Kind: faults.Hang}), nil).RoundTrip(req)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(start))
		require.True(t, body.closed, "a RoundTripper closes the body of the request")

		w := httptest.NewRecorder()
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start = time.Now()
		faults.Handler(script(faults.Plan{Kind: faults.Hang}), hello).ServeHTTP(w, httptest.NewRequestWithContext(ctx, "GET", "/", nil))
		require.Equal(t, time.Second, time.Since(start))
	})
}

type closed struct {
	io.Reader
	closed bool
}

func (c *closed) Close() error { c.closed = true; return nil }

func TestSlowBodyTakesItsTimeAndHeedsItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := roundTripper(func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(strings.Repeat("x", 100)))}, nil
		})
		rt := faults.Transport(script(faults.Plan{Kind: faults.SlowBody, Rate: 10}), base)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		res, err := rt.RoundTrip(httptest.NewRequestWithContext(ctx, "GET", "http://backend/", nil))
		require.NoError(t, err)
		b, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.Len(t, b, 100)
		require.Equal(t, 10*time.Second, time.Since(start))

		ctx, cancel = context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		res, err = rt.RoundTrip(httptest.NewRequestWithContext(ctx, "GET", "http://backend/", nil))
		require.NoError(t, err)
		_, err = io.ReadAll(res.Body)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func BenchmarkFuncDisabled(b *testing.B) {
	fn := faults.Func(faults.New(faults.Config{}), ok)
	for b.Loop() {
		_ = fn(b.Context())
	}
}
