package console_test

import (
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
)

var errDown = errors.New("password=hunter2: connection refused")

func failing(context.Context) error { return errDown }
func working(context.Context) error { return nil }

// A shop has a few policies and their console.
type shop struct {
	t       *testing.T
	circuit *breaker.Breaker
	slots   *bulkhead.Bulkhead
	shards  *resilience.Group[string, *breaker.Breaker]
	users   *cacheaside.Cache[int, string]
	reg     *registry.Registry
	page    *console.Console
}

func newShop(t *testing.T, cfg console.Config) *shop {
	s := &shop{
		t:       t,
		circuit: breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 3}),
		slots:   bulkhead.New(bulkhead.Config{Name: "users", Limit: 4}),
		shards: resilience.NewGroup(func(string) *breaker.Breaker {
			return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 1})
		}, resilience.GroupConfig{}),
		users: cacheaside.New(cacheaside.Config[int, string]{Name: "users", TTL: time.Minute,
			Load: func(_ context.Context, id int) (string, error) { return fmt.Sprint(id), nil }}),
		reg: registry.New(),
	}
	s.reg.MustAdd(s.circuit, s.slots, s.shards, s.users, retry.New(retry.Config{Name: "users"}),
		throttle.New(throttle.Config{Name: "search", Rate: 10, Burst: 1}))
	s.page = console.New(s.reg, cfg)
	t.Cleanup(func() { s.page.Close(); _ = s.users.Close() })
	return s
}

// newPage returns a console for the policies of reg.
func newPage(t *testing.T, reg *registry.Registry, cfg console.Config) *shop {
	s := &shop{t: t, reg: reg, page: console.New(reg, cfg)}
	t.Cleanup(func() { s.page.Close() })
	return s
}

// pageOf returns a console for some policies.
func pageOf(t *testing.T, cfg console.Config, policies ...policy.Describer) *shop {
	reg := registry.New()
	reg.MustAdd(policies...)
	return newPage(t, reg, cfg)
}

func TestNewNeedsRegistry(t *testing.T) {
	require.PanicsWithValue(t, "console: *registry.Registry is nil: must be set",
		func() { console.New(nil, console.Config{}) })
}

func allow(*http.Request, console.Operation) error { return nil }

// get returns the response to a GET. If into is not nil, it requests JSON and decodes the JSON into it.
func (s *shop) get(path string, into any) *httptest.ResponseRecorder {
	s.t.Helper()
	r := httptest.NewRequest("GET", path, nil)
	if into != nil {
		r.Header.Set("Accept", "application/json")
	}
	w := httptest.NewRecorder()
	s.page.ServeHTTP(w, r)
	if into != nil {
		require.NoError(s.t, json.Unmarshal(w.Body.Bytes(), into), w.Body.String())
	}
	return w
}

// post posts a form as a page of the console does.
func (s *shop) post(pairs ...string) *httptest.ResponseRecorder {
	s.t.Helper()
	form := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i] != "ids" {
			form.Del(pairs[i])
		}
		form.Add(pairs[i], pairs[i+1])
	}
	if !form.Has("sure") { // confirms the action
		form.Set("sure", "1")
	}
	ctx, end := context.WithCancel(s.t.Context())
	defer end() // a server cancels the ctx of a request after the response
	r := httptest.NewRequestWithContext(ctx, "POST", "/act", strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	w := httptest.NewRecorder()
	s.page.ServeHTTP(w, r)
	return w
}

// postJSON posts a form as a script does.
func (s *shop) postJSON(form string) *httptest.ResponseRecorder {
	r := httptest.NewRequest("POST", "/act", strings.NewReader(form))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Accept", "application/json")
	w := httptest.NewRecorder()
	s.page.ServeHTTP(w, r)
	return w
}

type overview struct {
	Tick     int
	Tone     string
	Verdict  string
	Policies []struct {
		Path, Kind, Name, Tone, State, Problem, Detail, Error string
		Calls, Failed, Refused                                float64
		Since                                                 *time.Time
		Words                                                 struct{ Rate, Share, Since string }
		Spark                                                 struct{ Calls, Bad []float64 }
	}
}

type policyJSON struct {
	Tick               int
	Tone, State, Error string
	States             []struct {
		State   string
		Seconds int
	}
	Metrics []struct {
		Name   string
		Attrs  map[string]string
		Value  float64
		Points []float64
	}
	Settings map[string]any
	Members  []struct {
		Key, State, Error string
		Calls             int64
	}
	Actions []string
}

// points returns the points of a metric.
func (p policyJSON) points(t *testing.T, name, attr string) []float64 {
	t.Helper()
	for _, f := range p.Metrics {
		if f.Name == name && (attr == "" || f.Attrs["outcome"] == attr) {
			return f.Points
		}
	}
	t.Fatalf("no metric %s %s", name, attr)
	return nil
}

func TestOverviewListsBrokenPoliciesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{})
		var o overview
		s.get("/", &o)
		require.Equal(t, "All 6 policies are healthy.", o.Verdict)
		require.Zero(t, o.Tick)
		require.Equal(t, "ok", o.Tone)
		paths := func() (all []string) {
			for _, p := range o.Policies {
				all = append(all, p.Path)
			}
			return all
		}
		require.Equal(t, []string{"throttle/search", "breaker/shards", "cache/users", "retry/users", "breaker/users",
			"bulkhead/users"}, paths(),
			"by name, and within a name in the order of a chain")

		for range 5 {
			_ = s.circuit.Do(t.Context(), failing)
		}
		_ = s.shards.Do(t.Context(), "a", failing)
		_ = s.shards.Do(t.Context(), "b", func(context.Context) error { return nil })
		time.Sleep(1500 * time.Millisecond)
		s.get("/", &o)
		require.Equal(t, 1, o.Tick)
		require.Equal(t, "The breaker users is open and the breaker shards is partly open.", o.Verdict)
		require.Equal(t, "fail", o.Tone)
		require.Equal(t, []string{"cache/users", "retry/users", "breaker/users", "bulkhead/users", "breaker/shards",
			"throttle/search"}, paths())
		require.Equal(t, "open", o.Policies[2].State)
		require.Equal(t, 5.0, o.Policies[2].Calls, "in the only sampled second")
		require.Equal(t, 3.0, o.Policies[2].Failed)
		require.Equal(t, 2.0, o.Policies[2].Refused)
		require.Equal(t, []float64{5}, o.Policies[2].Spark.Calls)
		require.Equal(t, "1 of 2 open", o.Policies[4].Detail)

		body := s.get("/", nil).Body.String()
		require.Less(t, strings.Index(body, "breaker/users"), strings.Index(body, "breaker/shards"))
		require.Contains(t, body, `The <a href="policy?kind=breaker&amp;name=users">breaker users</a> is open and the `)
		require.Contains(t, body, "100% failed or refused")
	})
}

// A closed breaker whose calls fail is closed and needs attention. A throttle has no such state.
func TestStateAndProblemAreApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Name: "users"})
		limits := throttle.New(throttle.Config{Name: "users", Rate: 0.001, Burst: 30})
		s := pageOf(t, console.Config{}, b, limits)
		s.get("/", nil)
		time.Sleep(500 * time.Millisecond)
		for i := range 50 {
			_ = limits.Do(t.Context(), working)
			_ = b.Do(t.Context(), []func(context.Context) error{failing, working, working, working}[i%4])
		}
		time.Sleep(time.Second)
		var o overview
		s.get("/", &o)
		require.Equal(t, "The breaker users has failing calls and the throttle users limits calls.", o.Verdict)
		for i, want := range [][]string{{"closed", "warn", "26% failing"}, {"limiting", "warn", "40% refused"}} {
			require.Equal(t, want, []string{o.Policies[i].State, o.Policies[i].Tone, o.Policies[i].Problem})
		}
		chip := func(tone, text string) string {
			return `<span class="state ` + tone + `"><span class="mark" aria-hidden="true"></span>` + text
		}
		for _, path := range []string{"/", "/policy?kind=breaker&name=users"} {
			require.Contains(t, s.get(path, nil).Body.String(), chip("ok", "closed</span> ")+chip("warn", "26% failing<"))
		}
		require.NotContains(t, s.get("/", nil).Body.String(), ">limiting")
	})
}

