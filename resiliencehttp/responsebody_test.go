package resiliencehttp_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/hedge"
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

func TestReadThatCloseInterruptsIsNoFailure(t *testing.T) {
	inner := &interruptedBody{reading: make(chan struct{}), closing: make(chan struct{}), read: make(chan struct{})}
	var seen watch
	transport := &resiliencehttp.Transport{Middleware: seen.Wrap,
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
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
	require.Empty(t, seen.broken())
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

// The first Read begins the time of Idle as Close ends the attempt.
func TestCloseDuringTheFirstRead(t *testing.T) {
	closed := make(chan struct{})
	transport := &resiliencehttp.Transport{Idle: time.Minute,
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
			body := readerFunc(func([]byte) (int, error) { <-closed; return 0, io.ErrClosedPipe })
			return response(200, body), nil
		})}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.NoError(t, err)
	var reading sync.WaitGroup
	reading.Go(func() { _, err = resp.Body.Read(make([]byte, 1)) })
	require.NoError(t, resp.Body.Close())
	close(closed)
	reading.Wait()
	require.ErrorIs(t, err, io.ErrClosedPipe)
}

// patiently calls get with ever longer limits until the limit passes after the
// response has come, however slow the machine is.
func patiently(t *testing.T, get func(limit time.Duration) (*http.Response, error)) (*http.Response, time.Duration) {
	t.Helper()
	for limit := 50 * time.Millisecond; ; limit *= 2 {
		resp, err := get(limit)
		if err == nil {
			return resp, limit
		}
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
}

func TestTimeoutCoversBody(t *testing.T) {
	timeout := func(d time.Duration) resilience.Middleware { return resilience.Timeout(d) }
	attempts := func(limit time.Duration) resilience.Middleware {
		return retry.New(retry.Config{Attempts: 1, AttemptTimeout: limit}).Wrap
	}
	long := timeout(time.Hour)
	for name, limited := range map[string]func(time.Duration) resilience.Middleware{
		"Timeout":              timeout,
		"AttemptTimeout":       attempts,
		"AroundAnother":        func(d time.Duration) resilience.Middleware { return resilience.Chain(timeout(d), derives) },
		"WithinAnother":        func(d time.Duration) resilience.Middleware { return resilience.Chain(derives, timeout(d)) },
		"AttemptWithinAnother": func(d time.Duration) resilience.Middleware { return resilience.Chain(derives, attempts(d)) },
		"TheShorterOfTwo": func(d time.Duration) resilience.Middleware {
			return resilience.Chain(derives,
				timeout(d), long)
		},
		"TheShorterOfTwoAgain": func(d time.Duration) resilience.Middleware {
			return resilience.Chain(derives, long,
				timeout(d))
		},
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, http2 bool) {
				for _, status := range []int{200, 503} {
					server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
						w.WriteHeader(status)
						halves(nil)(w, r)
					})
					var slots *bulkhead.Bulkhead
					resp, limit := patiently(t, func(limit time.Duration) (*http.Response, error) {
						slots = bulkhead.New(bulkhead.Config{Limit: 1})
						return server.client(slots.Wrap, limited(limit)).Post(server.URL, "", nil)
					})
					_, err := io.ReadAll(resp.Body)
					require.ErrorIs(t, err, context.DeadlineExceeded)
					if !http2 || !strings.Contains(name, "Attempt") { // else it is the bare error of the ctx
						require.ErrorContains(t, err, limit.String())
					}
					requireFree(t, slots)
					require.NoError(t, resp.Body.Close())
				}
			})
		})
	}
}

func TestProbeWhoseCallerLeavesHasShownNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		_ = circuit.Do(t.Context(), func(context.Context) error { return errors.New("down") })
		time.Sleep(2 * time.Second)
		transport := &resiliencehttp.Transport{
			Middleware: circuit.Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				return response(200, io.MultiReader(strings.NewReader("x"), readerFunc(func([]byte) (int, error) {
					<-r.Context().Done()
					return 0, r.Context().Err()
				}))), nil
			}),
		}
		for _, c := range []struct {
			leaves bool
			then   breaker.State
		}{{true, breaker.HalfOpen}, {false, breaker.Closed}} {
			ctx, cancel := context.WithCancel(t.Context())
			resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil).WithContext(ctx))
			require.NoError(t, err)
			_, err = resp.Body.Read(make([]byte, 1))
			require.NoError(t, err)
			if c.leaves {
				cancel()
				synctest.Wait()
			}
			require.NoError(t, resp.Body.Close(), "early, which is a good end if the caller is still there")
			require.Equal(t, c.then, circuit.State())
			cancel()
		}
	})
}

// The ways in which a body ends, and what the policies hear of that after the fact.
func TestPoliciesHearOfABodyThatBreaksOff(t *testing.T) {
	reset := errors.New("connection reset")
	ends := func(err error) func(*http.Request) io.Reader { // after a second
		return func(r *http.Request) io.Reader {
			return readerFunc(func([]byte) (int, error) {
				select {
				case <-time.After(time.Second):
					return 0, err
				case <-r.Context().Done():
					return 0, r.Context().Err()
				}
			})
		}
	}
	never := func(r *http.Request) io.Reader {
		return readerFunc(func([]byte) (int, error) {
			<-r.Context().Done()
			return 0, r.Context().Err()
		})
	}
	const limit = time.Minute
	for name, c := range map[string]struct {
		body    func(*http.Request) io.Reader
		policy  time.Duration // its timeout
		caller  time.Duration // its deadline
		cancel  time.Duration // by the caller
		idle    time.Duration // before the caller reads
		abandon bool          // nobody reads on
		broken  error
	}{
		"Whole":                 {body: ends(io.EOF)},
		"BrokenOff":             {body: ends(reset), broken: reset},
		"BrokenOffInTime":       {body: ends(reset), policy: limit, caller: 2 * limit, broken: reset},
		"HangsUntilTheTimeout":  {body: never, policy: limit, caller: 2 * limit, broken: context.DeadlineExceeded},
		"HangsUntilTheDeadline": {body: never, policy: 2 * limit, caller: limit, broken: context.DeadlineExceeded},
		"HangsUntilTheCancel":   {body: never, policy: 2 * limit, cancel: limit, broken: context.Canceled},
		"LeftUnread": {body: never, policy: 4 * limit, cancel: limit, idle: 2 * limit, abandon: true,
			broken: context.Canceled},
		"SlowReader":             {body: never, policy: limit, idle: 2 * limit},
		"SlowReaderOfTheCaller":  {body: never, caller: limit, idle: 2 * limit},
		"SlowReaderThatIsBroken": {body: ends(reset), policy: limit, idle: limit / 2, broken: reset},
		"NobodyReads":            {body: never, policy: limit, idle: 2 * limit, abandon: true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, mw := range []resilience.Middleware{nil, derives} {
				synctest.Test(t, func(t *testing.T) {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if c.caller > 0 {
						ctx, cancel = context.WithTimeout(ctx, c.caller)
						defer cancel()
					}
					if c.cancel > 0 {
						time.AfterFunc(c.cancel, cancel)
					}
					req := httptest.NewRequest("GET", "http://example.com", nil).WithContext(ctx)
					slots := bulkhead.New(bulkhead.Config{Limit: 1})
					var seen watch
					transport := &resiliencehttp.Transport{
						Middleware: resilience.Chain(slots.Wrap, seen.Wrap, mw, resilience.Timeout(c.policy)),
						Base: roundTripper(func(r *http.Request) (*http.Response, error) {
							body := c.body(r)
							if c.idle > 0 {
								body = io.MultiReader(strings.NewReader("x"), body)
							}
							return response(200, body), nil
						}),
					}
					resp, err := transport.RoundTrip(req)
					require.NoError(t, err)
					if c.idle > 0 {
						_, _ = resp.Body.Read(make([]byte, 1))
					}
					time.Sleep(c.idle)
					if !c.abandon {
						_, _ = io.ReadAll(resp.Body)
					}
					synctest.Wait()
					require.Zero(t, slots.Stats().InFlight)
					require.Equal(t, []error{nil}, seen.seen(), "it was judged when it came")
					if c.broken == nil {
						require.Empty(t, seen.broken())
						return
					}
					require.Len(t, seen.broken(), 1)
					require.ErrorIs(t, seen.broken()[0], c.broken)
					require.NoError(t, resp.Body.Close())
					require.Len(t, seen.broken(), 1)
				})
			}
		})
	}
}

