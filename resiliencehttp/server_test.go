package resiliencehttp_test

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// refusing returns middleware of s that refuses every request, by name, and the status that it
// answers with.
func refusing(t *testing.T, s resiliencehttp.Server) map[string]struct {
	middleware func(http.Handler) http.Handler
	status     int
} {
	limit := throttle.New(throttle.Config{Rate: 0.001, Burst: 1})
	require.True(t, limit.Allow())
	limits := throttle.NewGroup(throttle.GroupConfig[string]{Config: limit.Config()})
	require.True(t, limits.Allow("192.0.2.1")) // the address of get's requests
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	done, err := slots.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { done(nil) })
	return map[string]struct {
		middleware func(http.Handler) http.Handler
		status     int
	}{
		"Throttle":   {s.Throttle(limit), 429},
		"ThrottleBy": {s.ThrottleBy(limits, nil), 429},
		"Bulkhead":   {s.Bulkhead(slots), 503},
	}
}

func TestOnRefuseWritesTheResponse(t *testing.T) {
	var told error
	s := resiliencehttp.Server{OnRefuse: func(w http.ResponseWriter, r *http.Request, err error) {
		told = err
		require.Empty(t, w.Header().Get("Content-Type"))
		require.NotEmpty(t, w.Header().Get("Retry-After"))
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
		switch r.URL.RawQuery {
		case "own":
			_, _ = io.WriteString(w, "<p>Come back later")
		case "teapot":
			w.WriteHeader(http.StatusTeapot)
		case "flush":
			w.(http.Flusher).Flush()
		case "hint":
			w.WriteHeader(http.StatusEarlyHints)
		}
	}}
	for name, m := range refusing(t, s) {
		t.Run(name, func(t *testing.T) {
			ask := func(query string) *httptest.ResponseRecorder {
				told = nil
				w := get(m.middleware(hello), func(r *http.Request) { r.URL.RawQuery = query })
				require.True(t, resilience.Refused(told), told)
				return w
			}
			w := ask("own")
			require.Equal(t, m.status, w.Code)
			require.Equal(t, "<p>Come back later", w.Body.String())
			w = ask("teapot")
			require.Equal(t, http.StatusTeapot, w.Code)
			require.Zero(t, w.Body.Len())
			w = ask("flush")
			require.Equal(t, m.status, w.Code)
			require.True(t, w.Flushed)
			require.Equal(t, m.status, problemOf(t, ask("nothing")).Status)
		})
	}
	w := httptest.NewRecorder()
	require.True(t, s.Refuse(w, httptest.NewRequest("GET", "/?own", nil), &bulkhead.FullError{}))
	require.Equal(t, "<p>Come back later", w.Body.String())

	server := httptest.NewServer(refusing(t, s)["Bulkhead"].middleware(hello))
	defer server.Close()
	resp, err := http.Get(server.URL + "?hint")
	require.Contains(t, answer(t, resp, err), problemTypes)
	require.Equal(t, 503, resp.StatusCode, "after an informational response")
}

func TestRefusalHasNoFieldsOfTheReplacedResponse(t *testing.T) {
	stale := func(h http.Header) {
		h["ETag"] = []string{`"1"`} // net/http does not mind
		h.Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		h.Set("Cache-Control", "public, max-age=31536000")
		h.Set("Expires", "Mon, 02 Jan 2034 15:04:05 GMT")
		h.Set("Content-Length", "1000000")
		h.Set("Content-Disposition", "attachment")
		h.Set("Content-Type", "image/png")
		h.Set("Vary", "Origin")
		h.Add("Set-Cookie", "a=b")
	}
	check := func(t *testing.T, w *httptest.ResponseRecorder) {
		t.Helper()
		h := w.Header()
		problemOf(t, w)
		for _, field := range []string{"ETag", "Last-Modified", "Expires", "Content-Disposition"} {
			require.Empty(t, h.Get(field), field)
			require.NotContains(t, h, field)
		}
		require.Equal(t, []string{"no-store"}, h.Values("Cache-Control"))
		require.NotEqual(t, "1000000", h.Get("Content-Length"))
		require.Equal(t, "Origin", h.Get("Vary"), "of the server, not of the response")
		require.Equal(t, "a=b", h.Get("Set-Cookie"))
	}
	for name, m := range refusing(t, resiliencehttp.Server{}) {
		t.Run(name, func(t *testing.T) {
			h := m.middleware(hello)
			check(t, get(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				stale(w.Header())
				h.ServeHTTP(w, r)
			})))
		})
	}
	t.Run("Refuse", func(t *testing.T) {
		w := httptest.NewRecorder()
		stale(w.Header())
		w.Header().Set("Content-Encoding", "br")
		resiliencehttp.Server{}.Refuse(w, httptest.NewRequest("GET", "/", nil), &bulkhead.FullError{})
		check(t, w)
		require.Empty(t, w.Header().Get("Content-Encoding"))
	})
}