// A kind is a policy of that kind.
type kind string

func (k kind) Describe() policy.Description {
	return policy.Description{Kind: string(k), Name: "users"}
}

// The rates of a kind depend on the names of its metrics.
func TestEveryKindHasItsRates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		retries := retry.New(retry.Config{Name: "p", Attempts: 1})
		budget := retry.NewBudget(retry.BudgetConfig{Name: "p", PerSecond: retry.None})
		spender := retry.New(retry.Config{Name: "spender", Attempts: 5, Budget: budget,
			Backoff: retry.Constant(time.Millisecond)})
		hedger := hedge.New[int](hedge.Config{Name: "p", Delay: time.Second})
		circuit := breaker.New(breaker.Config{Name: "p", ConsecutiveFailures: 1})
		rate := throttle.New(throttle.Config{Name: "p", Rate: 0.001, Burst: 1})
		slots := bulkhead.New(bulkhead.Config{Name: "p", Limit: 1})
		users := cacheaside.New(cacheaside.Config[int, string]{Name: "p", TTL: time.Minute,
			Load: func(context.Context, int) (string, error) { return "", errDown }})
		defer users.Close()
		s := pageOf(t, console.Config{}, retries, budget, spender, hedger, circuit, rate, slots, users)
		s.get("/", nil)
		time.Sleep(500 * time.Millisecond)
		for range 2 {
			_ = retries.Do(ctx, failing)
			_ = spender.Do(ctx, failing)
			_, _ = hedger.Do(ctx, func(context.Context) (int, error) { return 0, errDown })
			_ = circuit.Do(ctx, failing)
			_ = rate.Do(ctx, working)
			_ = slots.Do(ctx, func(ctx context.Context) error { return slots.Do(ctx, working) })
			_, _ = users.Get(ctx, 1)
		}
		time.Sleep(time.Second)
		var o overview
		s.get("/", &o)
		for _, p := range o.Policies {
			require.Positive(t, p.Calls, p.Path)
			require.Positive(t, p.Failed+p.Refused, p.Path)
			require.NotEqual(t, "ok", p.Tone, p.Path)
			require.LessOrEqual(t, p.Failed+p.Refused, p.Calls, p.Path)
		}
	})
}

func TestBreakerShowsItsStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{})
		s.get("/", nil)
		time.Sleep(9500 * time.Millisecond)
		for range 3 {
			_ = s.circuit.Do(t.Context(), failing)
		}
		time.Sleep(35 * time.Second)
		var p policyJSON
		s.get("/policy?kind=breaker&name=users", &p)
		require.Equal(t, "half_open", p.State)
		require.Equal(t, "closed", p.States[0].State)
		require.Equal(t, 10, p.States[0].Seconds)
		require.Equal(t, "open", p.States[1].State)
		require.InDelta(t, 31, p.States[1].Seconds, 3, "30 s and a jitter of a tenth")
		require.Equal(t, "half_open", p.States[2].State)
		require.Equal(t, p.Tick+1, p.States[0].Seconds+p.States[1].Seconds+p.States[2].Seconds)
	})
}

// sampling returns the number of sampler goroutines.
func sampling() int {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	return strings.Count(string(stacks), "resilience/console.(*sampler)")
}

// The first visitor sees a past outage: when it started, and its error.
func TestFirstVisitShowsHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{Show: console.Show{Errors: true}})
		time.Sleep(20*time.Minute - time.Second/2)
		for range 3 {
			_ = s.circuit.Do(t.Context(), failing)
		}
		_ = s.shards.Do(t.Context(), "a", failing)
		time.Sleep(5 * time.Minute)
		var p policyJSON
		s.get("/policy?kind=breaker&name=users", &p)
		var o overview
		s.get("/", &o)
		body := s.get("/", nil).Body.String()
		require.Equal(t, 2, strings.Count(body, `<span class="error" title="password=hunter2: connection refused">`),
			"the breaker and the shard")
		points := p.points(t, "breaker.calls", "failure")
		require.Len(t, points, 600)
		require.Equal(t, 3.0, points[299]+points[300], "five minutes ago")
		require.Equal(t, "closed", p.States[0].State)
		require.InDelta(t, 299, p.States[0].Seconds, 1)
		for _, c := range o.Policies {
			if c.Tone == "ok" {
				require.Nil(t, c.Since)
				continue
			}
			require.Equal(t, 5*time.Minute, time.Since(*c.Since).Round(time.Second), c.Path)
			require.Contains(t, []string{"for 4 min", "for 5 min"}, c.Words.Since)
		}
		require.Contains(t, body, ` title="since the console first saw this state">`+o.Policies[0].Words.Since)
		require.Contains(t, s.get("/policy?kind=breaker&name=users", nil).Body.String(),
			` title="since the console first saw this state">`+o.Policies[0].Words.Since)
	})
}

func TestPoliciesComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{})
		s.get("/", nil)
		late := breaker.New(breaker.Config{Name: "late"})
		s.reg.MustAdd(late)
		var p policyJSON
		require.Equal(t, http.StatusOK, s.get("/policy?kind=breaker&name=late", &p).Code, "before its first sample")
		require.Equal(t, "closed", p.State)
		s.reg.Remove(s.circuit)
		time.Sleep(1500 * time.Millisecond)
		var o overview
		s.get("/", &o)
		require.Len(t, o.Policies, 6)
		require.Equal(t, http.StatusNotFound, s.get("/policy?kind=breaker&name=users", nil).Code)
		body := s.get("/", nil).Body.String()
		require.Contains(t, body, "breaker/late")
		require.NotContains(t, body, "breaker/users")

		s.reg.Remove(late)
		s.reg.MustAdd(breaker.New(breaker.Config{Name: "late"})) // another breaker with the same name
		time.Sleep(time.Second)
		p = policyJSON{}
		s.get("/policy?kind=breaker&name=late", &p)
		require.Len(t, p.points(t, "breaker.calls", "success"), 1, "it is a new policy")
		s.reg.MustAdd(s.circuit) // again
		time.Sleep(time.Second)
		p = policyJSON{}
		s.get("/policy?kind=breaker&name=users", &p)
		require.Len(t, p.points(t, "breaker.calls", "success"), 1, "a policy that returns is new")
	})
}

func TestSecretsAreHiddenByDefault(t *testing.T) {
	for _, show := range []console.Show{{}, {Errors: true}, {Keys: true}} {
		s := newShop(t, console.Config{Show: show})
		for range 3 {
			_ = s.circuit.Do(t.Context(), failing)
		}
		_ = s.shards.Do(t.Context(), "tenant-of-ours", failing)
		var all strings.Builder
		for _, path := range []string{"/", "/policy?kind=breaker&name=users", "/policy?kind=breaker&name=shards"} {
			all.WriteString(s.get(path, nil).Body.String())
			all.WriteString(s.get(path, &json.RawMessage{}).Body.String())
		}
		require.Equal(t, show.Errors, strings.Contains(all.String(), "hunter2"), "%+v", show)
		require.Equal(t, show.Keys, strings.Contains(all.String(), "tenant-of-ours"), "%+v", show)
	}
}

func TestTextsAreNotMarkup(t *testing.T) {
	const evil = `<script>alert(1)</script>"'><img src=x>`
	s := newShop(t, console.Config{Show: console.Show{Errors: true, Keys: true}, Allow: allow, Name: evil})
	b := breaker.New(breaker.Config{Name: evil, ConsecutiveFailures: 1})
	s.reg.MustAdd(b)
	_ = b.Do(t.Context(), func(context.Context) error { return errors.New(evil) })
	_ = s.shards.Do(t.Context(), evil, failing)
	for _, path := range []string{"/", "/policy?" + url.Values{"kind": {"breaker"}, "name": {evil}}.Encode(),
		"/policy?kind=breaker&name=shards", "/" + url.PathEscape(evil),
		"/policy?done=" + url.QueryEscape(evil) + "&kind=breaker&name=users",
		"/policy?kind=" + url.QueryEscape(evil)} {
		body := s.get(path, nil).Body.String()
		require.NotContains(t, body, "<script>alert", path)
		require.NotContains(t, body, "<img src=x", path)
	}
	w := s.post("action", "apply", "policy", "breaker/users", "settings", evil)
	require.NotContains(t, w.Body.String(), "<script>alert")
	require.Contains(t, w.Body.String(), "&lt;script&gt;alert")
}