// derives is a policy of other origin: most cancel the ctx that they derive when they
// return.
func derives(next resilience.Func) resilience.Func {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		return next(ctx)
	}
}

// TestCallBeforeTheRequestIsNoPartOfIt: middleware that first fetches a token under a breaker, say, has a call of
// its own that ends when it returns. The slot of the request is held all the same.
func TestCallBeforeTheRequestIsNoPartOfIt(t *testing.T) {
	tokens, slots := breaker.New(breaker.Config{}), bulkhead.New(bulkhead.Config{Limit: 1})
	authorize := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			if err := tokens.Do(ctx, func(context.Context) error { return nil }); err != nil {
				return err
			}
			return next(ctx)
		}
	}
	transport := &resiliencehttp.Transport{
		Middleware: resilience.Chain(authorize, slots.Wrap),
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			body := io.MultiReader(strings.NewReader("x"), iotest.ErrReader(io.ErrUnexpectedEOF))
			return &http.Response{StatusCode: 200, Body: io.NopCloser(body)}, nil
		}),
	}
	resp, err := (&http.Client{Transport: transport}).Get("http://a")
	require.NoError(t, err)
	require.Equal(t, 1, slots.Stats().InFlight)
	_, err = io.ReadAll(resp.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Zero(t, slots.Stats().InFlight)
	require.Equal(t, []int64{1, 0, 0, 0}, outcomes(tokens.Stats()))
}

func TestCtxThatAPolicyCancelsDoesNotCutTheBody(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		for _, status := range []int{200, 404, 503} {
			more := make(chan struct{})
			server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(status)
				halves(more)(w, r)
			})
			slots := bulkhead.New(bulkhead.Config{Limit: 1})
			var sent context.Context
			client := &http.Client{Transport: &resiliencehttp.Transport{
				Middleware: resilience.Chain(slots.Wrap, derives),
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					sent = r.Context()
					return server.Base.RoundTrip(r)
				}),
			}}
			resp, err := client.Post(server.URL, "", nil)
			require.NoError(t, err)
			require.Equal(t, status, resp.StatusCode)
			require.NoError(t, sent.Err())
			close(more)
			require.Equal(t, "onetwo", answer(t, resp, nil))
			require.ErrorIs(t, sent.Err(), context.Canceled)
			require.Zero(t, slots.Stats().InFlight)
		}
	})
}

// The next attempt may need what the response of the last one would hold.
func TestSuccessThatAPolicyMakesAnErrorHoldsNoSlot(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 1})
	tooLate := errors.New("too late")
	dislikes := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { return errors.Join(next(ctx), tooLate) }
	}
	server := serve(t, false, statuses("ok", 200))
	resp, err := server.client(retries(3).Wrap, slots.Wrap, dislikes, resilience.Timeout(time.Minute)).Get(server.URL)
	require.Zero(t, slots.Stats().InFlight)
	require.Equal(t, "ok", answer(t, resp, err))
	require.EqualValues(t, 1, server.requests.Load())
}

func TestInnerBreakerIgnoresTheCallersEnd(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		server := serve(t, http2, halves(nil))
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		ctx, cancel := context.WithCancelCause(t.Context())
		req, _ := http.NewRequestWithContext(ctx, "GET", server.URL, nil)
		resp, err := server.client(derives, circuit.Wrap).Do(req)
		require.NoError(t, err)
		cancel(errors.New("gave up"))
		_, err = io.ReadAll(resp.Body)
		require.Error(t, err)
		require.NoError(t, resp.Body.Close())
		requireNoCall(t)
		require.Equal(t, breaker.Closed, circuit.State())
	})
}