// Some middleware that compresses sets Content-Encoding before it calls the next handler.
func TestRefusalIsReadableThroughCompression(t *testing.T) {
	compress := func(next http.Handler) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("ETag", `"1"`)
			z := gzip.NewWriter(w)
			defer z.Close()
			next.ServeHTTP(compressed{w, z}, r)
		}
	}
	handlers := map[string]http.Handler{}
	for name, m := range refusing(t, resiliencehttp.Server{}) {
		handlers[name] = m.middleware(hello)
	}
	for name, h := range handlers {
		t.Run(name, func(t *testing.T) {
			w := get(compress(h))
			require.Equal(t, "gzip", w.Header().Get("Content-Encoding"))
			require.Empty(t, w.Header().Get("ETag"))
			require.Empty(t, w.Header().Get("Content-Length"), "not known before the body is compressed")
			z, err := gzip.NewReader(w.Body)
			require.NoError(t, err)
			body, err := io.ReadAll(z)
			require.NoError(t, err)
			require.Contains(t, string(body), problemTypes)
		})
	}
}

type compressed struct {
	http.ResponseWriter
	z io.Writer
}

func (w compressed) Write(p []byte) (int, error) { return w.z.Write(p) }

// inside is what a handler does that has policies of its own.
func inside(s resiliencehttp.Server, mw resilience.Middleware) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := mw(func(context.Context) error { return nil })(r.Context())
		if err != nil && !s.Refuse(w, r, err) {
			http.Error(w, "failed", http.StatusInternalServerError)
		}
	})
}

func TestRefuseTellsTheLimitThatRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := throttle.New(throttle.Config{Rate: throttle.PerMinute(4), Burst: 4})
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		s := resiliencehttp.Server{LimitName: "reports"}
		h := inside(s, resilience.Chain(slots.Wrap, limit.Wrap))
		for range 4 {
			w := get(h)
			require.Equal(t, 200, w.Code)
			require.Empty(t, w.Header().Get("RateLimit"))
		}
		time.Sleep(time.Second)
		w := get(h)
		require.Equal(t, 429, w.Code)
		require.Equal(t, `"reports";q=4`, w.Header().Get("RateLimit-Policy"))
		require.Equal(t, `"reports";r=0;t=14`, w.Header().Get("RateLimit"))
		require.Equal(t, "14", w.Header().Get("Retry-After"))
		require.Equal(t, []string{"reports"}, problemOf(t, w).Violated)

		done, _ := slots.Begin(t.Context())
		defer done(nil)
		w = get(h)
		require.Equal(t, 503, w.Code)
		require.Empty(t, w.Header().Get("RateLimit"), "the limit did not refuse")
		require.Empty(t, problemOf(t, w).Violated)
	})
	costly := throttle.New(throttle.Config{Rate: 1, Burst: 1, Cost: func(context.Context) int { return 2 }})
	w := get(inside(resiliencehttp.Server{}, costly.Wrap))
	require.Equal(t, 413, w.Code)
	require.Equal(t, `"default";r=0`, w.Header().Get("RateLimit"), "there will never be enough")
	require.Empty(t, w.Header().Get("Retry-After"))

	for limit, want := range map[int]string{5: `"default";r=0`, 0: ""} {
		w = get(inside(resiliencehttp.Server{}, func(resilience.Func) resilience.Func {
			return func(context.Context) error { return &throttle.LimitedError{Reason: throttle.OverLimit, Limit: limit} }
		}))
		require.Equal(t, 429, w.Code)
		require.Equal(t, want, w.Header().Get("RateLimit"), "when there will be more is not known")
		require.Equal(t, "1", w.Header().Get("Retry-After"))
	}

	shed := func(resilience.Func) resilience.Func {
		return func(context.Context) error { return &throttle.LimitedError{Reason: throttle.Shed, Limit: 5} }
	}
	w = get(inside(resiliencehttp.Server{}, shed))
	require.Equal(t, 503, w.Code, "it is not the client's quota")
	require.Empty(t, w.Header().Get("RateLimit-Policy"))
}

// A limit of a fleet decides within a handler, and Refuse tells the client.
func TestRefuseOfAFleet(t *testing.T) {
	down := func(context.Context, string, []string, ...any) (any, error) {
		return nil, errors.New("connection refused")
	}
	cfg := fleet.Config{
		Name: "plans", Eval: down, OnOutage: fleet.Local, Instances: 2,
		Meters: func(ctx context.Context) []fleet.Meter {
			return []fleet.Meter{fleet.Rate("a/requests", 0.1, ctx.Value(costKey{}).(int)).Burst(4)}
		},
	}
	ask := func(limits *fleet.Limits, cost int) *httptest.ResponseRecorder {
		return get(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx := context.WithValue(r.Context(), costKey{}, cost)
			err := limits.Do(ctx, func(context.Context) error { hello.ServeHTTP(w, r); return nil })
			resiliencehttp.Server{}.Refuse(w, r, err)
		}))
	}
	local := fleet.New(cfg)
	require.Equal(t, 200, ask(local, 1).Code)
	require.Equal(t, 200, ask(local, 1).Code)
	w := ask(local, 1)
	require.Equal(t, 429, w.Code)
	require.Equal(t, "20", w.Header().Get("Retry-After"), "of this process's part")
	require.Equal(t, problemTypes+"quota-exceeded", problemOf(t, w).Type)
	require.Equal(t, 413, ask(local, 5).Code)
	cfg.OnOutage = fleet.Refuse
	w = ask(fleet.New(cfg), 1)
	require.Equal(t, 503, w.Code, "it is not the client's fault")
	require.Equal(t, "1", w.Header().Get("Retry-After"))
	require.Empty(t, w.Header().Get("RateLimit"), "what is left is not known")
	var none *throttle.Group[string]
	require.Panics(t, func() { resiliencehttp.Server{}.ThrottleBy(none, nil) })
}

type costKey struct{}
