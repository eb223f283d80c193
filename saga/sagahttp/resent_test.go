package sagahttp_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagahttp"
)

// TestRefusedRedirectMayHaveApplied: a policy refuses the request to which the response redirects. The first request
// was sent.
func TestRefusedRedirectMayHaveApplied(t *testing.T) {
	for path, refunds := range map[string]int64{"/done": 1, "/refused": 0} {
		t.Run(path, func(t *testing.T) {
			var refunded atomic.Int64
			mux := http.NewServeMux()
			mux.HandleFunc("/refund", func(http.ResponseWriter, *http.Request) { refunded.Add(1) })
			mux.Handle("/done", http.RedirectHandler("/refused", http.StatusSeeOther))
			server := httptest.NewServer(mux)
			defer server.Close()
			client := &http.Client{Transport: refusing{new(http.Transport)}}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			send := func(ctx context.Context, path string) error {
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+path, nil)
				if err != nil {
					return err
				}
				return sagahttp.Send(client, req, nil)
			}
			err := saga.Run(ctx, &saga.Saga[int]{Name: "order", Steps: []saga.Step[int]{{
				Name: "charge",
				Do:   func(ctx context.Context, _ *int) error { defer cancel(); return send(ctx, path) },
				Undo: func(ctx context.Context, _ *int) error { return send(ctx, "/refund") },
			}}}, new(int))
			require.ErrorIs(t, err, saga.ErrCompensated)
			require.EqualValues(t, refunds, refunded.Load())
		})
	}
}

type full struct{}

func (full) Error() string { return "full" }
func (full) Refused() bool { return true }

type refusing struct{ *http.Transport }

func (tr refusing) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Path == "/refused" {
		return nil, full{}
	}
	return tr.Transport.RoundTrip(req)
}