func TestResponseOfLengthZeroMayHaveATrailer(t *testing.T) {
	end := make(chan struct{})
	server := serve(t, true, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "0")
		w.Header().Set("Trailer", "Out")
		w.(http.Flusher).Flush()
		<-end
		w.Header().Set("Out", "and out")
	})
	resp, err := server.client(resilience.Timeout(time.Minute)).Get(server.URL)
	require.NoError(t, err)
	close(end)
	require.Empty(t, answer(t, resp, nil))
	require.Equal(t, "and out", resp.Trailer.Get("Out"))
}

// TestTrailerOfASlowFailureComesWithItsEnd, and not when the goroutine that reads ahead gets
// there, beside a caller that looks at it.
func TestTrailerOfASlowFailureComesWithItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failed := response(503, nil)
		failed.Trailer = http.Header{"Out": nil}
		failed.Body = io.NopCloser(readerFunc(func([]byte) (int, error) {
			time.Sleep(2 * time.Second)
			failed.Trailer["Out"] = []string{"out"} // as net/http does
			return 0, io.EOF
		}))
		transport := &resiliencehttp.Transport{Middleware: retries(1).Wrap,
			Base: roundTripper(func(*http.Request) (*http.Response, error) { return failed, nil })}
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
		require.NoError(t, err)
		time.Sleep(2 * time.Second)
		require.Equal(t, http.Header{"Out": nil}, resp.Trailer)
		require.Empty(t, answer(t, resp, nil))
		require.Equal(t, "out", resp.Trailer.Get("Out"))
	})
}

// A deafCtx ends a moment before those who wait for that hear of it.
type deafCtx struct {
	context.Context
	done chan struct{}
}

func (c deafCtx) Done() <-chan struct{} { return c.done }

func (c deafCtx) Err() error {
	select {
	case <-c.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

func TestReadThatBeginsAfterTheEndWaitsForNothing(t *testing.T) {
	for _, told := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ctx := deafCtx{t.Context(), make(chan struct{})}
			var seen watch
			transport := &resiliencehttp.Transport{Middleware: seen.Wrap,
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					return response(200, readerFunc(func([]byte) (int, error) {
						if told {
							synctest.Wait()
						}
						return 0, r.Context().Err()
					})), nil
				})}
			resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil).WithContext(ctx))
			require.NoError(t, err)
			close(ctx.done)
			_, err = resp.Body.Read(make([]byte, 1))
			require.Equal(t, context.DeadlineExceeded, err)
			require.Empty(t, seen.broken())
		})
	}
}

// A writableBody happens to have a method Write.
type writableBody struct {
	io.Reader
	io.Writer
}

func (writableBody) Close() error { return nil }

func TestBodyThatHappensToWriteIsNoConnection(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	calls := 0
	transport := &resiliencehttp.Transport{
		Middleware: resilience.Chain(retries(2).Wrap, slots.Wrap),
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
			calls++
			resp := response([]int{0, 503, 200}[calls], nil)
			resp.Body = writableBody{strings.NewReader("ok"), io.Discard}
			return resp, nil
		}),
	}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 2, calls)
	require.Zero(t, slots.Stats().InFlight)
}

func TestHookMayCloseTheBodyThatHasEnded(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	var resp *http.Response
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	circuit.Observe(func(context.Context, breaker.Event) {
		require.NoError(t, resp.Body.Close())
		require.Zero(t, slots.Stats().InFlight)
	})
	server := serve(t, false, breaksOff(false))
	resp, err := server.client(slots.Wrap, circuit.Wrap).Get(server.URL)
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.Error(t, err)
	require.Equal(t, breaker.Open, circuit.State())
}

