package sagahttp_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagahttp"
)

// TestADeclineSaysNothingOfWhatWasSentBefore: a request may be sent twice within one attempt of
// a step. The first may have taken effect, of which the answer to the second, such as that of a
// gateway, knows nothing. A request that follows a redirect is no second one, unless the redirect
// was the answer.
func TestADeclineSaysNothingOfWhatWasSentBefore(t *testing.T) {
	plain := &http.Client{Transport: &http.Transport{}}
	policies := resiliencehttp.NewClient(resiliencehttp.ClientConfig{Transport: &resiliencehttp.Transport{Base: &http.Transport{}}})
	for name, c := range map[string]struct {
		client   *http.Client
		warm     bool // the connection has been in use, so that net/http sends again
		attempts int
		path     string
		charged  int
	}{
		"by net/http":                      {plain, true, 0, "/charge", 1},
		"by net/http, within policies":     {policies, true, 0, "/charge", 1},
		"by a retrier":                     {policies, false, 1, "/charge", 1},
		"not sent again":                   {plain, true, 0, "/declined", 0},
		"not sent again, within policies":  {policies, true, 0, "/declined", 0},
		"redirected":                       {plain, true, 0, "/moved", 0},
		"redirected twice":                 {plain, false, 0, "/moved/twice", 0},
		"redirected, within policies":      {policies, true, 1, "/moved", 0},
		"redirected, then by net/http":     {plain, true, 0, "/moved/charge", 1},
		"redirected, then by a retrier":    {policies, false, 1, "/moved/charge", 1},
		"redirected twice within policies": {policies, false, 1, "/moved/twice", 0},
		"redirected when it is done":       {plain, false, 0, "/done", 1},
		"redirected again when it is done": {policies, false, 1, "/done/moved", 1},
	} {
		t.Run(name, func(t *testing.T) {
			var got, charged, refunded atomic.Int64
			mux := http.NewServeMux()
			mux.HandleFunc("/warm", func(http.ResponseWriter, *http.Request) {})
			mux.HandleFunc("/refund", func(http.ResponseWriter, *http.Request) { refunded.Add(1) })
			mux.HandleFunc("/declined", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
			mux.Handle("/moved", http.RedirectHandler("/declined", http.StatusTemporaryRedirect))
			mux.Handle("/moved/twice", http.RedirectHandler("/moved", http.StatusPermanentRedirect))
			mux.Handle("/moved/charge", http.RedirectHandler("/charge", http.StatusTemporaryRedirect))
			done := func(to string) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					charged.Add(1)
					http.Redirect(w, r, to, http.StatusSeeOther)
				}
			}
			mux.HandleFunc("/done", done("/declined"))
			mux.HandleFunc("/done/moved", done("/moved"))
			mux.HandleFunc("/charge", func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				if got.Add(1) == 1 {
					charged.Add(1)
					panic(http.ErrAbortHandler) // the reply is lost
				}
				w.WriteHeader(http.StatusForbidden)
			})
			server := httptest.NewServer(mux)
			defer server.Close()
			send := func(path string) func(context.Context, *int) error {
				return func(ctx context.Context, _ *int) error {
					req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+path, strings.NewReader("{}"))
					if err != nil {
						return err
					}
					return sagahttp.Send(c.client, req, nil)
				}
			}
			steps := []saga.Step[int]{{Name: "charge", Do: send(c.path), Undo: send("/refund"), Attempts: c.attempts}}
			if c.warm {
				steps = append([]saga.Step[int]{{Name: "warm", Do: send("/warm"), Undo: send("/warm")}}, steps...)
			}
			err := saga.Run(t.Context(), &saga.Saga[int]{Name: "order", Steps: steps}, new(int))
			require.ErrorIs(t, err, saga.ErrCompensated)
			require.EqualValues(t, c.charged, charged.Load())
			require.EqualValues(t, c.charged, refunded.Load(), "what is in doubt is undone, and nothing else")
		})
	}
}

// TestARefusalSaysNothingOfWhatWasSentBefore: a policy does not let the request pass to which the
// answer has redirected.
func TestARefusalSaysNothingOfWhatWasSentBefore(t *testing.T) {
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

// TestADeclineMayComeBeforeItsRequestIsWritten, over HTTP/2: the write has sent all, and has not
// returned yet.
func TestADeclineMayComeBeforeItsRequestIsWritten(t *testing.T) {
	var got, refunded atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/refund":
			refunded.Add(1)
		case got.Add(1) == 1:
			panic(http.ErrAbortHandler) // charged, and the reply is lost
		default:
			http.Error(w, "no", http.StatusForbidden)
		}
	}))
	unencrypted := new(http.Protocols)
	unencrypted.SetUnencryptedHTTP2(true)
	server.Config.Protocols = unencrypted
	server.Start()
	defer server.Close()
	read := make(chan struct{})
	client := &http.Client{Transport: &twice{closed: read, Transport: &http.Transport{
		Protocols: unencrypted,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, addr)
			return &slowConn{conn, &got, read}, err
		},
	}}}
	send := func(path string) func(context.Context, *int) error {
		return func(ctx context.Context, _ *int) error {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+path, nil)
			if err != nil {
				return err
			}
			return sagahttp.Send(client, req, nil)
		}
	}
	err := saga.Run(t.Context(), &saga.Saga[int]{Name: "order", Steps: []saga.Step[int]{
		{Name: "charge", Do: send("/charge"), Undo: send("/refund"), Attempts: 1},
	}}, new(int))
	require.ErrorIs(t, err, saga.ErrCompensated)
	require.EqualValues(t, 1, refunded.Load())
}

// A slowConn writes the second request, and returns when its response is closed.
type slowConn struct {
	net.Conn
	got    *atomic.Int64
	closed <-chan struct{}
}

func (c *slowConn) Write(p []byte) (int, error) {
	const headers = 1 // the type of a frame
	second := c.got.Load() == 1 && len(p) > 3 && p[3] == headers
	n, err := c.Conn.Write(p)
	if second {
		<-c.closed
	}
	return n, err
}

// A twice Transport sends a request again that has failed, and tells when the response to that is
// closed.
type twice struct {
	*http.Transport
	closed chan struct{}
}

func (tr *twice) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := tr.Transport.RoundTrip(req)
	if err == nil {
		return resp, nil
	}
	resp, err = tr.Transport.RoundTrip(req)
	if err == nil {
		resp.Body = &tellingBody{resp.Body, tr.closed}
	}
	return resp, err
}

type tellingBody struct {
	io.ReadCloser
	closed chan struct{}
}

func (b *tellingBody) Close() error {
	close(b.closed)
	return b.ReadCloser.Close()
}
