package resiliencehttp_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

func TestMiddlewareOfNilPanicsWhenBuilt(t *testing.T) {
	for want, build := range map[string]func(){
		"resiliencehttp: Throttle needs a Limiter, not nil":  func() { resiliencehttp.Server{}.Throttle(nil) },
		"resiliencehttp: ThrottleBy needs a limit, not nil":  func() { resiliencehttp.Server{}.ThrottleBy(nil, nil) },
		"resiliencehttp: Bulkhead needs a Bulkhead, not nil": func() { resiliencehttp.Server{}.Bulkhead(nil) },
	} {
		require.PanicsWithError(t, want, build)
	}
}

func TestBulkheadRefusesWhenFull(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	h := resiliencehttp.Server{}.Bulkhead(slots)(hello)
	require.Equal(t, "hello", get(h).Body.String())
	done, _ := slots.TryBegin(t.Context())
	w := get(h)
	require.Equal(t, 503, w.Code)
	require.Equal(t, "1", w.Header().Get("Retry-After"))
	require.Equal(t, problemTypes+"temporary-reduced-capacity", problemOf(t, w).Type)
	require.NotContains(t, w.Body.String(), "bulkhead", "how the server works is nobody's business")
	done(nil)
	require.Equal(t, 200, get(h).Code)
}

func TestBulkheadQueueTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1, Queue: 1, MaxWait: time.Second})
		done, _ := slots.TryBegin(t.Context())
		defer done(nil)
		start := time.Now()
		require.Equal(t, 503, get(resiliencehttp.Server{}.Bulkhead(slots)(hello)).Code)
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestRequestCannotChooseItsPriority(t *testing.T) {
	type account struct{}
	synctest.Test(t, func(t *testing.T) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 10, Levels: 2, Priority: func(ctx context.Context) int {
			if ctx.Value(account{}) == "paying" {
				return 0
			}
			return 1
		}})
		done, _ := slots.TryBegin(t.Context())
		h := resiliencehttp.Server{}.Bulkhead(slots)(hello)
		claims := func(r *http.Request) {
			r.Header.Set("Priority", "u=0")
			r.Header.Set("X-Priority", "0")
			r.Header.Set("Account", "paying")
		}
		go get(h, claims)
		synctest.Wait()
		require.Equal(t, []int{0, 1}, slots.Stats().Queued)
		go get(h, func(r *http.Request) { *r = *r.WithContext(context.WithValue(t.Context(), account{}, "paying")) })
		synctest.Wait()
		require.Equal(t, []int{1, 1}, slots.Stats().Queued)
		done(nil)
		synctest.Wait()
		require.Zero(t, slots.Stats().InFlight)
	})
}

func TestClientThatHangsUpFreesItsPlaceAtOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 1})
		done, _ := slots.TryBegin(t.Context())
		ended := make(chan struct{})
		server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
			recorder := httptest.NewRecorder()
			resiliencehttp.Server{}.Bulkhead(slots)(hello).ServeHTTP(recorder, r)
			assert.Equal(t, 503, recorder.Code, "the client may have closed its sending side alone")
			close(ended)
		})
		ctx, cancel := context.WithCancel(t.Context())
		req, _ := http.NewRequestWithContext(ctx, "GET", server.URL, nil)
		go func() {
			for slots.Stats().Queued[0] == 0 {
				time.Sleep(time.Millisecond)
			}
			cancel()
		}()
		_, err := (&http.Client{Transport: server.Base}).Do(req)
		require.ErrorIs(t, err, context.Canceled)
		<-ended
		require.Zero(t, slots.Stats().Queued[0])
		require.Equal(t, 1, slots.Stats().InFlight)
		done(nil)
		require.Zero(t, slots.Stats().InFlight)
	})
}

func TestBulkheadPanicFreesTheSlot(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	h := resiliencehttp.Server{}.Bulkhead(slots)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { get(h) })
	require.Zero(t, slots.Stats().InFlight)
}

func TestGuardTellsABreakerOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		code := 200
		circuit := breaker.New(breaker.Config{Failures: 2, OpenFor: 10 * time.Second, Jitter: -1})
		h := resiliencehttp.Server{}.Guard(circuit.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(code)
			_, _ = io.WriteString(w, "as it is")
		}))
		for _, code = range []int{200, 404, 429, 501, 500, 503} {
			w := get(h)
			require.Equal(t, "as it is", w.Body.String())
			require.Empty(t, w.Header().Get("Retry-After"))
		}
		require.Equal(t, breaker.Open, circuit.State())
		time.Sleep(2500 * time.Millisecond)
		w := get(h)
		require.Equal(t, 503, w.Code)
		require.Equal(t, "8", w.Header().Get("Retry-After"))
		require.Equal(t, problemTypes+"temporary-reduced-capacity", problemOf(t, w).Type)
		time.Sleep(8 * time.Second)
		code = 200
		require.Equal(t, 200, get(h).Code)
		require.Equal(t, breaker.Closed, circuit.State())
		circuit.ForceOpen(nil)
		require.NotEmpty(t, get(h).Header().Get("Retry-After"), "nobody knows when, but not at once")
	})
}

func TestGuardIsToldTheFinalStatus(t *testing.T) {
	var seen watch
	server := serve(t, false, resiliencehttp.Server{}.Guard(seen.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(502)
		w.WriteHeader(200) // which net/http ignores
	})).ServeHTTP)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	resp, err := (&http.Client{Transport: server.Base}).Get(server.URL)
	answer(t, resp, err)
	require.Equal(t, 502, resp.StatusCode)
	status, ok := errors.AsType[*resiliencehttp.StatusError](seen.seen()[0])
	require.True(t, ok)
	require.Equal(t, 502, status.StatusCode)
	require.False(t, status.Retryable())
}

func TestGuardIsToldWhatWasWrittenFirst(t *testing.T) {
	for name, c := range map[string]struct {
		write  func(http.ResponseWriter)
		failed bool
	}{
		"Nothing":      {func(http.ResponseWriter) {}, false},
		"Write":        {func(w http.ResponseWriter) { _, _ = w.Write(nil) }, false},
		"WriteString":  {func(w http.ResponseWriter) { _, _ = w.(io.StringWriter).WriteString("") }, false},
		"ReadFrom":     {func(w http.ResponseWriter) { _, _ = w.(io.ReaderFrom).ReadFrom(strings.NewReader("x")) }, false},
		"ReadNothing":  {func(w http.ResponseWriter) { _, _ = w.(io.ReaderFrom).ReadFrom(strings.NewReader("")) }, true},
		"Flush":        {func(w http.ResponseWriter) { w.(http.Flusher).Flush() }, false},
		"EarlyHints":   {func(w http.ResponseWriter) { w.WriteHeader(http.StatusEarlyHints) }, true},
		"Switching":    {func(w http.ResponseWriter) { w.WriteHeader(http.StatusSwitchingProtocols) }, false},
		"OtherFailure": {func(w http.ResponseWriter) { w.WriteHeader(502) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			var seen watch
			get(resiliencehttp.Server{}.Guard(seen.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				c.write(w)
				if name != "Nothing" {
					w.WriteHeader(500) // which net/http ignores after any other status
				}
			})))
			require.Equal(t, c.failed, seen.seen()[0] != nil, "%v", seen.seen()[0])
		})
	}
}

func TestGuardServesOnce(t *testing.T) {
	var outer, inner watch
	served := 0
	twice := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { _ = next(ctx); return next(ctx) }
	}
	w := get(resiliencehttp.Server{}.Guard(resilience.Chain(outer.Wrap, twice, inner.Wrap))(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served++
		_, _ = io.WriteString(w, "once")
	})))
	require.Equal(t, 1, served)
	require.Equal(t, 200, w.Code)
	require.Equal(t, "once", w.Body.String())
	require.Len(t, inner.seen(), 2)
	require.NoError(t, inner.seen()[0])
	require.EqualError(t, outer.seen()[0], "resiliencehttp: the request has been served and is not served again")
	require.False(t, behavior.Read(outer.seen()[0]).Retryable)
}