// What a Base does for itself, such as to fetch a token, is none of the response.
func TestPoliciesOfBaseHoldNothingForTheResponse(t *testing.T) {
	tokens := bulkhead.New(bulkhead.Config{Limit: 1})
	outer := bulkhead.New(bulkhead.Config{Limit: 1})
	fetching, finish, fetched := make(chan struct{}), make(chan struct{}), make(chan error)
	transport := &resiliencehttp.Transport{Middleware: outer.Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			go func() {
				fetched <- tokens.Do(r.Context(), func(context.Context) error { close(fetching); <-finish; return nil })
			}()
			<-fetching
			return response(200, strings.NewReader("ok")), nil
		})}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.NoError(t, err)
	close(finish)
	require.NoError(t, <-fetched)
	require.Zero(t, tokens.Stats().InFlight)
	require.Equal(t, 1, outer.Stats().InFlight)
	require.Equal(t, "ok", answer(t, resp, nil))
	require.Zero(t, outer.Stats().InFlight)
}

func TestNothingIsLeftInTheCallersCtx(t *testing.T) {
	for name, c := range map[string]struct {
		mw     resilience.Middleware
		hedged bool
	}{
		"Slot":    {mw: bulkhead.New(bulkhead.Config{Limit: 1}).Wrap},
		"Timeout": {mw: resilience.Timeout(time.Minute)},
		"Hedge":   {hedged: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // fails if a goroutine still waits for the end of ctx
				ctx := deafCtx{t.Context(), make(chan struct{})}
				for _, status := range []int{200, 204, 503, 0} {
					transport := &resiliencehttp.Transport{Middleware: c.mw,
						Base: roundTripper(func(*http.Request) (*http.Response, error) {
							if status == 0 {
								return nil, io.ErrUnexpectedEOF
							}
							resp := response(status, strings.NewReader("ok"))
							if status == 204 {
								resp.Body = http.NoBody
							}
							return resp, nil
						})}
					if c.hedged {
						transport.Hedge = hedge.New[*http.Response](hedge.Config{Delay: time.Hour, Ratio: hedge.Unlimited})
					}
					resp, err := transport.RoundTrip(httptest.NewRequest("PUT", "http://example.com", nil).WithContext(ctx))
					require.Equal(t, status == 0, err != nil)
					if err == nil {
						require.NoError(t, resp.Body.Close())
					}
				}
			})
		})
	}
}

func TestResponseIsBasesOwnIfNothingIsHeldForIt(t *testing.T) {
	want := response(200, strings.NewReader("ok"))
	body := want.Body
	transport := &resiliencehttp.Transport{Middleware: retries(3).Wrap,
		Base: roundTripper(func(*http.Request) (*http.Response, error) { return want, nil })}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.NoError(t, err)
	require.Same(t, want, resp)
	require.True(t, body == resp.Body)
}

func TestCtxOfARequestEndsWithItsAttempt(t *testing.T) {
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

		transport = &resiliencehttp.Transport{Middleware: resilience.Timeout(time.Second),
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				<-r.Context().Done()
				return nil, r.Context().Err()
			})}
		_, err = transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
		require.EqualError(t, err, "resilience: timed out after 1s: context deadline exceeded", "it is said once")
	})
}

// net/http does not ask for a connection when the time is over.
func TestTimeoutDuringPrepareIsATimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		transport := &resiliencehttp.Transport{Base: &http.Transport{}, Middleware: resilience.Timeout(time.Second),
			Prepare: func(*http.Request) error { time.Sleep(2 * time.Second); return nil }}
		_, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.False(t, resilience.Answered(err), "the request is in order")
	})
}