func TestPagesAreSecured(t *testing.T) {
	s := newShop(t, console.Config{})
	for _, path := range []string{"/", "/console.js", "/nothing", "/policy"} {
		h := s.get(path, nil).Header()
		require.Contains(t, h.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self';")
		require.Contains(t, h.Get("Content-Security-Policy"), "frame-ancestors 'none'")
		require.NotContains(t, h.Get("Content-Security-Policy"), "unsafe")
		require.Equal(t, "DENY", h.Get("X-Frame-Options"))
		require.Equal(t, "nosniff", h.Get("X-Content-Type-Options"))
		require.Equal(t, "same-origin", h.Get("Referrer-Policy"))
	}
	require.Equal(t, "text/javascript; charset=utf-8", s.get("/console.js", nil).Header().Get("Content-Type"))
	require.Equal(t, "no-cache", s.get("/console.js", nil).Header().Get("Cache-Control"), "the script fits the page")
	require.Equal(t, "no-store", s.get("/", nil).Header().Get("Cache-Control"))
	require.Equal(t, http.StatusNotFound, s.get("/layout.html", nil).Code)
	for _, path := range []string{"/", "/policy?kind=breaker&name=users"} {
		body := s.get(path, nil).Body.String()
		require.NotContains(t, body, " style=")
		require.NotContains(t, body, " onclick=")
		require.NotContains(t, body, `href="/`, "links are relative")
		require.NotContains(t, body, `src="/`)
		require.NotContains(t, body, `action="/`)
		require.NotContains(t, body, "http://", "nothing comes from elsewhere")
		require.NotContains(t, body, "https://")
	}
	r := httptest.NewRequest("PUT", "/", nil)
	w := httptest.NewRecorder()
	s.page.ServeHTTP(w, r)
	require.Equal(t, http.StatusMethodNotAllowed, w.Code)
}

func TestPageWorksUnderAnyPrefix(t *testing.T) {
	s := newShop(t, console.Config{})
	mux := http.NewServeMux()
	mux.Handle("/a/b/", http.StripPrefix("/a/b", s.page))
	mux.Handle("/exact", http.StripPrefix("/exact", s.page))
	server := httptest.NewServer(mux)
	defer server.Close()
	for _, path := range []string{"/a/b/", "/a/b", "/a/b/console.css", "/a/b/policy?kind=breaker&name=users"} {
		res, err := http.Get(server.URL + path)
		require.NoError(t, err)
		_ = res.Body.Close()
		require.Equal(t, http.StatusOK, res.StatusCode, path)
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	res, err := client.Get(server.URL + "/exact")
	require.NoError(t, err)
	_ = res.Body.Close()
	require.Equal(t, "exact/", res.Header.Get("Location"))
	require.Equal(t, http.StatusMovedPermanently, res.StatusCode)
}

func TestActionsNeedAllow(t *testing.T) {
	s := newShop(t, console.Config{})
	w := s.post("action", "trip", "policy", "breaker/users")
	require.Equal(t, http.StatusForbidden, w.Code)
	require.Equal(t, breaker.Closed, s.circuit.State())
	require.NotContains(t, s.get("/policy?kind=breaker&name=users", nil).Body.String(), "<button")
	var p policyJSON
	s.get("/policy?kind=breaker&name=users", &p)
	require.Empty(t, p.Actions)
}

// By default, nginx sends the name of its upstream as Host. Over plain HTTP, a browser sends no Sec-Fetch-Site.
func TestErrorExplainsChangedHost(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow})
	r := httptest.NewRequest("POST", "http://upstream/act", strings.NewReader("action=trip&policy=breaker/users"))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Origin", "http://ops.example")
	w := httptest.NewRecorder()
	s.page.ServeHTTP(w, r)
	require.Equal(t, http.StatusForbidden, w.Code)
	require.Contains(t, w.Body.String(), "page is from ops.example (Origin), but the request is for upstream (Host)")
	require.Contains(t, w.Body.String(), "proxy_set_header Host $http_host")
	r.Host = "ops.example"
	r.Body = io.NopCloser(strings.NewReader("action=trip&policy=breaker/users"))
	w = httptest.NewRecorder()
	s.page.ServeHTTP(w, r)
	require.Equal(t, http.StatusSeeOther, w.Code)
}

func TestActionsCallAllowAndAudit(t *testing.T) {
	var audit []string
	var refused error
	s := newShop(t, console.Config{
		Show:  console.Show{Errors: true, Keys: true},
		Allow: func(*http.Request, console.Operation) error { return refused },
		Audit: func(_ context.Context, op console.Operation, err error) {
			audit = append(audit, fmt.Sprint(op.LogValue(), " ", err))
		},
	})
	w := s.post("action", "trip", "policy", "breaker/users", "for", "1h", "note", "maintenance")
	require.Equal(t, http.StatusSeeOther, w.Code)
	require.Equal(t, "policy?done=trip&kind=breaker&name=users", w.Header().Get("Location"))
	require.Equal(t, breaker.Open, s.circuit.State())
	require.Greater(t, s.circuit.Stats().OpenLeft, 50*time.Minute)
	require.Contains(t, s.get("/policy?kind=breaker&name=users&done=trip", nil).Body.String(), "The breaker was tripped.")
	require.Contains(t, s.get("/policy?kind=breaker&name=users", nil).Body.String(),
		"opened by an operator in the console: maintenance")

	for _, step := range []struct {
		do   string
		want breaker.State
	}{{"reset", breaker.Closed}, {"force_open", breaker.ForcedOpen}, {"enable", breaker.Closed},
		{"disable", breaker.Disabled}} {
		require.Equal(t, http.StatusSeeOther, s.post("action", step.do, "policy", "breaker/users").Code, step.do)
		require.Equal(t, step.want, s.circuit.State(), step.do)
	}
	require.Equal(t, http.StatusUnprocessableEntity, s.post("action", "trip", "policy", "breaker/users").Code,
		"breaker is disabled")
	s.circuit.Enable()
	s.circuit.ForceOpen(errDown)
	require.Equal(t, http.StatusUnprocessableEntity, s.post("action", "reset", "policy", "breaker/users").Code,
		"breaker is forced open")
	s.circuit.Disable()

	_ = s.shards.Do(t.Context(), "a", working)
	require.Equal(t, http.StatusSeeOther, s.post("action", "trip", "policy", "breaker/shards", "key", "a").Code)
	require.ErrorIs(t, s.shards.Do(t.Context(), "a", working), breaker.ErrOpen)
	require.Equal(t, http.StatusUnprocessableEntity, s.post("action", "trip", "policy", "breaker/shards", "key", "b").Code)

	refused = errors.New("not on a Sunday")
	w = s.post("action", "enable", "policy", "breaker/users")
	require.Equal(t, http.StatusForbidden, w.Code)
	require.Contains(t, w.Body.String(), "not on a Sunday")
	require.Equal(t, breaker.Disabled, s.circuit.State())

	require.Len(t, audit, 10)
	require.Equal(t, "[action=trip policy=breaker/users for=1h0m0s note=maintenance] <nil>", audit[0])
	require.Equal(t, "[action=enable policy=breaker/users] not on a Sunday", audit[9])
}