func TestAbortedHandlerIsNotHeldAgainstIt(t *testing.T) {
	var inner, outer watch
	circuit := breaker.New(breaker.Config{Failures: 1})
	// A ctx of a policy's own ends with the one that it is derived from.
	h := resiliencehttp.Server{}.Guard(resilience.Chain(outer.Wrap, derives, circuit.Wrap, inner.Wrap))(
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }))
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { get(h) })
	require.Equal(t, breaker.Closed, circuit.State())
	for _, w := range []*watch{&inner, &outer} {
		require.Equal(t, behavior.Canceled, w.kinds[0])
		require.EqualError(t, w.seen()[0], "resiliencehttp: the handler aborted the response: context canceled")
	}

	// Not even if a policy makes something of it.
	calm := resilience.Fallback(func(context.Context, error) error { return nil })
	h = resiliencehttp.Server{}.Guard(calm)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }))
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { get(h) })
}

func TestOtherPanicsOfAHandlerPassThrough(t *testing.T) {
	circuit := breaker.New(breaker.Config{Failures: 1})
	h := resiliencehttp.Server{}.Guard(circuit.Wrap)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panicsDeepDown() }))
	func() {
		defer func() {
			require.Equal(t, "deep down", recover())
			stack := make([]byte, 1<<16)
			require.Contains(t, string(stack[:runtime.Stack(stack, false)]), "panicsDeepDown")
		}()
		get(h)
	}()
	require.Equal(t, breaker.Open, circuit.State())
}

func TestClientThatHangsUpIsNotHeldAgainstTheHandler(t *testing.T) {
	for name, finish := range map[string]func(w http.ResponseWriter, r *http.Request, err error){
		"Fails":  func(w http.ResponseWriter, r *http.Request, err error) { http.Error(w, err.Error(), 500) },
		"Panics": func(w http.ResponseWriter, r *http.Request, err error) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, http2 bool) {
				reading, ended := make(chan struct{}), make(chan struct{})
				var seen watch
				h := resiliencehttp.Server{}.Guard(seen.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					close(reading)
					_, err := io.Copy(io.Discard, r.Body) // a database that heeds ctx would do the same
					finish(w, r, err)
				}))
				server := serve(t, http2, func(w http.ResponseWriter, r *http.Request) {
					defer close(ended)
					h.ServeHTTP(w, r)
				})
				ctx, cancel := context.WithCancel(t.Context())
				body, writer := io.Pipe()
				req, _ := http.NewRequestWithContext(ctx, "POST", server.URL, body)
				go func() {
					_, _ = io.WriteString(writer, "half of i")
					<-reading
					cancel()
					_ = writer.CloseWithError(errors.New("gave up")) // net/http waits for what it reads
				}()
				_, err := (&http.Client{Transport: server.Base}).Do(req)
				require.Error(t, err)
				<-ended
				require.Equal(t, behavior.Canceled, seen.kinds[0], "%v", seen.seen()[0])
			})
		})
	}
}

// TestRequestThatCannotBeReadIsNotHeldAgainstTheHandler: with three such requests, any client could
// open the circuit of a reverse proxy, which answers 502, for all.
func TestRequestThatCannotBeReadIsNotHeldAgainstTheHandler(t *testing.T) {
	malformed := errors.New("invalid byte in chunk length")
	for name, c := range map[string]struct {
		err    error // of the body
		closed bool  // by the handler, before it reads
		status int
		want   behavior.Kind
	}{
		"Malformed": {malformed, false, 502, behavior.Canceled},
		"Closed":    {malformed, true, 502, behavior.Failed},
		"Whole":     {io.EOF, false, 502, behavior.Failed},
		"Answered":  {malformed, false, 400, behavior.Done},
	} {
		t.Run(name, func(t *testing.T) {
			var seen watch
			body := &trackedBody{Reader: io.MultiReader(strings.NewReader("x"), readerFunc(func([]byte) (int, error) { return 0, c.err }))}
			w := httptest.NewRecorder()
			resiliencehttp.Server{}.Guard(seen.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if c.closed {
					require.NoError(t, r.Body.Close())
				}
				_, _ = io.ReadAll(r.Body)
				w.WriteHeader(c.status)
			})).ServeHTTP(w, httptest.NewRequest("POST", "/", body))
			require.Equal(t, c.status, w.Code)
			require.Equal(t, []behavior.Kind{c.want}, seen.kinds)
			require.Equal(t, c.closed, body.closed.Load() == 1)
		})
	}
}

