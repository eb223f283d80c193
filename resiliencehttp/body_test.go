package resiliencehttp_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// halves answers with "one", and when it is told to, with "two".
func halves(more <-chan struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "one")
		w.(http.Flusher).Flush()
		select {
		case <-more:
			_, _ = io.WriteString(w, "two")
		case <-r.Context().Done():
		}
	}
}

func TestAttemptLastsUntilBodyIsRead(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		more := make(chan struct{})
		server := serve(t, http2, halves(more))
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		var inner watch
		resp, err := server.client(retries(3).Wrap, slots.Wrap, resilience.Timeout(time.Minute), inner.Wrap).Get(server.URL)
		require.NoError(t, err)
		_, err = io.ReadFull(resp.Body, make([]byte, 3))
		require.NoError(t, err)

		require.NoError(t, inner.ctxs[0].Err(), "the ctx of the attempt ended with RoundTrip")
		require.Equal(t, 1, slots.Stats().InFlight, "the slot was given back by RoundTrip")
		close(more)
		rest, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, "two", string(rest))
		require.Error(t, inner.ctxs[0].Err(), "the ctx of the attempt outlives its body")
		require.Zero(t, slots.Stats().InFlight, "the slot outlives the body")
		require.Equal(t, []error{nil}, inner.seen())
		require.NoError(t, resp.Body.Close())
	})
}

func TestAttemptLastsUntilBodyIsClosed(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		server := serve(t, http2, halves(nil))
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		var inner watch
		resp, err := server.client(slots.Wrap, inner.Wrap).Get(server.URL)
		require.NoError(t, err)
		require.Equal(t, 1, slots.Stats().InFlight)
		reading := make(chan error)
		go func() {
			_, err := io.ReadAll(resp.Body) // which Close interrupts
			reading <- err
		}()
		require.NoError(t, resp.Body.Close())
		require.Zero(t, slots.Stats().InFlight)
		require.Equal(t, []error{nil}, inner.seen(), "to have had enough is no failure")
		require.Error(t, <-reading)
		require.NoError(t, resp.Body.Close())
	})
}

func TestShortBodyIsReadBeforeRoundTripReturns(t *testing.T) {
	for name, c := range map[string]struct {
		method   string
		size     int
		declared bool
		early    bool
	}{
		"Short":           {"GET", 1, true, true},
		"LongestOfShort":  {"GET", 4 << 10, true, true},
		"Long":            {"GET", 4<<10 + 1, true, false},
		"OfUnknownLength": {"GET", 1, false, false},
		"RequestHasABody": {"PUT", 1, true, false}, // which may depend on what is in the response's
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, http2 bool) {
				want := strings.Repeat("0123456789", c.size/10+1)[:c.size]
				server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
					if c.declared {
						w.Header().Set("Content-Length", strconv.Itoa(c.size))
					}
					w.(http.Flusher).Flush()
					_, _ = io.WriteString(w, want)
				})
				var body io.Reader
				if c.method == "PUT" {
					body = strings.NewReader("x")
				}
				req, err := http.NewRequest(c.method, server.URL, body)
				require.NoError(t, err)
				slots := bulkhead.New(bulkhead.Config{Limit: 1})
				var inner watch
				resp, err := server.client(retries(3).Wrap, slots.Wrap, resilience.Timeout(time.Minute), inner.Wrap).Do(req)
				require.NoError(t, err)
				if c.early {
					requireNoCall(t) // though nobody has closed the body
					require.Zero(t, slots.Stats().InFlight)
					require.Equal(t, []error{nil}, inner.seen())
				} else {
					require.Equal(t, 1, slots.Stats().InFlight)
				}
				if c.declared {
					require.EqualValues(t, c.size, resp.ContentLength)
				}
				require.Equal(t, want, answer(t, resp, nil))
				require.Zero(t, slots.Stats().InFlight)
			})
		})
	}
}