// The client may disconnect before Audit is called.
func TestAuditOutlivesTheRequest(t *testing.T) {
	type user struct{}
	ctx, leave := context.WithCancel(context.WithValue(t.Context(), user{}, "ann"))
	audited := false
	s := newShop(t, console.Config{
		Allow: func(*http.Request, console.Operation) error { leave(); return nil },
		Audit: func(ctx context.Context, _ console.Operation, err error) {
			require.NoError(t, err)
			require.NoError(t, ctx.Err())
			require.Equal(t, "ann", ctx.Value(user{}))
			audited = true
		},
	})
	r := httptest.NewRequestWithContext(ctx, "POST", "/act", strings.NewReader("action=trip&policy=breaker/users"))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	s.page.ServeHTTP(httptest.NewRecorder(), r)
	require.True(t, audited)
}

// Two of 300 shards fail, and both have few calls.
func TestBrokenShardIsListedFirst(t *testing.T) {
	s := newShop(t, console.Config{Show: console.Show{Errors: true, Keys: true}, Allow: allow})
	for i := range 300 {
		for range 2 + i%7 {
			_ = s.shards.Do(t.Context(), fmt.Sprintf("shard-%03d", i), working)
		}
	}
	for _, key := range []string{"shard-200", "shard-100"} {
		_ = s.shards.Do(t.Context(), key, failing)
	}
	var p policyJSON
	s.get("/policy?kind=breaker&name=shards", &p)
	require.Len(t, p.Members, 20)
	for i, key := range []string{"shard-200", "shard-100"} {
		require.Equal(t, key, p.Members[i].Key)
		require.Equal(t, "open", p.Members[i].State)
		require.Equal(t, errDown.Error(), p.Members[i].Error)
	}
	require.Equal(t, "closed", p.Members[2].State)
	require.Empty(t, p.Members[2].Error)
	require.Greater(t, p.Members[2].Calls, p.Members[0].Calls)

	p = policyJSON{}
	s.get("/policy?kind=breaker&name=shards&key=shard-033", &p)
	require.Len(t, p.Members, 1)
	require.Equal(t, "shard-033", p.Members[0].Key)
	require.Equal(t, []string{"trip", "reset", "force_open", "disable", "enable", "apply"}, p.Actions)
	body := s.get("/policy?kind=breaker&name=shards&key=shard-999", nil).Body.String()
	require.Contains(t, body, "There is no member with the key shard-999.")
	require.Contains(t, body, `<input name="key" value="shard-999" autocomplete="off" spellcheck="false" required>`)

	w := s.post("action", "reset", "policy", "breaker/shards", "key", "shard-200")
	require.Equal(t, "policy?done=reset&key=shard-200&kind=breaker&name=shards", w.Header().Get("Location"))
	w = s.post("action", "force_open", "policy", "breaker/shards", "key", "shard-034")
	require.Equal(t, http.StatusSeeOther, w.Code)
	p = policyJSON{}
	s.get("/policy?kind=breaker&name=shards", &p)
	require.Equal(t, "shard-034", p.Members[0].Key, "the busier one of two failing shards")
	require.Equal(t, "shard-100", p.Members[1].Key)
	w = s.post("action", "trip", "policy", "breaker/shards", "key", "")
	require.Equal(t, http.StatusUnprocessableEntity, w.Code)
}

// If several keys have the same text, an action must not affect a key that the operator did not mean.
func TestActionOnAmbiguousKeyIsRefused(t *testing.T) {
	type host struct{ Zone, Name string }
	hosts := resilience.NewGroup(func(host) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "hosts", ConsecutiveFailures: 1})
	}, resilience.GroupConfig{})
	s := pageOf(t, console.Config{Allow: allow}, hosts)
	broken, healthy := host{"eu a", "b"}, host{"eu", "a b"}
	_ = hosts.Do(t.Context(), broken, failing)
	_ = hosts.Do(t.Context(), healthy, working)
	for action, state := range map[string]breaker.State{"reset": breaker.Open, "trip": breaker.Closed} {
		w := s.postJSON("action=" + action + "&policy=breaker/hosts&key={eu+a+b}")
		require.Equal(t, http.StatusUnprocessableEntity, w.Code)
		require.Contains(t, w.Body.String(), `breaker/hosts has several breakers for the key`)
		b, _ := hosts.Get(map[string]host{"reset": broken, "trip": healthy}[action])
		require.Equal(t, state, b.State())
	}
}

// With hidden keys, a page does not reveal whether a key exists.
func TestHiddenKeyCannotBeFound(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow})
	_ = s.shards.Do(t.Context(), "secret", working)
	for _, key := range []string{"secret", "other"} {
		var p policyJSON
		s.get("/policy?kind=breaker&name=shards&key="+key, &p)
		require.NotEmpty(t, p.Members)
		for _, m := range p.Members {
			require.Equal(t, "hidden", m.Key)
		}
	}
	require.NotContains(t, s.get("/policy?kind=breaker&name=shards", nil).Body.String(), "Find a key")
}

func TestRiskyActionsNeedConfirmation(t *testing.T) {
	s := newShop(t, console.Config{Show: console.Show{Keys: true}, Allow: allow})
	_ = s.shards.Do(t.Context(), "eu", working)
	for do, want := range map[string]string{"force_open": "Force breaker/users open?",
		"disable": "Disable breaker/users?"} {
		w := s.post("action", do, "policy", "breaker/users", "note", "maintenance", "sure", "")
		require.Equal(t, http.StatusOK, w.Code)
		require.Contains(t, w.Body.String(), want)
		require.Contains(t, w.Body.String(), `<input type="hidden" name="note" value="maintenance">`)
		require.Contains(t, w.Body.String(), `href="policy?kind=breaker&amp;name=users"`)
		require.Equal(t, breaker.Closed, s.circuit.State())
	}
	require.Contains(t, s.post("action", "disable", "policy", "breaker/shards", "key", "eu", "sure",
		"").Body.String(), "Disable the key eu of breaker/shards?")
	require.Equal(t, http.StatusSeeOther, s.post("action", "trip", "policy", "breaker/users", "sure", "").Code)
}

// An ignored field could widen an operation.
func TestUnknownFieldsAreRejected(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow})
	for _, c := range []struct {
		form []string
		want string
	}{
		{[]string{"action", "force_open", "policy", "breaker/users", "key", "mine"},
			"key: breaker/users is a single breaker without keys"},
		{[]string{"action", "invalidate_all", "policy", "cache/users", "key", "1"}, "key: is not a field of invalidate_all"},
		{[]string{"action", "trip", "policy", "breaker/users", "status", "stuck"}, "status: is not a field of trip"},
		{[]string{"action", "apply", "policy", "bulkhead/users", "key", "a", "settings", `{"Limit": 5}`},
			"key: is not a field of apply"},
		{[]string{"action", "abandon", "policy", "saga/worker", "id", "1", "status", "stuck", "note", "x"},
			"status: is not a field of abandon"},
	} {
		w := s.post(c.form...)
		require.GreaterOrEqual(t, w.Code, 400, c.want)
		require.Contains(t, w.Body.String(), c.want)
	}
	require.Equal(t, breaker.Closed, s.circuit.State())
	require.Equal(t, 4, s.slots.Config().Limit)
}

// A preview reveals settings, so it needs permission as an action does.
func TestPreviewCallsAllowAndAudit(t *testing.T) {
	var audit []string
	var refused error
	s := newShop(t, console.Config{
		Allow: func(_ *http.Request, op console.Operation) error { return refused },
		Audit: func(_ context.Context, op console.Operation, err error) {
			audit = append(audit, fmt.Sprint(op.Action, " ", string(op.Settings), " ", err))
		},
	})
	form := []string{"action", "apply", "policy", "bulkhead/users", "preview", "1", "settings", `{"Limit": 9}`}
	require.Equal(t, http.StatusOK, s.post(form...).Code)
	refused = errors.New("not on a Sunday")
	w := s.post(form...)
	require.Equal(t, http.StatusForbidden, w.Code)
	require.NotContains(t, w.Body.String(), "<del>")
	require.Equal(t, []string{`preview {"Limit": 9} <nil>`, `preview {"Limit": 9} not on a Sunday`}, audit)
	require.Equal(t, 4, s.slots.Config().Limit)
}