// TestRequestThatComesTooSlowlyIsNotHeldAgainstTheHandler: a client that sends its body slowly
// uses up the time of a handler, and could open the circuit of all with a few such requests.
func TestRequestThatComesTooSlowlyIsNotHeldAgainstTheHandler(t *testing.T) {
	read := func(r *http.Request) { _, _ = io.ReadAll(r.Body) }
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		status  int
		want    behavior.Kind // to a policy outside of the timeout
		within  behavior.Kind // and to one within it
	}{
		"Late": {func(_ http.ResponseWriter, r *http.Request) { read(r) }, 503, behavior.Answered, behavior.Answered},
		"Failed": {func(w http.ResponseWriter, r *http.Request) {
			read(r)
			w.WriteHeader(500)
		}, 500, behavior.Answered, behavior.Answered},
		"StillReading": {func(_ http.ResponseWriter, r *http.Request) {
			go read(r)
			<-r.Context().Done()
		}, 503, behavior.Answered, behavior.Answered},
		"Answered": {func(w http.ResponseWriter, r *http.Request) {
			read(r)
			w.WriteHeader(400)
		}, 400, behavior.Done, behavior.Done},
		"FailedInTime": {func(w http.ResponseWriter, r *http.Request) { // a reverse proxy whose server fails while it reads
			w.WriteHeader(502)
			go read(r)
			synctest.Wait()
			_ = r.Body.Close()
			<-r.Context().Done()
		}, 502, behavior.Failed, behavior.Overran},
		"FailedBeforeTheTimeout": {func(w http.ResponseWriter, r *http.Request) {
			go read(r)
			synctest.Wait()
			w.WriteHeader(502)
		}, 502, behavior.Failed, behavior.Failed},
		"ReadTooLate": {func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			go read(r)
			synctest.Wait()
		}, 503, behavior.Failed, behavior.Overran},
		"ReadInTime": {func(_ http.ResponseWriter, r *http.Request) {
			_, _ = r.Body.Read(make([]byte, 1))
			<-r.Context().Done()
		}, 503, behavior.Failed, behavior.Overran},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen, within watch
				slow := readerFunc(func([]byte) (int, error) { time.Sleep(time.Minute); return 0, io.EOF })
				defer time.Sleep(time.Minute) // until it has returned
				w := httptest.NewRecorder()
				resiliencehttp.Server{}.Guard(resilience.Chain(seen.Wrap, resilience.Timeout(time.Second), within.Wrap))(c.handler).
					ServeHTTP(w, httptest.NewRequest("POST", "/", io.MultiReader(strings.NewReader("x"), slow)))
				require.Equal(t, c.status, w.Code)
				require.Equal(t, []behavior.Kind{c.want}, seen.kinds)
				require.Equal(t, []behavior.Kind{c.within}, within.kinds)
			})
		})
	}
}

// A refusal further in is one, also if the body could not be read before.
func TestGuardIsToldOfARefusalOfARequestThatCannotBeRead(t *testing.T) {
	var seen watch
	resiliencehttp.Server{}.Guard(seen.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		require.Error(t, err)
		resiliencehttp.Server{}.Refuse(w, r, &bulkhead.FullError{})
	})).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/", broken{}))
	require.Equal(t, []behavior.Kind{behavior.Refused}, seen.kinds)
}

