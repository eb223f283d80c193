package resiliencehttp_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// tries is the least of all retriers: up to n calls, no waits, as long as the
// error does not say that it is not Retryable.
func tries(n int) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) (err error) {
			for range n {
				err = next(ctx)
				r, says := errors.AsType[interface {
					error
					Retryable() bool
				}](err)
				if err == nil || says && !r.Retryable() {
					break
				}
			}
			return err
		}
	}
}

// statuses answers with one status after the other, the last one for ever, and
// a body that names it.
func statuses(codes ...int) http.HandlerFunc {
	next := make(chan int, len(codes))
	for _, code := range codes[:len(codes)-1] {
		next <- code
	}
	return func(w http.ResponseWriter, r *http.Request) {
		code := codes[len(codes)-1]
		select {
		case code = <-next:
		default:
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, http.StatusText(code))
	}
}

func TestTransportRetriesFailedStatus(t *testing.T) {
	server := httptest.NewServer(statuses(503, 429, 200))
	defer server.Close()
	client := &http.Client{Transport: &resiliencehttp.Transport{Middleware: tries(3)}}

	resp, err := client.Get(server.URL)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, "OK", string(body))
}

func TestTransportReturnsLastFailedResponseOpen(t *testing.T) {
	server := httptest.NewServer(statuses(503, 429, 502))
	defer server.Close()
	client := &http.Client{Transport: &resiliencehttp.Transport{Middleware: tries(3)}}

	resp, err := client.Get(server.URL)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 502, resp.StatusCode)
	require.Equal(t, "Bad Gateway", string(body))
}

func TestTransportSendsPostOnce(t *testing.T) {
	server := httptest.NewServer(statuses(503, 200))
	defer server.Close()
	var seen error
	client := &http.Client{Transport: &resiliencehttp.Transport{
		Middleware: resilience.Chain(tries(3), func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				seen = next(ctx)
				return seen
			}
		}),
	}}

	resp, err := client.Post(server.URL, "text/plain", strings.NewReader("once"))
	require.NoError(t, err)
	require.Equal(t, 503, resp.StatusCode)
	require.NoError(t, resp.Body.Close())
	status, ok := errors.AsType[*resiliencehttp.StatusError](seen)
	require.True(t, ok)
	require.False(t, status.Retryable())
	require.EqualError(t, seen, "resiliencehttp: status 503 Service Unavailable")
}