// What a Base asks by the same Transport passes its policies, too.
func TestBaseMayAskItsOwnTransport(t *testing.T) {
	asked := 0
	var transport *resiliencehttp.Transport
	transport = &resiliencehttp.Transport{Middleware: retries(1).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			if asked++; asked == 1 {
				return transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil).WithContext(r.Context()))
			}
			return response(200, strings.NewReader("ok")), nil
		})}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.Equal(t, "ok", answer(t, resp, err))
	require.Equal(t, 2, asked)
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
		for _, declared := range []bool{true, false} {
			server := serve(t, http2, breaksOff(declared))
			circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
			resp, err := server.client(retries(3).Wrap, derives, circuit.Wrap).Get(server.URL)
			require.NoError(t, err)
			require.Equal(t, breaker.Closed, circuit.State())
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

func TestPolicyThatRetriesWhateverItGetsIsEnded(t *testing.T) {
	for name, size := range map[string]int{"None": 0, "Short": 10, "Long": 100 << 10} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, false, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(503)
				_, _ = io.WriteString(w, strings.Repeat("x", size))
			})
			always := retry.New(retry.Config{Attempts: retry.Unlimited, Backoff: retry.Constant(0),
				RetryIf: func(error) bool { return true }})
			slots := bulkhead.New(bulkhead.Config{Limit: 1})
			resp, err := server.client(always.Wrap, slots.Wrap).Post(server.URL, "", nil)
			require.Len(t, answer(t, resp, err), size)
			require.EqualValues(t, 1, server.requests.Load())
			require.Zero(t, slots.Stats().InFlight)

			circuit := breaker.New(breaker.Config{ConsecutiveFailures: 2})
			for range 2 {
				resp, err := server.client(always.Wrap, circuit.Wrap).Post(server.URL, "", nil)
				require.Len(t, answer(t, resp, err), size)
			}
			require.Equal(t, breaker.Open, circuit.State(), "each is a failure, and nothing else")

			stubborn := func(next resilience.Func) resilience.Func { // of other origin
				return func(ctx context.Context) error {
					for next(ctx) != nil {
					}
					return nil
				}
			}
			resp, err = server.client(stubborn, slots.Wrap).Post(server.URL, "", nil)
			require.Len(t, answer(t, resp, err), size)
		})
	}
	broken := errors.New("broken")
	always := retry.New(retry.Config{Attempts: retry.Unlimited, Backoff: retry.Constant(0),
		RetryIf: func(error) bool { return true }})
	for _, mw := range []resilience.Middleware{always.Wrap, resilience.Chain()} {
		transport := &resiliencehttp.Transport{Middleware: mw,
			Base: roundTripper(func(*http.Request) (*http.Response, error) { return nil, broken })}
		_, err := transport.RoundTrip(httptest.NewRequest("POST", "http://example.com", nil))
		require.Equal(t, broken, err)
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
	require.Zero(t, slots.Stats().InFlight, "to the policies it is over")
	close(more)
	require.Equal(t, "onetwo", answer(t, resp, nil))
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
				return response(status, strings.NewReader("late")), nil
			}),
		}
		req := httptest.NewRequest("POST", "http://example.com", nil).WithContext(ctx)
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		requireFree(t, slots)
		require.Equal(t, "late", answer(t, resp, nil))
	}
}