// Handlers look for these.
func TestGuardLeavesABodyThatIsNone(t *testing.T) {
	for _, body := range []io.ReadCloser{nil, http.NoBody} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Body = body
		resiliencehttp.Server{}.Guard(nil)(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			require.Equal(t, body, r.Body)
		})).ServeHTTP(httptest.NewRecorder(), r)
	}
}

// An untilDone is a body that does not come before ctx ends.
type untilDone struct{ context.Context }

func (r untilDone) Read([]byte) (int, error) { <-r.Done(); return 0, r.Err() }

func TestHandlerThatLeavesWithATimeoutHasFailed(t *testing.T) {
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		status  int
		failed  bool
	}{
		"NothingWritten": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("ETag", `"of the page"`)
			<-r.Context().Done()
		}, 503, true},
		"NothingCopied": {func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(w, untilDone{r.Context()})
		}, 503, true},
		"SomethingWritten": {func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(202)
			<-r.Context().Done()
		}, 202, false},
		"InTime": {func(http.ResponseWriter, *http.Request) {}, 200, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen watch
				calm := resilience.Fallback(func(context.Context, error) error { return nil })
				for _, mw := range []resilience.Middleware{nil, calm} {
					w := get(resiliencehttp.Server{}.Guard(resilience.Chain(mw, seen.Wrap, resilience.Timeout(time.Second)))(c.handler))
					require.Equal(t, c.status, w.Code)
					require.Equal(t, c.failed, seen.seen()[0] != nil)
					if c.failed {
						require.ErrorIs(t, seen.seen()[0], context.DeadlineExceeded)
						require.Equal(t, behavior.Failed, seen.kinds[0])
						require.Equal(t, problemTypes+"temporary-reduced-capacity", problemOf(t, w).Type)
						require.Empty(t, w.Header().Get("Content-Encoding"))
						require.Empty(t, w.Header().Get("ETag"))
					}
				}
			})
		})
	}

	// Nothing is written for a client that has gone.
	calm := resilience.Fallback(func(context.Context, error) error { return nil })
	for _, mw := range []resilience.Middleware{nil, calm} {
		ctx, cancel := context.WithCancel(t.Context())
		w := get(resiliencehttp.Server{}.Guard(mw)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { cancel() })),
			func(r *http.Request) { *r = *r.WithContext(ctx) })
		require.Zero(t, w.Body.Len())
	}
}

func TestGuardIsToldOfRefusalsFurtherIn(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	done, _ := slots.TryBegin(t.Context())
	defer done(nil)
	limit := throttle.New(throttle.Config{Rate: 0.001, Burst: 1})
	limit.Allow()
	open := breaker.New(breaker.Config{})
	open.ForceOpen(nil)
	for name, c := range map[string]struct {
		next   http.Handler
		is     error
		status int
	}{
		"Bulkhead": {resiliencehttp.Server{}.Bulkhead(slots)(hello), bulkhead.ErrFull, 503},
		"Throttle": {resiliencehttp.Server{}.Throttle(limit)(hello), throttle.ErrLimited, 429},
		"Guard":    {resiliencehttp.Server{}.Guard(open.Wrap)(hello), breaker.ErrOpen, 503},
		"Deeper":   {resiliencehttp.Server{}.Guard(nil)(resiliencehttp.Server{}.Bulkhead(slots)(hello)), bulkhead.ErrFull, 503},
		"Refuse": {http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			resiliencehttp.Server{}.Refuse(w, r, fmt.Errorf("asking: %w", slots.Do(r.Context(), func(context.Context) error { return nil })))
		}), bulkhead.ErrFull, 503},
	} {
		t.Run(name, func(t *testing.T) {
			var seen watch
			w := get(resiliencehttp.Server{}.Guard(seen.Wrap)(c.next))
			require.Equal(t, c.status, w.Code)
			require.ErrorIs(t, seen.seen()[0], c.is)
			require.Equal(t, behavior.Refused, behavior.Read(seen.seen()[0]).Kind)
		})
	}

	// What comes too late to be written is not what the client got.
	var seen watch
	get(resiliencehttp.Server{}.Guard(seen.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		resiliencehttp.Server{}.Refuse(w, r, &bulkhead.FullError{})
	})))
	require.Equal(t, []error{nil}, seen.seen())
}