// A RoundTripper that unpacks a body, say, may leave the Content-Length as it was.
func TestBodyOfAnotherLengthThanDeclared(t *testing.T) {
	for _, size := range []int{0, 1, 100, 64 << 10, 64<<10 + 1, 100 << 10} {
		want := strings.Repeat("x", size)
		closed := 0
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		transport := &resiliencehttp.Transport{Middleware: slots.Wrap, Base: roundTripper(func(*http.Request) (*http.Response, error) {
			resp := response(200, nil)
			resp.ContentLength, resp.Body = 10, closeCounter{strings.NewReader(want), &closed}
			return resp, nil
		})}
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
		require.Equal(t, size > 64<<10, slots.Stats().InFlight == 1, "too long to be read at once")
		require.Equal(t, want, answer(t, resp, err))
		require.Equal(t, 1, closed)
		require.Zero(t, slots.Stats().InFlight)
	}
}

func TestReadThatCloseInterruptsIsNoFailure(t *testing.T) {
	inner := &interruptedBody{reading: make(chan struct{}), closing: make(chan struct{}), read: make(chan struct{})}
	var seen watch
	transport := &resiliencehttp.Transport{Middleware: seen.Wrap, Base: roundTripper(func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Body: inner}, nil
	})}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.NoError(t, err)
	go func() {
		_, _ = resp.Body.Read(make([]byte, 1))
		close(inner.read)
	}()
	<-inner.reading
	require.NoError(t, resp.Body.Close())
	require.Equal(t, []error{nil}, seen.seen())
}

// An interruptedBody is read until it is closed, which takes until the reader
// has noticed.
type interruptedBody struct{ reading, closing, read chan struct{} }

func (b *interruptedBody) Read([]byte) (int, error) {
	close(b.reading)
	<-b.closing
	return 0, errors.New("read on closed body")
}

func (b *interruptedBody) Close() error {
	close(b.closing)
	<-b.read
	return nil
}

func TestAttemptEndsWithItsCtxThoughNobodyCloses(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		server := serve(t, http2, halves(nil))
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		done := make(chan error)
		ctx, cancel := context.WithCancelCause(t.Context())
		req, _ := http.NewRequestWithContext(ctx, "GET", server.URL, nil)
		resp, err := server.client(func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { err := next(ctx); done <- err; return err }
		}, retries(3).Wrap, slots.Wrap).Do(req)
		require.NoError(t, err)
		gaveUp := errors.New("gave up")
		cancel(gaveUp)
		require.ErrorIs(t, <-done, gaveUp)
		require.Zero(t, slots.Stats().InFlight)
		requireNoCall(t)
		_, err = io.ReadAll(resp.Body)
		require.Error(t, err)
		require.NoError(t, resp.Body.Close())
	})
}

func TestTimeoutCoversBody(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		for _, length := range []string{"", "6"} { // a short one is read before RoundTrip returns
			server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
				if length != "" {
					w.Header().Set("Content-Length", length)
				}
				halves(nil)(w, r)
			})
			var outer watch
			resp, err := server.client(outer.Wrap, retries(3).Wrap, resilience.Timeout(50*time.Millisecond)).Get(server.URL)
			if err == nil {
				_, err = io.ReadAll(resp.Body)
				require.NoError(t, resp.Body.Close())
			}
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorIs(t, outer.seen()[0], context.DeadlineExceeded)
		}
	})
}

func TestLongFailedResponseOutlivesItsAttempt(t *testing.T) {
	for _, byClose := range []bool{true, false} {
		var sent context.Context
		var inner watch
		transport := &resiliencehttp.Transport{
			Middleware: resilience.Chain(retries(1).Wrap, resilience.Timeout(time.Minute), inner.Wrap),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				sent = r.Context()
				require.NoError(t, sent.Err())
				return response(503, strings.NewReader(strings.Repeat("x", 100<<10))), nil
			}),
		}
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil).WithContext(ctx))
		require.NoError(t, err)
		require.Error(t, inner.ctxs[0].Err())
		require.NoError(t, sent.Err(), "the rest of the body is read under it")
		if byClose {
			require.NoError(t, resp.Body.Close())
		} else {
			cancel()
		}
		<-sent.Done()
		require.ErrorIs(t, sent.Err(), context.Canceled)
		cancel()
	}
}

