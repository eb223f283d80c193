package sagahttp_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagahttp"
)

// TestSagaCommands sends the commands of a saga whose second step receives each status, and checks whether the saga
// retries it and undoes it.
func TestSagaCommands(t *testing.T) {
	const (
		done    = "done"
		aborted = "aborted"          // immediately, undone
		doubted = "tried and undone" // three times, then undone
	)
	for status, want := range map[int]string{
		200: done, 201: done, 202: done, 204: done,
		300: aborted, 304: aborted,
		400: aborted, 401: aborted, 402: aborted, 403: aborted, 404: aborted, 410: aborted, 422: aborted, 451: aborted,
		408: doubted, 409: doubted, 425: doubted, 429: doubted,
		500: doubted, 502: doubted, 503: doubted, 504: doubted, 501: aborted, 505: aborted, 599: doubted,
	} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			var keys []string
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				keys = append(keys, r.Method+" "+r.Header.Get("Idempotency-Key")[26:])
				if r.Method == http.MethodDelete {
					w.WriteHeader(http.StatusNotFound)
					return
				}
				w.WriteHeader(status)
			}))
			defer server.Close()
			send := func(method string) func(context.Context, *int) error {
				return func(ctx context.Context, n *int) error {
					req, err := http.NewRequestWithContext(ctx, method, server.URL, nil)
					require.NoError(t, err)
					return sagahttp.Send(server.Client(), req, func(*http.Response) error { *n++; return nil })
				}
			}
			sg := &saga.Saga[int]{Name: "trip", Steps: []saga.Step[int]{
				{Name: "hotel", Do: send(http.MethodPost), Undo: send(http.MethodDelete), Backoff: saga.Exponential(1, 1)},
			}}
			n := 0
			err := saga.Run(t.Context(), sg, &n)
			const post, del = "POST /hotel/do", "DELETE /hotel/undo"
			if want == done {
				require.NoError(t, err)
				require.Equal(t, []string{post}, keys)
				require.Equal(t, 1, n)
				return
			}
			require.ErrorIs(t, err, saga.ErrCompensated)
			e, ok := errors.AsType[*resiliencehttp.StatusError](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, status, e.StatusCode)
			require.Equal(t, http.MethodPost, e.Method)
			require.Equal(t, server.Listener.Addr().String(), e.Host)
			require.Zero(t, n)
			require.Equal(t, map[string][]string{
				aborted: {post, del}, doubted: {post, post, post, del},
			}[want], keys)
		})
	}
}

// TestDeclinedFieldMarksDecline: with the field, the server reports that it has recorded its decline of the command.
func TestDeclinedFieldMarksDecline(t *testing.T) {
	for status, want := range map[int]bool{
		400: true, 402: true, 404: true, 410: true, 422: true, 501: true,
		304: false, 408: false, 409: false, 425: false, 429: false, 500: false, 503: false,
	} {
		for field, says := range map[string]bool{"declined": true, "": false, "done": false} {
			resp := &http.Response{StatusCode: status, Header: http.Header{"Saga-Command": {field}}}
			require.Equal(t, want && says, saga.IsDeclined(sagahttp.Result(resp, nil)), "%d %q", status, field)
		}
	}
}

// TestUndoResult checks that an Undo succeeds if there is nothing to undo, and that a Do does not.
func TestUndoResult(t *testing.T) {
	for status, done := range map[int]bool{200: true, 404: true, 410: true, 400: false, 409: false, 500: false} {
		ctx := saga.WithCommand(t.Context(), saga.Command{ID: "a/b/c/undo"})
		req, err := http.NewRequestWithContext(ctx, http.MethodDelete, "http://a/", nil)
		require.NoError(t, err)
		err = sagahttp.Result(&http.Response{StatusCode: status, Request: req}, nil)
		require.Equal(t, done, err == nil, status)
	}
	for _, id := range []string{"42", "orders/do", strings.Repeat("a", 201) + "/b/c/do"} { // of no Undo
		req, err := http.NewRequestWithContext(saga.WithCommand(t.Context(), saga.Command{ID: id}), http.MethodPost,
			"http://a/", nil)
		require.NoError(t, err)
		require.Error(t, sagahttp.Result(&http.Response{StatusCode: http.StatusNotFound, Request: req}, nil), id)
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// closing is an empty body that counts the calls to Close.
type closing struct{ n *atomic.Int32 }

func (closing) Read([]byte) (int, error) { return 0, io.EOF }
func (c closing) Close() error           { c.n.Add(1); return nil }

func TestCommandKeepsGivenKey(t *testing.T) {
	ctx := saga.WithCommand(t.Context(), saga.Command{ID: "a/b/c/do"})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://a/", nil)
	require.NoError(t, err)
	var closed atomic.Int32
	for _, key := range []string{"a/b/c/do", "mine"} {
		client := &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
			require.Equal(t, key, r.Header.Get("Idempotency-Key"))
			return &http.Response{StatusCode: 200, Body: closing{&closed}, Request: r}, nil
		})}
		require.NoError(t, sagahttp.Send(client, req, nil))
		require.Equal(t, key == "mine", len(req.Header) > 0, "the request is the caller's")
		req.Header.Set("Idempotency-Key", "mine")
	}
	require.EqualValues(t, 2, closed.Load())
}