func TestGuardUnderOtherPolicies(t *testing.T) {
	twice := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { _ = next(ctx); return next(ctx) }
	}
	answerTo := func(err error) resilience.Middleware {
		return func(resilience.Func) resilience.Func { return func(context.Context) error { return err } }
	}
	limit := throttle.New(throttle.Config{Rate: 0.001, Burst: 1})
	limit.Allow()
	for name, c := range map[string]struct {
		mw     resilience.Middleware
		status int
	}{
		"None":     {nil, 500},
		"Twice":    {twice, 500},
		"Limit":    {limit.Wrap, 429},
		"Error":    {answerTo(errors.New("no")), 503},
		"Limited":  {answerTo(throttle.ErrLimited), 429},
		"Shed":     {answerTo(&throttle.LimitedError{Reason: throttle.Shed}), 503},
		"Swallows": {answerTo(nil), 503},
		"LosesCtx": {func(next resilience.Func) resilience.Func {
			return func(context.Context) error { return next(context.Background()) }
		}, 503},
	} {
		t.Run(name, func(t *testing.T) {
			served := 0
			w := get(resiliencehttp.Server{}.Guard(c.mw)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				served++
				w.WriteHeader(500)
			})))
			require.Equal(t, c.status, w.Code)
			require.Equal(t, c.status == 500, served == 1)
		})
	}
}

func TestGuardPassesTheCtxOfThePolicies(t *testing.T) {
	h := resiliencehttp.Server{}.Guard(resilience.Timeout(time.Hour))(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, ok := r.Context().Deadline()
		require.True(t, ok)
	}))
	require.Equal(t, 200, get(h).Code)
}

func TestGuardKeepsWhatTheResponseWriterCanDo(t *testing.T) {
	onBoth(t, func(t *testing.T, http2 bool) {
		server := serve(t, http2, resiliencehttp.Server{}.Guard(nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, hijacks := w.(http.Hijacker)
			assert.Equal(t, !http2, hijacks)
			_, pushes := w.(http.Pusher)
			assert.Equal(t, http2, pushes)
			if r.Header.Get("Upgrade") != "" {
				upgrade(w, r)
				return
			}
			assert.NoError(t, http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Minute)))
			_, err := w.(io.ReaderFrom).ReadFrom(bytes.NewReader([]byte("copied")))
			assert.NoError(t, err)
			_, err = w.(io.StringWriter).WriteString(" and written")
			assert.NoError(t, err)
			w.(http.Flusher).Flush()
		})).ServeHTTP)
		client := &http.Client{Transport: server.Base}
		resp, err := client.Get(server.URL)
		require.Equal(t, "copied and written", answer(t, resp, err))
		if http2 {
			return
		}
		resp, err = client.Do(upgradeRequest(t, server.URL))
		require.NoError(t, err)
		requireEcho(t, resp.Body.(io.ReadWriter), "one")
		require.NoError(t, resp.Body.Close())
	})
}

// A brokenPipe is a ResponseWriter whose client has gone.
type brokenPipe struct{ http.ResponseWriter }

func (w brokenPipe) FlushError() error { return net.ErrClosed }

// A noFlush is a ResponseWriter that cannot flush.
type noFlush struct{ http.ResponseWriter }

func TestGuardTellsTheHandlerThatAFlushFailed(t *testing.T) {
	for want, w := range map[error]http.ResponseWriter{
		net.ErrClosed:        brokenPipe{httptest.NewRecorder()},
		http.ErrNotSupported: noFlush{httptest.NewRecorder()},
	} {
		var seen watch
		resiliencehttp.Server{}.Guard(seen.Wrap)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			require.ErrorIs(t, http.NewResponseController(w).Flush(), want)
			w.WriteHeader(500) // which counts if nothing has been flushed
		})).ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		require.Equal(t, want == http.ErrNotSupported, seen.seen()[0] != nil)
	}
}