func TestRequestIsNotSentUnderACtxThatOutlivesItsAttempt(t *testing.T) {
	policy, end := context.WithCancel(t.Context())
	defer end()
	var sent context.Context
	transport := &resiliencehttp.Transport{
		Middleware: func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { return next(both{policy, ctx}) }
		},
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			sent = r.Context()
			return response(200, strings.NewReader("ok")), nil
		}),
	}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.NoError(t, err)
	require.NoError(t, sent.Err())
	require.Equal(t, "ok", answer(t, resp, nil))
	require.ErrorIs(t, sent.Err(), context.Canceled)
	require.NoError(t, policy.Err())
}

// both is a ctx with the values of another.
type both struct {
	context.Context
	values context.Context
}

func (b both) Value(key any) any { return b.values.Value(key) }

func TestTimeoutEndsTheWaitForAResponse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		requests := 0
		transport := &resiliencehttp.Transport{
			Middleware: resilience.Chain(retries(2).Wrap, resilience.Timeout(time.Second)),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				deadline, ok := r.Context().Deadline()
				require.True(t, ok)
				require.Equal(t, time.Second, time.Until(deadline))
				if requests++; requests == 2 {
					return response(200, strings.NewReader("ok")), nil
				}
				derived, cancel := context.WithCancel(r.Context()) // as net/http has it
				defer cancel()
				<-derived.Done()
				require.ErrorIs(t, r.Context().Err(), context.DeadlineExceeded)
				require.ErrorIs(t, derived.Err(), context.DeadlineExceeded)
				_, ok = errors.AsType[*resilience.TimeoutError](context.Cause(r.Context()))
				require.True(t, ok)
				return nil, derived.Err()
			}),
		}
		start := time.Now()
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
		require.Equal(t, "ok", answer(t, resp, err))
		require.Equal(t, time.Second, time.Since(start))
	})
}

// breaksOff answers with half a body, of known length or not.
func breaksOff(declared bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if declared {
			w.Header().Set("Content-Length", "100")
		}
		_, _ = io.WriteString(w, "one")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}

func TestBodyThatBreaksOffIsAFailureAndNotRetried(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		for _, short := range []bool{true, false} {
			server := serve(t, http2, breaksOff(short))
			circuit := breaker.New(breaker.Config{Failures: 1})
			resp, err := server.client(retries(3).Wrap, circuit.Wrap).Get(server.URL)
			require.NoError(t, err)
			require.Equal(t, short, circuit.State() == breaker.Open)
			body, err := io.ReadAll(resp.Body)
			require.Error(t, err)
			if !http2 { // where it is a StreamError
				require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			}
			require.Equal(t, "one", string(body))
			require.Equal(t, breaker.Open, circuit.State())
			require.NoError(t, resp.Body.Close())
			require.EqualValues(t, 1, server.requests.Load())
		}
	})
}

func TestPolicyThatRetriesWhatItShouldNotDoesNotHoldTheCaller(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"Short":           breaksOff(true),
		"OfUnknownLength": breaksOff(false),
		"None":            func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) },
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, false, handler)
			always := retry.New(retry.Config{Attempts: -1, Backoff: retry.Constant(0), If: func(error) bool { return true }})
			slots := bulkhead.New(bulkhead.Config{Limit: 1})
			resp, err := server.client(always.Wrap, slots.Wrap).Post(server.URL, "", nil)
			require.NoError(t, err)
			_, err = io.ReadAll(resp.Body)
			require.Equal(t, name != "None", errors.Is(err, io.ErrUnexpectedEOF))
			require.NoError(t, resp.Body.Close())
			require.Zero(t, slots.Stats().InFlight)
			require.EqualValues(t, 1, server.requests.Load())
		})
	}
}