// TestRequestWithoutAHeader sends a request that was not made by http.NewRequest. An http.Client accepts it.
func TestRequestWithoutAHeader(t *testing.T) {
	req := (&http.Request{URL: &url.URL{Scheme: "http", Host: "a"}}).WithContext(saga.WithCommand(t.Context(),
		saga.Command{ID: "a/b/c/do"}))
	require.NoError(t, sagahttp.Send(&http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
		require.Equal(t, "a/b/c/do", r.Header.Get("Idempotency-Key"))
		return &http.Response{StatusCode: 200, Body: http.NoBody, Request: r}, nil
	})}, req, nil))
	require.Nil(t, req.Header)
}

// TestRefusedCommandIsNoAttempt checks that a breaker's error remains a refusal.
func TestRefusedCommandIsNoAttempt(t *testing.T) {
	b := breaker.New(breaker.Config{})
	b.ForceOpen(nil)
	req, err := http.NewRequest(http.MethodPost, "http://127.0.0.1:1", nil)
	require.NoError(t, err)
	err = sagahttp.Send(&http.Client{Transport: &resiliencehttp.Transport{Middleware: b.Wrap}}, req, nil)
	require.ErrorIs(t, err, breaker.ErrOpen)
	require.Empty(t, req.Header, "no command, no key, and the request is the caller's")
}

// TestInvalidRequestIsNotRetried checks that only this module's Transport marks an invalid request as final.
func TestInvalidRequestIsNotRetried(t *testing.T) {
	errOnce := errors.New("for a moment")
	for name, c := range map[string]struct {
		policies, prepare bool
		attempts          int
	}{
		"Prepare":          {true, true, 1},
		"Body":             {true, false, 1},
		"WithoutTransport": {false, false, 2},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				_,
					_ = io.Copy(io.Discard, r.Body)
			}))
			defer server.Close()
			attempts, undone := 0, 0
			client := server.Client()
			if c.policies {
				client.Transport = &resiliencehttp.Transport{Base: client.Transport, Prepare: func(*http.Request) error {
					if c.prepare && attempts == 1 {
						return errOnce
					}
					return nil
				}}
			}
			err := saga.Run(t.Context(), &saga.Saga[int]{Name: "order", Steps: []saga.Step[int]{{
				Name: "charge", Backoff: saga.Exponential(1, 1),
				Do: func(ctx context.Context, _ *int) error {
					attempts++
					body := io.Reader(strings.NewReader("{}"))
					if !c.prepare && attempts == 1 {
						body = iotest.ErrReader(errOnce)
					}
					req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, body)
					require.NoError(t, err)
					return sagahttp.Send(client, req, nil)
				},
				Undo: func(context.Context, *int) error { undone++; return nil },
			}}}, new(int))
			require.Equal(t, c.attempts, attempts)
			if c.attempts == 1 {
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.ErrorIs(t, err, errOnce)
				require.Equal(t, 1, undone)
				return
			}
			require.NoError(t, err)
		})
	}
}

func TestHandlerNeedsCommand(t *testing.T) {
	for _, key := range []string{"", "42", "a/b/c/d", "orders/do", strings.Repeat("a", 201) + "/b/c/undo"} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Idempotency-Key", key)
		w := httptest.NewRecorder()
		(&sagahttp.Handler{}).ServeHTTP(w, r)
		require.Equal(t, http.StatusBadRequest, w.Code)
	}
}

// endless is a refusal with the longest RetryAfter.
type endless struct{}

func (endless) Error() string             { return "endless" }
func (endless) Refused() bool             { return true }
func (endless) RetryAfter() time.Duration { return math.MaxInt64 }

// lost is a retryable answer, like a deadlock error.
type lost struct{}

func (lost) Error() string   { return "lost" }
func (lost) Answered() bool  { return true }
func (lost) Retryable() bool { return true }

// A connector's transactions fail with its error.
type connector struct{ err error }

func (c connector) Connect(context.Context) (driver.Conn, error) { return nil, c.err }
func (connector) Driver() driver.Driver                          { return nil }

func TestHandlerDeclinesFinalAnswers(t *testing.T) {
	for err, want := range map[error]int{
		resilience.Answer(errors.New("full")): http.StatusUnprocessableEntity,
		lost{}:                                http.StatusInternalServerError,
		saga.Declined(lost{}):                 http.StatusUnprocessableEntity,
	} {
		db := sql.OpenDB(connector{err})
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Idempotency-Key", "a/b/c/do")
		w := httptest.NewRecorder()
		(&sagahttp.Handler{DB: db}).ServeHTTP(w, r)
		require.Equal(t, want, w.Code)
		require.NoError(t, db.Close())
	}
}

func TestRetryAfterFieldIsCapped(t *testing.T) {
	db := sql.OpenDB(connector{endless{}})
	defer db.Close()
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	r.Header.Set("Idempotency-Key", "a/b/c/do")
	w := httptest.NewRecorder()
	(&sagahttp.Handler{DB: db}).ServeHTTP(w, r)
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Equal(t, "9223372037", w.Header().Get("Retry-After"))
	require.NotContains(t, w.Header(), "Saga-Command")
}