func TestSettingsChangeWithADryRun(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow})
	body := s.get("/policy?kind=bulkhead&name=users", nil).Body.String()
	require.Contains(t, html.UnescapeString(body), "\"Limit\": 4", "the settings as they are")
	form := []string{"action", "apply", "policy", "bulkhead/users", "settings", `{"Limit": 9}`}
	w := s.post(append(form, "preview", "1", "note", "Black Friday")...)
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, 1, strings.Count(w.Body.String(), `value="Black Friday"`), "Apply needs the note again")
	require.Contains(t, html.UnescapeString(w.Body.String()), `spellcheck="false">{"Limit": 9}</textarea>`)
	require.Contains(t, w.Body.String(), "<td>bulkhead/users.Limit</td><td><del>4</del></td><td><ins>9</ins></td>")
	require.Equal(t, 4, s.slots.Config().Limit)
	require.Contains(t, s.post(form...).Header().Get("Location"), "done=apply")
	require.Equal(t, 9, s.slots.Config().Limit)
	require.Equal(t, "policy?kind=bulkhead&name=users", s.post(form...).Header().Get("Location"),
		"no settings were changed")

	// An outdated page changes only the fields that were entered.
	require.NoError(t, s.slots.Update(func(c *bulkhead.Config) { c.MaxWait = time.Minute }))
	require.Equal(t, http.StatusSeeOther, s.post(form...).Code)
	require.Equal(t, time.Minute, s.slots.Config().MaxWait)

	for settings, want := range map[string]string{
		`{"Limit": -1}`: "Limit", `{"Limit": "x"}`: "bulkhead/users: Limit: expected type",
		`{"Limit": many}`: "settings: is not JSON",
		`{"Limti": 5}`:    "Limti: bulkhead.Config has no such field", `[]`: "must be an object of settings",
	} {
		w = s.post("action", "apply", "policy", "bulkhead/users", "settings", settings)
		require.GreaterOrEqual(t, w.Code, 400, settings)
		require.Contains(t, html.UnescapeString(w.Body.String()), want)
		require.Contains(t, html.UnescapeString(w.Body.String()), settings+"</textarea>", "the operator can correct it")
		require.Equal(t, 9, s.slots.Config().Limit)
	}
	w = s.post("action", "apply", "policy", "bulkhead/users", "settings", `{"Limit": 5, "MaxWait": "2s", "Queue": 3}`)
	require.Equal(t, http.StatusSeeOther, w.Code, w.Body.String())
	require.Equal(t, 2*time.Second, s.slots.Config().MaxWait)
}

func TestCacheKeysOfAnyType(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow})
	load := func(id int) { _, err := s.users.Get(t.Context(), id); require.NoError(t, err) }
	load(1)
	load(2)
	load(3)
	require.Equal(t, http.StatusSeeOther, s.post("action", "invalidate", "policy", "cache/users", "key", "1").Code)
	_, there := s.users.Peek(1)
	require.False(t, there)
	_, there = s.users.Peek(2)
	require.True(t, there)
	w := s.post("action", "invalidate", "policy", "cache/users", "key", "one")
	require.Equal(t, http.StatusUnprocessableEntity, w.Code)
	require.Contains(t, w.Body.String(), "must be JSON of type int")
	require.Equal(t, http.StatusSeeOther, s.post("action", "expire", "policy", "cache/users", "key", "2").Code)
	require.Contains(t, s.post("action", "invalidate_all", "policy", "cache/users", "sure", "").Body.String(),
		"Invalidate all keys of cache/users?")
	_, there = s.users.Peek(3)
	require.True(t, there)
	require.Equal(t, http.StatusSeeOther, s.post("action", "invalidate_all", "policy", "cache/users").Code)
	_, there = s.users.Peek(3)
	require.False(t, there)
	require.Equal(t, http.StatusUnprocessableEntity, s.post("action", "invalidate_all", "policy", "breaker/users").Code)
}

func TestScriptsGetJSON(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow})
	ask := func(form string) (int, string) {
		w := s.postJSON(form)
		return w.Code, strings.TrimSpace(w.Body.String())
	}
	code, body := ask("action=trip&policy=breaker/users")
	require.Equal(t, 200, code)
	require.JSONEq(t, `{"done": true}`, body)
	code, body = ask("action=apply&policy=bulkhead/users&preview=1&settings=" + url.QueryEscape(`{"Limit": 7}`))
	require.Equal(t, 200, code)
	require.JSONEq(t, `{"done": false, "changes": [{"path": "bulkhead/users.Limit", "from": "4", "to": "7"}]}`, body)
	code, body = ask("action=apply&policy=bulkhead/users&settings=" + url.QueryEscape(`{"Limit": 7}`))
	require.Equal(t, 200, code)
	require.Contains(t, body, `"changes":[`)
	code, body = ask("action=dance&policy=breaker/users")
	require.Equal(t, 400, code)
	require.Contains(t, body, `"error":"there is no action \"dance\""`)
}

// TestLinksResolve follows every link of every page.
func TestLinksResolve(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow})
	s.reg.MustAdd(breaker.New(breaker.Config{Name: "a & b = c?"}))
	seen, open := map[string]bool{}, []string{"./"}
	for len(open) > 0 {
		at := open[0]
		open = open[1:]
		if seen[at] {
			continue
		}
		seen[at] = true
		w := s.get("/"+strings.TrimPrefix(at, "./"), nil)
		require.Equal(t, http.StatusOK, w.Code, at)
		for _, m := range regexp.MustCompile(`href="([^"#][^"]*)"`).FindAllStringSubmatch(w.Body.String(), -1) {
			open = append(open, html.UnescapeString(m[1]))
		}
	}
	require.Len(t, seen, 1+7+2, "the overview, the policies, a stylesheet and an icon")
}

// A meter is a policy of a third party.
type meter struct {
	mu      sync.Mutex
	metrics []policy.Metric
	slow    time.Duration // duration of the next call to Metrics
}

func (m *meter) Describe() policy.Description {
	return policy.Description{Kind: "meter", Name: "water", Metrics: m.read}
}

func (m *meter) read() []policy.Metric {
	m.mu.Lock()
	metrics, d := slices.Clone(m.metrics), m.slow
	m.slow = 0
	m.mu.Unlock()
	time.Sleep(d)
	return metrics
}

func (m *meter) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

func count(name string, value float64) policy.Metric {
	return policy.Metric{Name: name, Counter: true, Value: value}
}

func TestThirdPartyPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &meter{metrics: []policy.Metric{count("meter.calls", 100), count("b", 1)}}
		s := pageOf(t, console.Config{}, m)
		points := func(name string) []float64 {
			var p policyJSON
			s.get("/policy?kind=meter&name=water", &p)
			return p.points(t, name, "")
		}
		require.Equal(t, []float64{0}, points("meter.calls"), "the first sample is no growth")
		time.Sleep(500 * time.Millisecond)

		m.set(func() {
			m.metrics = []policy.Metric{count("c", 7), count("b", 3), count("meter.calls", 110), count("b2", 0)}
		})
		time.Sleep(time.Second)
		require.Equal(t, []float64{0, 10}, points("meter.calls"), "at another index")
		require.Equal(t, []float64{0, 2}, points("b"))
		require.Equal(t, []float64{0}, points("c"), "its first sample")

		var all policyJSON
		s.get("/policy?kind=meter&name=water", &all)
		require.Len(t, all.Metrics, 4)
		m.set(func() { m.metrics[2].Value, m.slow = 150, 4200*time.Millisecond })
		time.Sleep(3 * time.Second)
		m.set(func() { m.metrics[2].Value = 190 })
		time.Sleep(3 * time.Second)
		require.Equal(t, []float64{0, 10, 40, 10, 10, 10, 10, 0}, points("meter.calls"),
			"missed samples have the mean")

		s.get("/policy?kind=meter&name=water", &all)
		require.Len(t, all.Metrics, 4, "a later metric is still known")
	})
}