func TestUnreplayableFailureIsHandedOverAtOnce(t *testing.T) {
	more := make(chan struct{})
	server := serve(t, false, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(503)
		halves(more)(w, r)
	})
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	var seen watch
	resp, err := server.client(retries(3).Wrap, slots.Wrap, seen.Wrap).Post(server.URL, "", nil)
	require.NoError(t, err)
	require.Equal(t, 1, slots.Stats().InFlight)
	close(more)
	require.Equal(t, "onetwo", answer(t, resp, nil))
	require.Zero(t, slots.Stats().InFlight)
	_, ok := errors.AsType[*resiliencehttp.StatusError](seen.seen()[0])
	require.True(t, ok)
}

func TestCtxThatEndedBeforeTheResponseCame(t *testing.T) {
	// A Base that answers all the same: its body goes to the caller, who may never
	// close it.
	for _, status := range []int{200, 503} {
		ctx, cancel := context.WithCancel(t.Context())
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		transport := &resiliencehttp.Transport{
			Middleware: slots.Wrap,
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				cancel()
				runtime.Gosched() // the policies' goroutine may look now, or later
				return response(status, strings.NewReader("late")), nil
			}),
		}
		req := httptest.NewRequest("POST", "http://example.com", nil).WithContext(ctx)
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		requireNoCall(t)
		require.Zero(t, slots.Stats().InFlight)
		require.Equal(t, "late", answer(t, resp, nil))
	}
}