// A hijackable is a ResponseRecorder whose connection is taken over, or not.
type hijackable struct {
	*httptest.ResponseRecorder
	err error
}

func (h hijackable) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, h.err }

// A wrapping writer is that of other middleware. It has no method but Unwrap of its own.
type wrapping struct{ http.ResponseWriter }

func (w wrapping) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func TestHandlerThatHasTakenTheConnectionIsAnsweredNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, refused := range []error{nil, http.ErrNotSupported} {
			for _, wrapped := range []bool{false, true} {
				w := hijackable{httptest.NewRecorder(), refused}
				var to http.ResponseWriter = w
				if wrapped {
					to = wrapping{wrapping{w}}
				}
				var seen watch
				resiliencehttp.Server{}.Guard(resilience.Chain(seen.Wrap, resilience.Timeout(time.Second)))(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, _, err := http.NewResponseController(w).Hijack()
					require.Equal(t, refused, err)
					<-r.Context().Done()
				})).ServeHTTP(to, httptest.NewRequest("GET", "/", nil))
				require.Equal(t, refused == nil, seen.seen()[0] == nil, "wrapped: %v", wrapped)
				require.Equal(t, refused == nil, w.Body.Len() == 0)
			}
		}
	})
}

func TestRefuse(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	retries := retry.New(retry.Config{Backoff: retry.Constant(0)})
	circuit := breaker.New(breaker.Config{Failures: 1})
	tried := resilience.Chain(retries.Wrap, circuit.Wrap)(func(context.Context) error { return errors.New("down") })(t.Context())
	require.ErrorIs(t, tried, breaker.ErrOpen, "after an attempt")
	for name, c := range map[string]struct {
		err     error
		ctx     context.Context
		refused bool
		status  int
	}{
		"Nothing":  {nil, t.Context(), false, 200},
		"Other":    {errors.New("no such user"), t.Context(), false, 200},
		"Limit":    {fmt.Errorf("asking: %w", &throttle.LimitedError{Reason: throttle.OverLimit}), t.Context(), true, 429},
		"Full":     {&bulkhead.FullError{}, t.Context(), true, 503},
		"Open":     {&breaker.OpenError{}, t.Context(), true, 503},
		"Tried":    {tried, t.Context(), false, 200},
		"Deadline": {context.DeadlineExceeded, t.Context(), true, 503},
		"Late":     {context.DeadlineExceeded, late, true, 503},
		"Gone":     {&bulkhead.FullError{}, gone, true, 503},
		"Ended":    {context.Canceled, gone, true, 503},
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			require.Equal(t, c.refused, resiliencehttp.Server{}.Refuse(w, httptest.NewRequest("GET", "/", nil).WithContext(c.ctx), c.err))
			require.Equal(t, c.status, w.Code)
			require.Equal(t, c.status != 200, w.Body.Len() > 0)
			if c.refused && name != "Ended" {
				require.Equal(t, c.status, resiliencehttp.Status(c.err))
			}
		})
	}
}

func TestStatus(t *testing.T) {
	require.Equal(t, 200, resiliencehttp.Status(nil))
	require.Equal(t, 500, resiliencehttp.Status(errors.New("no such user")))
	require.Equal(t, 503, resiliencehttp.Status(&throttle.LimitedError{Reason: throttle.Shed}))
}

// replacing returns the middleware that serves a copy of the request.
func replacing() map[string]func(http.Handler) http.Handler {
	return map[string]func(http.Handler) http.Handler{
		"Guard":      resiliencehttp.Server{}.Guard(nil),
		"Bulkhead":   resiliencehttp.Server{}.Bulkhead(bulkhead.New(bulkhead.Config{Limit: 9})),
		"BulkheadBy": resiliencehttp.Server{}.BulkheadBy(bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Limit: 9}}), nil),
	}
}