// A metric that a policy no longer reports is removed with its last sample.
func TestRemovedMetricsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &meter{metrics: []policy.Metric{count("meter.calls", 0)}}
		s := pageOf(t, console.Config{}, m)
		look := func() (p policyJSON) {
			s.get("/policy?kind=meter&name=water", &p)
			return p
		}
		look()
		time.Sleep(500 * time.Millisecond)
		for i := range 1000 {
			m.set(func() {
				m.metrics = []policy.Metric{{Name: fmt.Sprintf("flow{at=%d}", i), Value: 1}, count("meter.calls", float64(i))}
			})
			time.Sleep(time.Second)
		}
		require.Equal(t, 601, len(look().Metrics))
		m.set(func() { m.metrics = m.metrics[1:] })
		time.Sleep(10 * time.Minute)
		require.Equal(t, 1, len(look().Metrics))
		m.set(func() { m.metrics = append(m.metrics, policy.Metric{Name: "flow{at=7}", Value: 1}) })
		time.Sleep(time.Second)
		require.Equal(t, 2, len(look().Metrics), "a metric that returns is new")
		m.set(func() { m.metrics[0].Value += 20 })
		time.Sleep(time.Second)
		var o overview
		s.get("/", &o)
		require.Equal(t, 2.0, o.Policies[0].Calls, "its calls are known")
		require.Equal(t, 20.0, look().points(t, "meter.calls", "")[599])
	})
}

// This test is for the race detector.
func TestConsoleIsSafeForConcurrentUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{Allow: allow, Audit: func(context.Context, console.Operation, error) {}})
		var work sync.WaitGroup
		often := func(f func(i int)) {
			work.Go(func() {
				for i := range 50 {
					f(i)
					time.Sleep(130 * time.Millisecond)
				}
			})
		}
		for _, path := range []string{"/", "/policy?kind=breaker&name=users", "/policy?kind=breaker&name=shards",
			"/policy?kind=cache&name=users"} {
			often(func(int) { s.get(path, nil) })
			often(func(int) { s.get(path, &json.RawMessage{}) })
		}
		often(func(i int) {
			s.post("action", []string{"trip", "reset", "disable", "enable"}[i%4], "policy", "breaker/users")
		})
		often(func(i int) {
			s.post("action", "apply", "policy", "bulkhead/users", "settings", fmt.Sprintf(`{"Limit": %d}`, 1+i))
		})
		often(func(i int) {
			p := breaker.New(breaker.Config{Name: fmt.Sprint("passing-", i)})
			s.reg.MustAdd(p)
			time.Sleep(time.Second)
			s.reg.Remove(p)
		})
		often(func(i int) {
			_ = s.circuit.Do(t.Context(), failing)
			_ = s.shards.Do(t.Context(), fmt.Sprint(i), failing)
			_ = s.slots.Do(t.Context(), working)
		})
		work.Wait()
		s.page.Close()
		require.Zero(t, sampling())
	})
}

// While a sample is taken, a page shows the complete previous one. No chart ends at zero.
func TestSamplesAppearAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{})
		m := &meter{metrics: []policy.Metric{count("meter.calls", 1)}}
		limits := throttle.New(throttle.Config{Name: "after", Rate: 1000}) // sampled after the meter
		s.reg.MustAdd(m, limits)
		var p policyJSON
		s.get("/policy?kind=throttle&name=after", &p)
		for range 30 {
			m.set(func() { m.slow = 700 * time.Millisecond })
			for range 10 {
				time.Sleep(100 * time.Millisecond)
				_ = limits.Do(t.Context(), working)
				p = policyJSON{}
				s.get("/policy?kind=throttle&name=after", &p)
				points := p.points(t, "throttle.calls", "admitted")
				if len(points) > 3 {
					require.NotContains(t, points[2:], 0.0)
				}
			}
		}
	})
}

// A counter falls if its policy was replaced. That is not a negative rate. A policy needs attention if 5% of its calls
// fail.
func TestRatesOfAPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := func(ok, failed float64) []policy.Metric {
			outcome := func(o string, v float64) policy.Metric {
				return policy.Metric{Name: "meter.calls{outcome=" + o + "}", Counter: true, Value: v}
			}
			return []policy.Metric{outcome("success", ok), outcome("failed", failed)}
		}
		m := &meter{metrics: calls(1000, 0)}
		s := pageOf(t, console.Config{}, m)
		var p policyJSON
		s.get("/policy?kind=meter&name=water", &p)
		time.Sleep(1500 * time.Millisecond)
		m.set(func() { m.metrics = calls(10, 0) })
		time.Sleep(time.Second)
		p = policyJSON{}
		s.get("/policy?kind=meter&name=water", &p)
		require.Equal(t, []float64{0, 0, 0}, p.Metrics[0].Points)
		for _, c := range []struct {
			ok, failed float64
			want       string
		}{{96, 4, "healthy"}, {95, 5, "failing"}} {
			time.Sleep(time.Minute)
			m.set(func() {
				was := m.metrics
				m.metrics = calls(was[0].Value+c.ok, was[1].Value+c.failed)
			})
			time.Sleep(2 * time.Second)
			p = policyJSON{}
			s.get("/policy?kind=meter&name=water", &p)
			require.Equal(t, c.want, p.State)
		}
	})
}

// An open page is requested every second.
func TestPagesAreCompressed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{})
		time.Sleep(10*time.Minute + time.Second/2)
		for _, accept := range []string{"text/html", "application/json"} {
			for _, path := range []string{"/", "/policy?kind=breaker&name=users"} {
				r := httptest.NewRequest("GET", path, nil)
				r.Header.Set("Accept", accept)
				r.Header.Set("Accept-Encoding", "gzip, deflate")
				w := httptest.NewRecorder()
				s.page.ServeHTTP(w, r)
				require.Equal(t, "gzip", w.Header().Get("Content-Encoding"))
				require.Equal(t, fmt.Sprint(w.Body.Len()), w.Header().Get("Content-Length"))
				sent := w.Body.Len()
				z, err := gzip.NewReader(w.Body)
				require.NoError(t, err)
				whole, err := io.ReadAll(z)
				require.NoError(t, err)
				r.Header.Del("Accept-Encoding")
				w = httptest.NewRecorder()
				s.page.ServeHTTP(w, r)
				require.Empty(t, w.Header().Get("Content-Encoding"))
				require.Len(t, whole, w.Body.Len())
				require.Less(t, sent, len(whole)/3)
			}
		}
	})
}

func TestPagesHaveTheirHeaders(t *testing.T) {
	s := newShop(t, console.Config{Name: "shop"})
	ask := func(method, path, accept string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, path, nil)
		r.Header.Set("Accept", accept)
		w := httptest.NewRecorder()
		s.page.ServeHTTP(w, r)
		require.Equal(t, "same-origin", w.Header().Get("Cross-Origin-Opener-Policy"))
		require.Equal(t, "same-origin", w.Header().Get("Cross-Origin-Resource-Policy"))
		return w
	}
	for accept, kind := range map[string]string{"text/html": "text/html; charset=utf-8",
		"application/json": "application/json"} {
		w := ask("GET", "/policy?kind=breaker&name=users", accept)
		require.Equal(t, []string{kind, "Accept, Accept-Encoding", fmt.Sprint(w.Body.Len())},
			[]string{w.Header().Get("Content-Type"), w.Header().Get("Vary"), w.Header().Get("Content-Length")})
		require.True(t, strings.HasSuffix(w.Body.String(), "\n"))
		w = ask("HEAD", "/", accept)
		require.Equal(t, http.StatusOK, w.Code)
		require.Zero(t, w.Body.Len())
	}
	require.Equal(t, "GET, HEAD", ask("PUT", "/", "").Header().Get("Allow"))
	act := ask("GET", "/act", "")
	require.Equal(t, []any{http.StatusMethodNotAllowed, "POST"}, []any{act.Code, act.Header().Get("Allow")})
	require.Equal(t, http.StatusServiceUnavailable, func() int { s.page.Close(); return ask("GET", "/", "").Code }())

	host, _ := os.Hostname()
	for _, name := range []string{"shop", ""} {
		var o struct {
			Process struct {
				Name, Host string
				PID        int
			}
		}
		newShop(t, console.Config{Name: name}).get("/", &o)
		require.Equal(t, []any{cmp.Or(name, filepath.Base(os.Args[0])), host, os.Getpid()},
			[]any{o.Process.Name, o.Process.Host, o.Process.PID})
	}
	for _, path := range []string{"/", "/policy?kind=breaker&name=users"} {
		require.Contains(t, newShop(t, console.Config{}).get(path, nil).Body.String(), `data-refresh="1"`)
	}
	s.reg.MustAdd(saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker"})) // there are policies after it
	require.Contains(t, newPage(t, s.reg, console.Config{}).get("/", nil).Body.String(), `<a href="sagas">`)
}