func TestPanicsPassThrough(t *testing.T) {
	type oops struct{ int }
	get := httptest.NewRequest("GET", "http://example.com", nil)
	ok := roundTripper(func(*http.Request) (*http.Response, error) { return response(200, strings.NewReader("ok")), nil })
	short := roundTripper(func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, ContentLength: 2, Body: io.NopCloser(strings.NewReader("ok"))}, nil
	})
	panics := roundTripper(func(*http.Request) (*http.Response, error) { panic(oops{1}) })
	crash := func(before bool, how func()) resilience.Middleware {
		return func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				if before {
					how()
				}
				err := next(ctx)
				how()
				return err
			}
		}
	}
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	free := func(t *testing.T) {
		require.Zero(t, slots.Stats().InFlight)
		requireNoCall(t)
	}

	t.Run("InBase", func(t *testing.T) {
		transport := &resiliencehttp.Transport{Base: panics, Middleware: slots.Wrap}
		require.PanicsWithValue(t, oops{1}, func() { _, _ = transport.RoundTrip(get) })
		free(t)
	})
	t.Run("InBaseAfterFailedResponse", func(t *testing.T) {
		closed, calls := 0, 0
		transport := &resiliencehttp.Transport{Middleware: resilience.Chain(retries(3).Wrap, slots.Wrap),
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				if calls++; calls == 2 {
					panic(oops{2})
				}
				resp := response(503, nil)
				resp.Body = closeCounter{strings.NewReader(strings.Repeat("x", 100<<10)), &closed}
				return resp, nil
			})}
		require.PanicsWithValue(t, oops{2}, func() { _, _ = transport.RoundTrip(get) })
		require.Equal(t, 1, closed)
		free(t)
	})
	t.Run("InPolicyAfterFailedResponse", func(t *testing.T) {
		closed := 0
		transport := &resiliencehttp.Transport{Middleware: resilience.Chain(slots.Wrap, crash(false, func() { panic(oops{7}) })),
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				resp := response(503, nil)
				resp.Body = closeCounter{strings.NewReader(strings.Repeat("x", 100<<10)), &closed}
				return resp, nil
			})}
		require.PanicsWithValue(t, oops{7}, func() { _, _ = transport.RoundTrip(get) })
		require.Equal(t, 1, closed)
		free(t)
	})
	t.Run("InClassify", func(t *testing.T) {
		closed := 0
		transport := &resiliencehttp.Transport{Middleware: slots.Wrap,
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				resp := response(200, nil)
				resp.Body = closeCounter{strings.NewReader("ok"), &closed}
				return resp, nil
			}),
			Classify: func(*http.Response) error { panic(oops{9}) },
		}
		require.PanicsWithValue(t, oops{9}, func() { _, _ = transport.RoundTrip(get) })
		require.Equal(t, 1, closed)
		free(t)
	})
	t.Run("InPolicyBefore", func(t *testing.T) {
		body := &trackedBody{Reader: strings.NewReader("")}
		transport := &resiliencehttp.Transport{Base: ok, Middleware: resilience.Chain(slots.Wrap, crash(true, func() { panic(oops{3}) }))}
		require.PanicsWithValue(t, oops{3}, func() { _, _ = transport.RoundTrip(httptest.NewRequest("PUT", "http://example.com", body)) })
		require.EqualValues(t, 1, body.closed.Load())
		free(t)
	})
	t.Run("InPolicyAfterBody", func(t *testing.T) {
		transport := &resiliencehttp.Transport{Base: ok, Middleware: resilience.Chain(slots.Wrap, crash(false, func() { panic(oops{4}) }))}
		resp, err := transport.RoundTrip(get)
		require.NoError(t, err)
		require.PanicsWithValue(t, oops{4}, func() { _, _ = io.ReadAll(resp.Body) })
		require.NoError(t, resp.Body.Close())
		free(t)
	})
	t.Run("InPolicyAfterTheEndOfCtx", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		transport := &resiliencehttp.Transport{Middleware: resilience.Chain(slots.Wrap, crash(false, func() { panic(oops{8}) })),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) { cancel(); return ok(r) })}
		resp, err := transport.RoundTrip(get.WithContext(ctx))
		require.NoError(t, err)
		require.PanicsWithValue(t, oops{8}, func() { _ = resp.Body.Close() })
		free(t)
	})
	t.Run("InPolicyAfterShortBody", func(t *testing.T) {
		transport := &resiliencehttp.Transport{Base: short, Middleware: resilience.Chain(slots.Wrap, crash(false, func() { panic(oops{6}) }))}
		require.PanicsWithValue(t, oops{6}, func() { _, _ = transport.RoundTrip(get) })
		free(t)
	})
	t.Run("MadeAnError", func(t *testing.T) {
		recovered := errors.New("recovered")
		calls := 0
		transport := &resiliencehttp.Transport{
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				if calls++; calls == 2 {
					return ok(r)
				}
				panic(oops{5})
			}),
			Middleware: func(next resilience.Func) resilience.Func {
				next = slots.Wrap(next)
				return func(ctx context.Context) (err error) {
					defer func() {
						if recover() != nil {
							err = recovered
						}
					}()
					return next(ctx)
				}
			},
		}
		_, err := transport.RoundTrip(get)
		require.ErrorIs(t, err, recovered)
		free(t)

		calls = 0
		var seen watch
		transport = &resiliencehttp.Transport{Base: transport.Base, Middleware: resilience.Chain(retries(2).Wrap, seen.Wrap, transport.Middleware)}
		resp, err := transport.RoundTrip(get)
		require.Equal(t, "ok", answer(t, resp, err))
		require.Equal(t, []error{recovered, nil}, seen.seen())
		free(t)
	})
	t.Run("Goexit", func(t *testing.T) {
		for name, transport := range map[string]*resiliencehttp.Transport{
			"InBase": {Middleware: slots.Wrap, Base: roundTripper(func(*http.Request) (*http.Response, error) {
				runtime.Goexit()
				return nil, nil
			})},
			"InPolicyBefore":         {Base: ok, Middleware: resilience.Chain(slots.Wrap, crash(true, runtime.Goexit))},
			"InPolicyAfterShortBody": {Base: short, Middleware: resilience.Chain(slots.Wrap, crash(false, runtime.Goexit))},
			"InPolicyAfterBody":      {Base: ok, Middleware: resilience.Chain(slots.Wrap, crash(false, runtime.Goexit))},
		} {
			t.Run(name, func(t *testing.T) {
				returned := false
				var wg sync.WaitGroup
				wg.Go(func() {
					resp, err := transport.RoundTrip(get)
					if err == nil {
						_, _ = io.ReadAll(resp.Body)
					}
					returned = true
				})
				wg.Wait()
				require.False(t, returned)
				free(t)
			})
		}
	})
}
