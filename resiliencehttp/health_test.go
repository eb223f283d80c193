package resiliencehttp_test

import (
	"context"
	"errors"
	"iter"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A healthSource is the health of policies, by name.
type healthSource func(context.Context) iter.Seq2[string, policy.Health]

func (s healthSource) Health(ctx context.Context) iter.Seq2[string, policy.Health] { return s(ctx) }

// newHealthSource returns a source that yields the health of "a", "b" and so on.
func newHealthSource(all ...policy.Health) healthSource {
	return func(context.Context) iter.Seq2[string, policy.Health] {
		return func(yield func(string, policy.Health) bool) {
			for i, h := range all {
				if !yield(string(rune('a'+i)), h) {
					return
				}
			}
		}
	}
}

func TestHealthReportsStatesWithoutTexts(t *testing.T) {
	secret := errors.New("secret")
	for want, source := range map[string]healthSource{
		`{"status":"pass","checks":[]}`: newHealthSource(),
		`{"status":"pass","checks":[{"name":"a","status":"pass","state":"ok"},` +
			`{"name":"b","status":"pass","state":"half_open"}]}`: newHealthSource(
			policy.Health{}, policy.Health{State: "half_open", Detail: "secret", Err: secret}),
		`{"status":"warn","checks":[{"name":"a","status":"pass","state":"ok"},` +
			`{"name":"b","status":"fail","state":"open"}]}`: newHealthSource(
			policy.Health{Status: -1}, policy.Health{Status: policy.Fail, State: "open", Detail: "secret", Err: secret}),
		`{"status":"warn","checks":[{"name":"a","status":"warn","state":"full"}]}`: newHealthSource(
			policy.Health{Status: policy.Warn, State: "full"}),
		`{"status":"warn","checks":[{"name":"a","status":"warn","state":"degraded"},` +
			`{"name":"b","status":"fail","state":"failing"},{"name":"c","status":"fail","state":"failing"}]}`: newHealthSource(
			policy.Health{Status: policy.Warn, Err: secret}, policy.Health{Status: policy.Fail}, policy.Health{Status: 3}),
	} {
		w := httptest.NewRecorder()
		resiliencehttp.Health(source).ServeHTTP(w, httptest.NewRequest("GET", "/health", nil))
		require.Equal(t, want+"\n", w.Body.String())
	}
}

func TestHealthMethods(t *testing.T) {
	for method, code := range map[string]int{"GET": 200, "HEAD": 200, "POST": 405} {
		w := httptest.NewRecorder()
		resiliencehttp.Health(newHealthSource()).ServeHTTP(w, httptest.NewRequest(method, "/health", nil))
		require.Equal(t, code, w.Code, method)
		if code == 200 {
			require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
			require.Equal(t, "application/json", w.Header().Get("Content-Type"))
		} else {
			require.Equal(t, "GET, HEAD", w.Header().Get("Allow"))
		}
	}
}

func TestHealthLimitsTheTimeOfPolicies(t *testing.T) {
	source := healthSource(func(ctx context.Context) iter.Seq2[string, policy.Health] {
		deadline, ok := ctx.Deadline()
		require.True(t, ok)
		require.LessOrEqual(t, time.Until(deadline), time.Second)
		require.NoError(t, ctx.Err())
		return newHealthSource()(ctx)
	})
	resiliencehttp.Health(source).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/health", nil))
}

func TestHealthPanicsWithoutPolicies(t *testing.T) {
	const text = "resiliencehttp: Health needs policies, not nil"
	require.PanicsWithError(t, text, func() { resiliencehttp.Health(nil) })
	require.PanicsWithError(t, text, func() { resiliencehttp.Health((*healthSource)(nil)) })
	source := newHealthSource()
	require.NotNil(t, resiliencehttp.Health(&source))
	require.NotNil(t, resiliencehttp.Health(struct{ healthSource }{source}))
}