// crashes is a policy that calls how after what it wraps, or before.
func crashes(before bool, how func()) resilience.Middleware {
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

func TestPanicsPassThrough(t *testing.T) {
	type oops struct{ int }
	long := strings.Repeat("x", 100<<10)
	for name, c := range map[string]struct {
		base  func(call int, resp *http.Response) *http.Response
		outer resilience.Middleware
		inner resilience.Middleware
		class func(*http.Response, *resiliencehttp.Ahead) error
		again func(*http.Request) bool
		sent  int
	}{
		"InBase":         {base: func(int, *http.Response) *http.Response { panic(oops{1}) }},
		"InReplayable":   {again: func(*http.Request) bool { panic(oops{1}) }},
		"InPolicyBefore": {inner: crashes(true, func() { panic(oops{1}) })},
		"InPolicyAfter":  {inner: crashes(false, func() { panic(oops{1}) }), sent: 1},
		"InOuterPolicy":  {outer: crashes(false, func() { panic(oops{1}) }), sent: 1},
		"InClassify":     {class: func(*http.Response, *resiliencehttp.Ahead) error { panic(oops{1}) }, sent: 1},
		"InBaseAfterFailedResponse": {base: func(call int, resp *http.Response) *http.Response {
			if call == 2 {
				panic(oops{1})
			}
			resp.StatusCode = 503
			return resp
		}, sent: 1},
		"InPolicyAfterFailedResponse": {base: func(_ int, resp *http.Response) *http.Response {
			resp.StatusCode = 503
			return resp
		}, inner: crashes(false, func() { panic(oops{1}) }), sent: 1},
	} {
		t.Run(name, func(t *testing.T) {
			slots := bulkhead.New(bulkhead.Config{Limit: 1})
			calls, closed := 0, 0
			var sent context.Context
			transport := &resiliencehttp.Transport{
				Middleware: resilience.Chain(c.outer, retries(3).Wrap, slots.Wrap, c.inner, resilience.Timeout(time.Minute)),
				Judge:      c.class,
				Replayable: c.again,
				Base: roundTripper(func(r *http.Request) (*http.Response, error) {
					calls++
					sent = r.Context()
					resp := response(200, nil)
					resp.Body = closeCounter{strings.NewReader(long), &closed}
					if c.base != nil {
						resp = c.base(calls, resp)
					}
					return resp, nil
				}),
			}
			body := &trackedBody{Reader: strings.NewReader("")}
			req := httptest.NewRequest("PUT", "http://example.com", body)
			req.GetBody = func() (io.ReadCloser, error) { return body, nil }
			require.PanicsWithValue(t, oops{1}, func() { _, _ = transport.RoundTrip(req) })
			require.Equal(t, c.sent, closed)
			if calls == 0 {
				require.EqualValues(t, 1, body.closed.Load())
			} else {
				require.ErrorIs(t, sent.Err(), context.Canceled)
			}
			require.Zero(t, slots.Stats().InFlight)
		})
	}
}

// A panickingBody panics where it is told to.
type panickingBody struct {
	io.Reader
	inRead, inClose bool
	closed          int
}

func (b *panickingBody) Read(p []byte) (int, error) {
	if b.inRead {
		panic("read")
	}
	return b.Reader.Read(p)
}

func (b *panickingBody) Close() error {
	b.closed++
	if b.inClose {
		panic("close")
	}
	return nil
}

// A failed response is read ahead for a second, on another goroutine, which may go on after that.
func TestPanicOfAReadAheadReachesTheReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		transport := &resiliencehttp.Transport{Middleware: retries(1).Wrap,
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				read := 0
				return response(503, readerFunc(func([]byte) (int, error) {
					if read++; read == 1 {
						time.Sleep(2 * time.Second)
						panic("read")
					}
					return 0, io.EOF
				})), nil
			})}
		resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://h/", nil))
		require.NoError(t, err)
		require.PanicsWithValue(t, "read", func() { _, _ = io.ReadAll(resp.Body) })
		require.NoError(t, resp.Body.Close())
	})
}

func TestPanicsOfBodies(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	get := func() *http.Request { return httptest.NewRequest("PUT", "http://example.com", nil) }
	answers := func(status int, body io.ReadCloser) *resiliencehttp.Transport {
		return &resiliencehttp.Transport{
			Middleware: resilience.Chain(retries(3).Wrap, slots.Wrap),
			MaxBuffer:  100,
			Base: roundTripper(func(*http.Request) (*http.Response, error) {
				resp := response(status, nil)
				resp.Body = body
				return resp, nil
			}),
		}
	}

	resp, err := answers(200, &panickingBody{Reader: strings.NewReader("ok"), inClose: true}).RoundTrip(get())
	require.NoError(t, err)
	require.PanicsWithValue(t, "close", func() { _ = resp.Body.Close() })
	require.Zero(t, slots.Stats().InFlight)

	body := &panickingBody{inRead: true}
	require.PanicsWithValue(t, "read", func() { _, _ = answers(503, body).RoundTrip(get()) })
	require.Equal(t, 1, body.closed)
	require.Zero(t, slots.Stats().InFlight)

	sent := &panickingBody{}
	req := httptest.NewRequest("PUT", "http://example.com", nil)
	req.Body, req.ContentLength = sent, -1
	never := &resiliencehttp.Transport{Middleware: func(resilience.Func) resilience.Func { panic("never") }}
	require.PanicsWithValue(t, "never", func() { _, _ = never.RoundTrip(req) })
	require.PanicsWithValue(t, "never", func() { _, _ = never.RoundTrip(get()) })
	require.Equal(t, 1, sent.closed)
}