func TestInvalidPosts(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow})
	post := func(form string, header ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequest("POST", "http://upstream/act", strings.NewReader(form))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		s.page.ServeHTTP(w, r)
		return w
	}
	require.Equal(t, http.StatusBadRequest, post("action=reset&policy=breaker/users&note="+strings.Repeat("x",
		1<<20)).Code, "too large")
	require.Equal(t, http.StatusBadRequest, post("action=%zz").Code)
	require.Equal(t, http.StatusBadRequest, post("action=trip&policy=breaker/users&for=-5s").Code, "not OpenFor")
	require.Equal(t, http.StatusSeeOther, post("action=reset&policy=breaker/users&note="+strings.Repeat("x", 1<<19)).Code)
	for _, origin := range []string{"null", "http://[", "", "http://evil.example"} {
		header := []string{"Origin", origin}
		if origin == "" || strings.Contains(origin, "evil") {
			header = append(header, "Sec-Fetch-Site", "cross-site") // which no proxy changes
		}
		w := post("action=trip&policy=breaker/users", header...)
		require.Equal(t, http.StatusForbidden, w.Code, origin)
		require.NotContains(t, w.Body.String(), "proxy", origin)
	}
	require.Equal(t, breaker.Closed, s.circuit.State())
}

// A form may have empty fields, and fields of its other buttons.
func TestUnusedFieldsAreIgnored(t *testing.T) {
	s := newShop(t, console.Config{Allow: allow, Show: console.Show{Keys: true}})
	rooms := resilience.NewGroup(func(string) *bulkhead.Bulkhead {
		return bulkhead.New(bulkhead.Config{Name: "rooms",
			Limit: 4})
	}, resilience.GroupConfig{})
	_ = rooms.Do(t.Context(), "a", working)
	s.reg.MustAdd(rooms, hedge.New[int](hedge.Config{Name: "users", Delay: time.Second}))
	_, err := s.users.Get(t.Context(), 1)
	require.NoError(t, err)
	for _, c := range []struct{ form, want string }{
		{"action=reset&policy=breaker/users&for=nonsense&preview=1", "policy?done=reset&kind=breaker&name=users"},
		{"action=trip&policy=breaker/users&for=1h&preview=1&key=&step=x", "policy?done=trip&kind=breaker&name=users"},
		{"action=invalidate&policy=cache/users&key=1", "policy?done=invalidate&kind=cache&name=users"},
		{"action=invalidate_all&policy=cache/users&key=", "policy?done=invalidate_all&kind=cache&name=users"},
		{"action=trip&policy=breaker/users&for=x", "for: is \"x\": must be a duration such as 30s"},
		{"action=trip&policy=bulkhead/rooms&key=a", "bulkhead/rooms is not a breaker"},
		{"action=trip&policy=breaker/shards&key=b", "breaker/shards has no breaker for the key \"b\""},
		{"action=retry&policy=breaker/users&id=1&note=x", "breaker/users has no sagas"},
		{"action=apply&preview=1&policy=bulkhead/users&settings={\"Limit\":4}", "nothing would change"},
		{"action=apply&preview=1&policy=bulkhead/users&settings={}", "nothing would change"},
		{"action=apply&preview=1&policy=bulkhead/users&settings={\"Limit\":-1}", "Limit is -1"},
		{"action=apply&policy=bulkhead/users&settings={", "settings: is not JSON"},
		{"action=reset&policy=breaker/unknown", "there is no policy breaker/unknown"},
	} {
		var answer struct {
			Done  bool
			Error string
		}
		form, err := url.ParseQuery(c.form)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(s.postJSON(c.form).Body.Bytes(), &answer))
		var pairs []string
		for key := range form {
			pairs = append(pairs, key, form.Get(key))
		}
		w := s.post(pairs...)
		if answer.Done {
			require.Equal(t, []any{http.StatusSeeOther, c.want}, []any{w.Code, w.Header().Get("Location")}, c.form)
			continue
		}
		require.Contains(t, answer.Error, c.want, c.form)
		require.GreaterOrEqual(t, w.Code, 400, c.form)
		require.Contains(t, html.UnescapeString(w.Body.String()), c.want, c.form)
	}
	body := s.post("action", "trip", "policy", "breaker/users", "for", "x", "note", "not again").Body.String()
	require.Equal(t, 1, strings.Count(body, `value="not again"`), "only in its own form")
	for path, want := range map[string][]string{
		"kind=breaker&name=users":  {"trip", "reset", "force_open", "disable", "enable", "apply"},
		"kind=bulkhead&name=users": {"apply"},
		"kind=cache&name=users":    {"invalidate", "expire", "invalidate_all", "apply"},
		"kind=hedge&name=users":    nil, // whose settings cannot change
	} {
		var p policyJSON
		s.get("/policy?"+path, &p)
		require.NotEmpty(t, p.Settings, path)
		require.Equal(t, want, p.Actions, path)
		body := s.get("/policy?"+path, nil).Body.String()
		for _, action := range []string{"trip", "invalidate", "apply"} {
			require.Equal(t, slices.Contains(want, action), strings.Contains(body, `value="`+action+`"`), action)
		}
	}
}

// A fake is a third party's policy with the method names of a cache, but other types.
type fake struct{ kind }

func (fake) InvalidateAll(context.Context) error         { return nil }
func (fake) Invalidate(context.Context, ...string) error { return nil }
func (fake) Expire(context.Context, string) error        { return nil }

type otherFake struct{ kind }

func (otherFake) InvalidateAll(context.Context) error     { return nil }
func (otherFake) Expire(context.Context, ...string) error { return nil }

func TestOtherMethodsMakeNoCache(t *testing.T) {
	s := pageOf(t, console.Config{Allow: allow}, fake{"a"}, otherFake{"b"})
	for _, kind := range []string{"a", "b"} {
		var p policyJSON
		s.get("/policy?kind="+kind+"&name=users", &p)
		require.Empty(t, p.Actions)
		require.Contains(t, s.postJSON("action=expire&key=x&policy="+kind+"/users").Body.String(),
			kind+"/users is not a cache")
	}
}

func TestUnhealthySince(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{})
		since := func() time.Duration {
			time.Sleep(3 * time.Second)
			var p struct{ Since *time.Time }
			s.get("/policy?kind=breaker&name=users", &p)
			if p.Since == nil {
				return -1
			}
			return time.Since(*p.Since).Round(time.Second)
		}
		s.circuit.ForceOpen(errDown)
		s.get("/", nil)
		time.Sleep(time.Second / 2)
		require.Equal(t, 3*time.Second, since().Truncate(3*time.Second))
		s.circuit.Enable()
		require.EqualValues(t, -1, since())
		s.circuit.ForceOpen(errDown)
		require.Equal(t, 2*time.Second, since().Truncate(2*time.Second))
	})
}

