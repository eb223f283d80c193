package resiliencehttp_test

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
)

type health struct {
	Status string
	Checks []struct {
		Name, Status, State, Detail string
		Critical                    bool
		Since                       time.Time
	}
}

func ask(t *testing.T, h http.Handler) (int, health) {
	t.Helper()
	w := get(h)
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	var all health
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &all))
	return w.Code, all
}

func TestHealthOfABreaker(t *testing.T) {
	for _, critical := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			circuit := breaker.New(breaker.Config{OpenFor: time.Minute, Jitter: -1})
			secret := errors.New("password rejected by 10.1.2.3")
			h := resiliencehttp.Health(
				resiliencehttp.Check{Name: "users", Critical: critical, Breaker: circuit},
				resiliencehttp.Check{Name: "why", Breaker: circuit, Detail: true})
			born := time.Now()
			for _, step := range []struct {
				do                   func()
				state, status, whole string
				detail               string
			}{
				{func() {}, "closed", "pass", "pass", ""},
				{func() { circuit.Trip(secret, 0) }, "open", "fail", "fail", secret.Error()},
				{func() { time.Sleep(time.Minute) }, "half-open", "warn", "warn", secret.Error()},
				{func() { circuit.Reset() }, "closed", "pass", "pass", ""},
				{func() { circuit.ForceOpen(secret) }, "forced open", "fail", "fail", secret.Error()},
				{func() { circuit.Enable(); circuit.Disable() }, "disabled", "warn", "warn", ""},
			} {
				step.do()
				since := time.Now()
				if since.Equal(born) {
					since = born
				}
				time.Sleep(2 * time.Second)
				code, all := ask(t, h)
				if !critical && step.whole == "fail" {
					step.whole = "warn"
				}
				require.Equal(t, step.whole, all.Status)
				require.Equal(t, map[bool]int{true: 503, false: 200}[step.whole == "fail"], code)
				c := all.Checks[0]
				require.Equal(t, "users", c.Name)
				require.Equal(t, critical, c.Critical)
				require.Equal(t, step.state, c.State)
				require.Equal(t, step.status, c.Status)
				require.Empty(t, c.Detail, "says why without being asked")
				require.Equal(t, step.detail, all.Checks[1].Detail)
				if step.state != "half-open" {
					require.WithinDuration(t, since, c.Since, 0)
				}
			}
		})
	}
}

func TestHealthOfABulkhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slots := bulkhead.New(bulkhead.Config{Limit: 2, MaxWait: -1, Queue: 3})
		h := resiliencehttp.Health(resiliencehttp.Check{Name: "db", Critical: true, Bulkhead: slots, Detail: true})
		free := time.Now()
		_, all := ask(t, h)
		require.Equal(t, "free", all.Checks[0].State)
		for range 2 {
			done, _ := slots.TryBegin(t.Context())
			defer done(nil)
		}
		waits, leave := context.WithCancel(t.Context())
		defer leave()
		go func() { _ = slots.Do(waits, func(context.Context) error { return nil }) }()
		synctest.Wait()
		time.Sleep(time.Second - time.Nanosecond)
		_, all = ask(t, h)
		require.Equal(t, "free", all.Checks[0].State, "results are kept for a second")
		require.Equal(t, free.UTC(), all.Checks[0].Since)
		time.Sleep(time.Nanosecond)
		full := time.Now()
		for range 3 {
			code, all := ask(t, h)
			require.Equal(t, 200, code, "to be busy is not to be broken")
			require.Equal(t, "warn", all.Status)
			require.Equal(t, "full", all.Checks[0].State)
			require.Equal(t, full.UTC(), all.Checks[0].Since)
			require.Equal(t, "2 of 2 in flight, 1 waiting", all.Checks[0].Detail)
			time.Sleep(time.Second)
		}
	})
}

func TestHealthOfAProbe(t *testing.T) {
	for name, c := range map[string]struct {
		probe                 func(context.Context) error
		status, state, detail string
		takes                 time.Duration
	}{
		"OK":       {func(context.Context) error { return nil }, "pass", "ok", "", 0},
		"Fails":    {func(context.Context) error { return errors.New("no route") }, "fail", "failed", "no route", 0},
		"Panics":   {func(context.Context) error { panic("oops") }, "fail", "failed", "the Probe panicked: oops", 0},
		"Exits":    {func(context.Context) error { runtime.Goexit(); return nil }, "fail", "failed", "the Probe ended its goroutine", 0},
		"TimesOut": {func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, "fail", "timed out", "no answer after 1s", time.Second},
		"Slow":     {func(context.Context) error { time.Sleep(999 * time.Millisecond); return nil }, "pass", "ok", "", 999 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				h := resiliencehttp.Health(resiliencehttp.Check{Name: name, Critical: true, Probe: c.probe, Detail: true})
				code, all := ask(t, h)
				require.Equal(t, c.takes, time.Since(start))
				require.Equal(t, c.status, all.Checks[0].Status)
				require.Equal(t, c.status, all.Status)
				require.Equal(t, c.state, all.Checks[0].State)
				require.Equal(t, c.detail, all.Checks[0].Detail)
				require.Equal(t, map[bool]int{true: 503, false: 200}[c.status == "fail"], code)
				synctest.Wait()
				time.Sleep(10 * time.Second)
				_, again := ask(t, h)
				require.Equal(t, all.Checks[0].Since, again.Checks[0].Since, "since when, not when it was asked last")
			})
		})
	}
}

