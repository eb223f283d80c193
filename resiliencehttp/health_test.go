package resiliencehttp_test

import (
	"context"
	"errors"
	"iter"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
)

// ailing are policies, by name, of which some are not well.
type ailing func(context.Context) iter.Seq2[string, error]

func (a ailing) Health(ctx context.Context) iter.Seq2[string, error] { return a(ctx) }

// down is what a policy says that has failed.
type down struct{ error }

func (down) Failed() bool        { return true }
func (down) HealthState() string { return "open" }

// tired is what a policy says that has not failed.
type tired struct{ down }

func (tired) Failed() bool { return false }

func TestHealthTellsStatesAndNoTexts(t *testing.T) {
	h := resiliencehttp.Health(ailing(func(ctx context.Context) iter.Seq2[string, error] {
		return func(yield func(string, error) bool) {
			require.NoError(t, ctx.Err())
			deadline, ok := ctx.Deadline()
			require.True(t, ok, "a policy that hangs does not hang the answer")
			require.LessOrEqual(t, time.Until(deadline), time.Second)
			_ = yield("users", nil) && yield("mail", down{errors.New("secret")}) && yield("bills", errors.New("secret")) &&
				yield("old", tired{})
		}
	}))
	want := `{"status":"warn","checks":[{"name":"users","status":"pass","state":"ok"},` +
		`{"name":"mail","status":"fail","state":"open"},{"name":"bills","status":"warn","state":"ailing"},` +
		`{"name":"old","status":"warn","state":"open"}]}` + "\n"
	for method, code := range map[string]int{"GET": 200, "HEAD": 200, "POST": 405} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, "/health", nil))
		require.Equal(t, code, w.Code, method)
		if code == 200 {
			require.Equal(t, want, w.Body.String())
			require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
			require.Equal(t, "application/json", w.Header().Get("Content-Type"))
		} else {
			require.Equal(t, "GET, HEAD", w.Header().Get("Allow"))
		}
	}
}