// A healthy Group does not show the error of a member.
func TestGroupCardOmitsMemberErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{Show: console.Show{Errors: true, Keys: true}})
		group := resilience.NewGroup(func(string) *breaker.Breaker {
			return breaker.New(breaker.Config{Name: "banks", ConsecutiveFailures: 3})
		}, resilience.GroupConfig{})
		s.reg.MustAdd(group)
		var o overview
		s.get("/", &o)
		time.Sleep(time.Second / 2)
		_ = group.Do(t.Context(), "a", failing)
		time.Sleep(time.Second)
		s.get("/", &o)
		require.Equal(t, []string{"breaker/banks", "closed", "warn", ""},
			[]string{o.Policies[0].Path, o.Policies[0].State, o.Policies[0].Tone, o.Policies[0].Error})
		require.Equal(t, []float64{1}, o.Policies[0].Spark.Bad)
	})
}

// A store is queried every ten seconds. While a query hangs, there is no other.
func TestStoreQueryInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var quick, hanging, deaf atomic.Int64
		released := make(chan struct{})
		defer close(released)
		reg := registry.New()
		for name, n := range map[string]*atomic.Int64{"quick": &quick, "hanging": &hanging, "deaf": &deaf} {
			reg.MustAdd(&stored{name, func(ctx context.Context) {
				n.Add(1)
				switch name {
				case "hanging":
					<-ctx.Done()
				case "deaf":
					<-released
				}
			}})
		}
		s := newPage(t, reg, console.Config{})
		s.get("/", nil)
		time.Sleep(61500 * time.Millisecond)
		require.EqualValues(t, []int64{7, 7, 1}, []int64{quick.Load(), hanging.Load(), deaf.Load()},
			"immediately and every ten seconds")
		var o overview
		s.get("/", &o)
		for _, p := range o.Policies {
			require.Equal(t, map[string]string{"quick": "healthy", "hanging": "degraded", "deaf": "store_down"}[p.Name], p.State)
		}
		begun := time.Now()
		s.page.Close()
		require.Zero(t, time.Since(begun), "Close does not wait for hanging queries")
	})
}

// A stored policy queries a store for its health.
type stored struct {
	name  string
	query func(context.Context)
}

func (p *stored) Describe() policy.Description {
	return policy.Description{Kind: "lease", Name: p.name, Health: func(ctx context.Context) policy.Health {
		p.query(ctx)
		if ctx.Err() != nil {
			return policy.Health{Status: policy.Warn, Err: ctx.Err()}
		}
		return policy.Health{}
	}}
}

// A Health that reads memory only is current in each sample.
func TestLocalHealthIsReadInEachSample(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads atomic.Int64
		s := pageOf(t, console.Config{}, &local{func() policy.Health {
			return policy.Health{Status: policy.Warn, State: fmt.Sprint("read_", reads.Add(1))}
		}})
		for n := range 30 {
			var o overview
			s.get("/", &o)
			require.Equal(t, fmt.Sprint("read_", n+1), o.Policies[0].State)
			time.Sleep(time.Second)
			synctest.Wait()
		}
	})
}

// A local policy reads its health from memory.
type local struct{ health func() policy.Health }

func (p *local) Describe() policy.Description {
	health := func(context.Context) policy.Health { return p.health() }
	return policy.Description{Kind: "meter", Name: "local", Health: health}
}

// A slow store is healthy.
func TestSlowStoreIsHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := pageOf(t, console.Config{}, &stored{"slow", func(context.Context) { time.Sleep(4500 * time.Millisecond) }})
		for range 200 {
			time.Sleep(time.Second)
			synctest.Wait()
			var o overview
			s.get("/", &o)
			require.Equal(t, "The only policy is healthy.", o.Verdict)
		}
		s.page.Close()
		time.Sleep(10 * time.Second)
	})
}

// Members whose store does not respond delay the page of their Group for at most two seconds.
func TestPageOfHangingMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := registry.New()
		reg.MustAdd(resilience.NewGroup(func(string) dormant { return dormant{} }, resilience.GroupConfig{}))
		g, _ := reg.Get("dormant", "shards")
		call := g.Policy.(*resilience.Group[string, dormant]).Do
		for _, key := range []string{"a", "b", "c"} {
			require.NoError(t, call(t.Context(), key, working))
		}
		s := newPage(t, reg, console.Config{})
		time.Sleep(time.Minute) // the console has samples
		start := time.Now()
		var p policyJSON
		s.get("/policy?kind=dormant&name=shards", &p)
		require.Len(t, p.Members, 3)
		require.LessOrEqual(t, time.Since(start), 2*time.Second)
	})
}

// A dormant policy has a Health that returns only when its ctx is done.
type dormant struct{}

func (dormant) Do(ctx context.Context, fn resilience.Func) error { return fn(ctx) }

func (dormant) Describe() policy.Description {
	return policy.Description{Kind: "dormant", Name: "shards", Health: func(ctx context.Context) policy.Health {
		<-ctx.Done()
		return policy.Health{Status: policy.Fail, State: "store_down", Err: ctx.Err()}
	}}
}

// Close waits for a sample in progress.
func TestCloseWaitsForSample(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &meter{slow: 3 * time.Second}
		s := pageOf(t, console.Config{}, m)
		time.Sleep(1500 * time.Millisecond)
		begun := time.Now()
		s.page.Close()
		require.Equal(t, 2500*time.Millisecond, time.Since(begun))
	})
}

// Close during a request leaves no goroutine behind.
func TestCloseDuringRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s *shop
		s = newShop(t, console.Config{Allow: func(*http.Request, console.Operation) error {
			s.page.Close()
			return errDown
		}})
		require.Equal(t, http.StatusForbidden, s.post("action", "trip", "policy", "breaker/users").Code)
		synctest.Wait()
		require.Zero(t, sampling())
	})
}

// A fault is an error whose nil pointer panics in Error.
type fault struct{ text string }

func (f *fault) Error() string { return f.text }

// A panic in Error must not end the program.
func TestPanickingErrorIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, console.Config{Show: console.Show{Errors: true}})
		var none *fault
		for range 3 {
			_ = s.circuit.Do(t.Context(), func(context.Context) error { return none })
			_ = s.shards.Do(t.Context(), "a", func(context.Context) error { return none })
		}
		time.Sleep(1500 * time.Millisecond)
		for _, path := range []string{"/", "/policy?kind=breaker&name=users", "/policy?kind=breaker&name=shards"} {
			require.Contains(t, s.get(path, nil).Body.String(), "&lt;nil&gt;", path)
		}
	})
}

// A panickyStore is a store that panics.
type panickyStore struct{ lease.Store }

func (panickyStore) Load(context.Context, string) (lease.Record, error) { panic("boom") }

// The sampler's goroutine calls Health. A panic there would end the program.
func TestPanickingHealthIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := pageOf(t, console.Config{Show: console.Show{Errors: true}},
			lease.New(panickyStore{lease.NewMemory()}, lease.Config{Name: "billing"}))
		time.Sleep(2500 * time.Millisecond)
		require.Contains(t, s.get("/", nil).Body.String(), "Health panicked: boom")
	})
}

// The sampler's goroutine also reads the metrics.
func TestPanickingMetricsAreLeftOut(t *testing.T) {
	defer log.SetOutput(log.Writer())
	log.SetOutput(io.Discard)
	synctest.Test(t, func(t *testing.T) {
		s := pageOf(t, console.Config{}, panickyMeter{}, &meter{metrics: []policy.Metric{{Name: "meter.calls", Value: 1}}})
		time.Sleep(2500 * time.Millisecond)
		require.Contains(t, s.get("/", nil).Body.String(), "panicky")
	})
}

type panickyMeter struct{}

func (panickyMeter) Describe() policy.Description {
	return policy.Description{Kind: "meter", Name: "panicky", Metrics: func() []policy.Metric { panic("boom") }}
}

func TestStateMetricWithoutAttributes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := pageOf(t, console.Config{}, &meter{metrics: []policy.Metric{{Name: "meter.state", Value: 1}}})
		time.Sleep(1500 * time.Millisecond)
		var p policyJSON
		s.get("/policy?kind=meter&name=water", &p)
		require.Equal(t, 1.0, p.Metrics[0].Value)
		require.Empty(t, p.States)
	})
}