// A Probe that returns because its time is up may be faster than who watches it.
func TestHealthOfAProbeThatHeedsItsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := resiliencehttp.Health(resiliencehttp.Check{Name: "slow", Probe: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }})
		for range 5000 {
			_, all := ask(t, h)
			require.Equal(t, "timed out", all.Checks[0].State)
			time.Sleep(time.Second)
		}
	})
}

func TestHealthProbesOnceForManyPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var probes atomic.Int64
		h := resiliencehttp.Health(resiliencehttp.Check{Name: "slow", MaxAge: time.Minute, Probe: func(context.Context) error {
			probes.Add(1)
			time.Sleep(time.Second / 2)
			return nil
		}})
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				_, all := ask(t, h)
				require.Equal(t, "ok", all.Checks[0].State)
			})
		}
		wg.Wait()
		for range 59 {
			time.Sleep(time.Second)
			ask(t, h)
		}
		require.EqualValues(t, 1, probes.Load())
		time.Sleep(time.Second)
		ask(t, h)
		require.EqualValues(t, 2, probes.Load())
	})
}

func TestHealthDoesNotPileUpBehindAProbeThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var probes atomic.Int64
		hang := make(chan struct{})
		h := resiliencehttp.Health(resiliencehttp.Check{Name: "hung", Timeout: time.Second, Probe: func(context.Context) error {
			if probes.Add(1) == 1 {
				<-hang // whatever its ctx says
			}
			return nil
		}}, resiliencehttp.Check{Name: "other", Probe: func(context.Context) error { return nil }})
		for i := range 10 {
			start := time.Now()
			_, all := ask(t, h)
			require.Equal(t, "timed out", all.Checks[0].State)
			require.Equal(t, "ok", all.Checks[1].State)
			if i > 0 {
				require.Zero(t, time.Since(start))
			}
			time.Sleep(5 * time.Second)
		}
		require.EqualValues(t, 1, probes.Load())
		close(hang)
		synctest.Wait()
		time.Sleep(time.Second)
		_, all := ask(t, h)
		require.Equal(t, "ok", all.Checks[0].State)
		require.EqualValues(t, 2, probes.Load())
	})
}

// Each of many polls makes the check again. The race detector sees one that reads the result
// without the lock.
func TestHealthOfManyPolls(t *testing.T) {
	h := resiliencehttp.Health(resiliencehttp.Check{Name: "users", Breaker: breaker.New(breaker.Config{}), MaxAge: time.Nanosecond})
	var polls sync.WaitGroup
	for range 4 {
		r := httptest.NewRequest("GET", "/", nil)
		polls.Go(func() {
			for range 50 {
				h.ServeHTTP(httptest.NewRecorder(), r)
			}
		})
	}
	polls.Wait()
}

// ailing is what a policy says of itself.
type ailing struct {
	failed bool
	state  string
}

func (e ailing) Error() string       { return "ailing" }
func (e ailing) Failed() bool        { return e.failed }
func (e ailing) HealthState() string { return e.state }

func TestHealthOfPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var err error
		asked := 0
		h := resiliencehttp.HealthOf(func(ctx context.Context) iter.Seq2[string, error] {
			asked++
			require.NoError(t, ctx.Err())
			return func(yield func(string, error) bool) { yield("users", err) }
		})
		var since time.Time
		for i, step := range []struct {
			err                  error
			status, state, whole string
		}{
			{nil, "pass", "ok", "pass"},
			{errors.New("slow"), "warn", "ailing", "warn"},
			{ailing{false, "half-open"}, "warn", "half-open", "warn"},
			{ailing{true, "open"}, "fail", "open", "warn"},
			{ailing{true, "forced open"}, "fail", "forced open", "warn"},
			{nil, "pass", "ok", "pass"},
		} {
			err = step.err
			since = time.Now()
			for range 3 { // it stays so
				code, all := ask(t, h)
				require.Equal(t, 200, code)
				require.Equal(t, step.whole, all.Status)
				require.Len(t, all.Checks, 1)
				require.Equal(t, "users", all.Checks[0].Name)
				require.Equal(t, step.status, all.Checks[0].Status)
				require.Equal(t, step.state, all.Checks[0].State)
				require.True(t, since.Equal(all.Checks[0].Since), "step %d", i)
				time.Sleep(time.Second)
			}
		}
		require.Equal(t, 18, asked)
		ask(t, h)
		time.Sleep(time.Second - 1)
		ask(t, h)
		require.Equal(t, 19, asked, "not again within a second")

		err = errors.New("slow")
		code, all := ask(t, resiliencehttp.HealthOf(func(context.Context) iter.Seq2[string, error] {
			return func(yield func(string, error) bool) { yield("users", err) }
		}, resiliencehttp.Check{Name: "db", Critical: true, Probe: func(context.Context) error { return err }}))
		require.Equal(t, 503, code)
		require.Equal(t, "fail", all.Status, "a policy that warns makes nothing better")
	})
}

func TestHealthOfPoliciesThatHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		hang := make(chan struct{})
		h := resiliencehttp.HealthOf(func(context.Context) iter.Seq2[string, error] {
			asked++
			return func(yield func(string, error) bool) {
				if yield("first", nil) {
					<-hang // whatever its ctx says
					yield("second", nil)
				}
			}
		})
		states := func() (states []string) {
			code, all := ask(t, h)
			require.Equal(t, 200, code, "no policy is critical")
			for _, c := range all.Checks {
				states = append(states, c.Name+" "+c.State)
			}
			return append(states, all.Status)
		}
		start := time.Now()
		var polls sync.WaitGroup
		for range 3 {
			polls.Go(func() { require.Equal(t, []string{"first ok", "policies timed out", "warn"}, states()) })
		}
		polls.Wait()
		require.Equal(t, time.Second, time.Since(start))
		time.Sleep(time.Minute)
		start = time.Now()
		require.Equal(t, []string{"first ok", "policies timed out", "warn"}, states())
		require.Zero(t, time.Since(start), "nobody waits for it again")
		require.Equal(t, 1, asked)
		close(hang)
		synctest.Wait()
		require.Equal(t, []string{"first ok", "second ok", "pass"}, states())
		require.Equal(t, 2, asked)
	})
}

// Polls give up waiting in the moment in which policies are told. The race detector sees one that
// reads what has been told without the lock.
func TestHealthOfPoliciesThatAreToldLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		h := resiliencehttp.HealthOf(func(context.Context) iter.Seq2[string, error] {
			return func(yield func(string, error) bool) {
				time.Sleep(time.Second) // whatever its ctx says
				for range 100 {
					yield("late", nil)
				}
				<-hang
			}
		})
		var polls sync.WaitGroup
		for range 4 {
			polls.Go(func() {
				_, all := ask(t, h)
				require.Equal(t, "timed out", all.Checks[len(all.Checks)-1].State)
			})
		}
		polls.Wait()
		close(hang)
	})
}

func TestHealthOfPoliciesThatEndTheirGoroutine(t *testing.T) {
	for _, end := range []func(){func() { panic("policies") }, runtime.Goexit} {
		code, all := ask(t, resiliencehttp.HealthOf(func(context.Context) iter.Seq2[string, error] {
			return func(func(string, error) bool) { end() }
		}))
		require.Equal(t, 200, code)
		require.Equal(t, "policies", all.Checks[0].Name)
		require.Equal(t, "failed", all.Checks[0].State)
	}
}

func TestHealthOfAClientThatHasGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := resiliencehttp.Health(resiliencehttp.Check{Name: "slow", Probe: func(context.Context) error { time.Sleep(time.Second / 2); return nil }})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		require.Equal(t, 503, get(h, func(r *http.Request) { *r = *r.WithContext(ctx) }).Code)
		time.Sleep(time.Second)
		_, all := ask(t, h)
		require.Equal(t, "ok", all.Checks[0].State)
	})
}

func TestHealthMethods(t *testing.T) {
	server := httptest.NewServer(resiliencehttp.Health())
	defer server.Close()
	resp, err := http.Get(server.URL)
	require.Equal(t, `{"status":"pass","checks":[]}`+"\n", answer(t, resp, err))
	resp, err = http.Head(server.URL)
	require.Empty(t, answer(t, resp, err))
	require.Equal(t, 200, resp.StatusCode)
	resp, err = http.Post(server.URL, "", nil)
	answer(t, resp, err)
	require.Equal(t, 405, resp.StatusCode)
	require.Equal(t, "GET, HEAD", resp.Header.Get("Allow"))
}

func TestHealthPanicsWithTheErrorOfValidate(t *testing.T) {
	probe := func(context.Context) error { return nil }
	for _, c := range []resiliencehttp.Check{
		{Probe: probe}, {Name: "a"}, {Name: "a", Probe: probe, Breaker: breaker.New(breaker.Config{})},
		{Name: "a", Probe: probe, Timeout: -1}, {Name: "a", Probe: probe, MaxAge: -1},
	} {
		require.ErrorContains(t, c.Validate(), "resiliencehttp.Check.")
		require.PanicsWithError(t, c.Validate().Error(), func() { resiliencehttp.Health(c) })
	}
	require.NoError(t, resiliencehttp.Check{Name: "a", Probe: probe}.Validate())
}

func TestHealthInsideATimeoutIsNotTakenForWell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := resiliencehttp.Health(resiliencehttp.Check{Name: "slow", Probe: func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		w := get(h, func(r *http.Request) { *r = *r.WithContext(ctx) })
		require.Equal(t, 503, w.Code)
		time.Sleep(time.Second) // the Probe returns
	})
}