func TestPanicAtTheEndOfTheBody(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	circuit.Observe(func(context.Context, breaker.Event) { panic("oops") })
	transport := &resiliencehttp.Transport{Middleware: resilience.Chain(slots.Wrap, circuit.Wrap),
		Base: roundTripper(func(*http.Request) (*http.Response, error) { return response(200, broken{}), nil })}
	resp, err := transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
	require.NoError(t, err)
	require.PanicsWithValue(t, "oops", func() { _, _ = io.ReadAll(resp.Body) })
	require.Zero(t, slots.Stats().InFlight)
	require.NoError(t, resp.Body.Close())
}

func TestPanicKeepsItsStack(t *testing.T) {
	for name, transport := range map[string]*resiliencehttp.Transport{
		"InBase": {Middleware: retries(1).Wrap, Base: roundTripper(func(*http.Request) (*http.Response, error) {
			panicsDeepDown()
			return nil, nil
		})},
		"InPolicy": {Middleware: resilience.Chain(retries(1).Wrap, crashes(true, panicsDeepDown))},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				require.Equal(t, "deep down", recover())
				stack := make([]byte, 1<<16)
				require.Contains(t, string(stack[:runtime.Stack(stack, false)]), "panicsDeepDown")
			}()
			_, _ = transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
		})
	}
}

func panicsDeepDown() { panic("deep down") }

func TestGoexitPassesThrough(t *testing.T) {
	ok := roundTripper(func(*http.Request) (*http.Response, error) { return response(200, strings.NewReader("ok")), nil })
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	for name, transport := range map[string]*resiliencehttp.Transport{
		"InBase": {Middleware: slots.Wrap, Base: roundTripper(func(*http.Request) (*http.Response, error) {
			runtime.Goexit()
			return nil, nil
		})},
		"InPolicyBefore": {Base: ok, Middleware: resilience.Chain(slots.Wrap, crashes(true, runtime.Goexit))},
		"InPolicyAfter":  {Base: ok, Middleware: resilience.Chain(slots.Wrap, crashes(false, runtime.Goexit))},
	} {
		t.Run(name, func(t *testing.T) {
			returned := false
			var wg sync.WaitGroup
			wg.Go(func() {
				_, _ = transport.RoundTrip(httptest.NewRequest("GET", "http://example.com", nil))
				returned = true
			})
			wg.Wait()
			require.False(t, returned)
			require.Zero(t, slots.Stats().InFlight)
		})
	}
}

// Idle does not limit the time between two Reads, even if the Transport has read a part of the body ahead.
func TestPauseInAFailedResponseIsNotIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		long := strings.Repeat("x", 70<<10)
		transport := &resiliencehttp.Transport{
			Idle: 5 * time.Second, Middleware: retries(2).Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				resp := response(503, nil)
				resp.Body = &streamed{
					ctx: r.Context(), parts: []part{{2 * time.Second, long}, {time.Second, "end"}}, end: io.EOF,
				}
				return resp, nil
			}),
		}
		resp, err := transport.RoundTrip(request(t, "GET", "http://a/"))
		require.NoError(t, err)
		first := make([]byte, 10)
		_, err = io.ReadFull(resp.Body, first)
		require.NoError(t, err)
		time.Sleep(time.Minute)
		require.Equal(t, long+"end", string(first)+answer(t, resp, nil))
	})
}