func TestUploadsLeaveNoFiles(t *testing.T) {
	for name, mw := range replacing() {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("TMPDIR", dir)
			kept := 0
			upload := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				assert.NoError(t, r.ParseMultipartForm(1<<20))
				files, _ := os.ReadDir(dir)
				kept += len(files)
				if r.URL.Path == "/panic" {
					panic("upload")
				}
			})
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer func() { _ = recover() }()
				mw(mw(upload)).ServeHTTP(w, r)
			}))
			for _, path := range []string{"/", "/panic"} {
				var body bytes.Buffer
				form := multipart.NewWriter(&body)
				part, _ := form.CreateFormFile("file", "file")
				_, _ = part.Write(make([]byte, 12<<20))
				require.NoError(t, form.Close())
				resp, err := http.Post(server.URL+path, form.FormDataContentType(), &body)
				answer(t, resp, err)
			}
			server.Close() // when all requests are done with
			files, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Empty(t, files)
			require.GreaterOrEqual(t, kept, 2)
		})
	}
}

func TestMiddlewareFurtherOutSeesWhatAMuxAndAHandlerSet(t *testing.T) {
	for name, mw := range replacing() {
		for _, end := range []func(){func() {}, func() { panic("end") }, runtime.Goexit} {
			r := httptest.NewRequest("GET", "/users/7/files/a/b", nil)
			form := new(multipart.Form)
			mux := http.NewServeMux()
			mux.HandleFunc("GET /users/{id}/files/{path...}", func(_ http.ResponseWriter, r *http.Request) {
				r.MultipartForm = form
				end()
			})
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }()
				mw(mux).ServeHTTP(httptest.NewRecorder(), r)
			}()
			<-done
			require.Same(t, form, r.MultipartForm, name)
			require.Equal(t, "GET /users/{id}/files/{path...}", r.Pattern, name)
			require.Equal(t, []string{"7", "a/b"}, []string{r.PathValue("id"), r.PathValue("path")}, name)
		}
	}
}

// TestHalfClosedRequestIsServedOrRefused: net/http cancels the ctx of a request whose client closes
// its sending side and waits for the answer. Plain handlers answer all the same.
func TestHalfClosedRequestIsServedOrRefused(t *testing.T) {
	server := resiliencehttp.Server{}
	full := func() *bulkhead.Bulkhead { return bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1}) }
	group := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Limit: 1}})
	limits := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1}})
	busy := full()
	done, _ := busy.TryBegin(t.Context())
	defer done(nil)
	over := throttle.New(throttle.Config{Rate: 0.001, Burst: 1, MaxWait: -1})
	over.Allow()
	for name, mw := range map[string]func(http.Handler) http.Handler{
		"Guard":      server.Guard(breaker.New(breaker.Config{}).Wrap),
		"GuardNil":   server.Guard(nil),
		"Bulkhead":   server.Bulkhead(full()),
		"BulkheadBy": server.BulkheadBy(group, nil),
		"Waiting":    server.Bulkhead(busy),
		"Throttle":   server.Throttle(throttle.New(throttle.Config{Rate: 1000})),
		"ThrottleBy": server.ThrottleBy(limits, nil),
		"Over":       server.Throttle(over),
	} {
		t.Run(name, func(t *testing.T) {
			called := false
			guarded := mw(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				called = true
				_, _ = io.WriteString(w, "hello")
			}))
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if name != "Waiting" && name != "Over" { // in these two it ends under way
					<-r.Context().Done()
				}
				guarded.ServeHTTP(w, r)
			}))
			defer s.Close()
			conn, err := net.Dial("tcp", s.Listener.Addr().String())
			require.NoError(t, err)
			defer conn.Close()
			_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
			require.NoError(t, err)
			require.NoError(t, conn.(*net.TCPConn).CloseWrite())
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			if called {
				require.Equal(t, []any{200, "hello"}, []any{resp.StatusCode, string(body)})
			} else {
				require.GreaterOrEqual(t, resp.StatusCode, 429)
				require.NotEmpty(t, body)
			}
		})
	}
}
