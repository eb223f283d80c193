// Package plans_test runs a service with plans, on several HTTP servers that share their
// limits in Redis.
package plans_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
)

// newPlans returns the limits of accounts by their plan: paid, tried for a day, or free.
func newPlans(t *testing.T, addr, prefix string, day *time.Location) *throttle.Shared {
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	return throttle.NewShared(throttle.SharedConfig{
		Name: "plans", Prefix: prefix,
		Rate: 10, Quotas: []throttle.Quota{{N: 1000, Per: throttle.Day, In: day}},
		LimitFor: func(account string) throttle.Limit {
			switch {
			case strings.HasPrefix(account, "paid"):
				return throttle.Limit{Rate: 100}
			case strings.HasPrefix(account, "tried"):
				return throttle.Limit{Rate: 10, Quotas: []throttle.Quota{{N: 15, Per: throttle.Day, In: day}}}
			}
			return throttle.Limit{} // free
		},
		Eval:     resilienceredis.Eval(rdb),
		Timeout:  10 * time.Second, // of a slow machine
		OnOutage: throttle.RefuseAll,
	})
}

// noon returns a time zone in which it is noon, so that no day ends during the test.
func noon() *time.Location {
	return time.FixedZone("noon", int(12*time.Hour-time.Duration(time.Now().Unix()%86400)*time.Second)/int(time.Second))
}

func newServer(t *testing.T, plans *throttle.Shared) *httptest.Server {
	api := resiliencehttp.Server{
		LimitName: "plan",
		Exempt:    func(r *http.Request) bool { return r.URL.Path == "/health" },
	}
	account := func(r *http.Request) string { return r.Header.Get("Account") } // as authenticated
	server := httptest.NewServer(api.ThrottleBy(plans, account)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "hello")
	})))
	t.Cleanup(server.Close)
	return server
}

// get returns the status and the fields of an answer.
func get(ctx context.Context, url, account string) (int, http.Header, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Account", account)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, resp.Header, errors.Join(err, resp.Body.Close())
}

// asked is what became of the requests of an account.
type asked struct{ admitted, refused atomic.Int64 }

// ask sends 4n requests of an account, by turns to each of the servers. check says what is
// wrong with an answer.
func (a *asked) ask(t *testing.T, servers []*httptest.Server, account string, n int, check func(int, http.Header) string) {
	var workers sync.WaitGroup
	for i := range 4 {
		workers.Go(func() {
			for n := range n {
				status, fields, err := get(t.Context(), servers[(i+n)%len(servers)].URL, account)
				switch {
				case err != nil:
					t.Error(err)
				case status == http.StatusOK:
					a.admitted.Add(1)
				case status == http.StatusTooManyRequests:
					a.refused.Add(1)
				}
				if wrong := check(status, fields); wrong != "" {
					t.Errorf("%s: %d, %s: %v", account, status, wrong, fields)
				}
			}
		})
	}
	workers.Wait()
}

// TestPlansAreHeldOverServers has accounts ask two servers as fast as they can.
func TestPlansAreHeldOverServers(t *testing.T) {
	addr, day := services.Redis(t), noon()
	prefix := fmt.Sprintf("plans-test:%d:%d:", os.Getpid(), time.Now().UnixNano())
	servers := []*httptest.Server{newServer(t, newPlans(t, addr, prefix, day)), newServer(t, newPlans(t, addr, prefix, day))}
	var accounts sync.WaitGroup
	for account, rate := range map[string]int{"free-a": 10, "free-b": 10, "paid": 100} { // a second, and at once
		accounts.Go(func() {
			var a asked
			start := time.Now()
			a.ask(t, servers, account, rate, func(status int, fields http.Header) string {
				switch policy := fmt.Sprintf(`"plan";q=%d;w=1`, rate); {
				case fields.Get("RateLimit-Policy") != policy:
					return "want " + policy
				case status == http.StatusTooManyRequests && fields.Get("Retry-After") != "1":
					return "want Retry-After: 1"
				}
				return ""
			})
			n, most := a.admitted.Load(), float64(rate)+float64(rate)*time.Since(start).Seconds()
			if n < int64(rate) || float64(n) > most || n+a.refused.Load() != int64(4*rate) {
				t.Errorf("%s: %d requests were admitted and %d refused: want %d to %v, and %d in all", account, n, a.refused.Load(), rate, most, 4*rate)
			}
		})
	}
	accounts.Go(func() {
		var a asked
		for a.admitted.Load() < 15 && !t.Failed() {
			a.ask(t, servers, "tried", 1, func(int, http.Header) string { return "" })
		}
		a.ask(t, servers, "tried", 10, func(status int, fields http.Header) string {
			// The day ends in about 12 hours.
			seconds, _ := strconv.Atoi(fields.Get("Retry-After"))
			left := `"plan per day in noon";r=0;t=` + strconv.Itoa(seconds)
			if status != http.StatusTooManyRequests || fields.Get("RateLimit") != left || seconds < 11*3600 || seconds > 12*3600 {
				return "want " + left
			}
			return ""
		})
		if n := a.admitted.Load(); n != 15 {
			t.Errorf("%d requests were admitted in a day: want 15", n)
		}
	})
	accounts.Wait()
	for _, s := range servers {
		_, fields, err := get(t.Context(), s.URL+"/health", "tried")
		require.NoError(t, err)
		require.Empty(t, fields.Get("RateLimit"))
	}

	// A server that starts anew goes on with what is left.
	restarted := newServer(t, newPlans(t, addr, prefix, day))
	status, _, err := get(t.Context(), restarted.URL, "tried")
	require.NoError(t, err)
	require.Equal(t, http.StatusTooManyRequests, status)
}
