package resiliencehttp_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

func TestMiddlewareOfNilPanicsWhenBuilt(t *testing.T) {
	for want, build := range map[string]func(){
		"resiliencehttp: Throttle needs a Limiter, not nil":  func() { resiliencehttp.Server{}.Throttle(nil) },
		"resiliencehttp: ThrottleBy needs a limit, not nil":  func() { resiliencehttp.Server{}.ThrottleBy(nil, nil) },
		"resiliencehttp: Bulkhead needs a Bulkhead, not nil": func() { resiliencehttp.Server{}.Bulkhead(nil) },
		"resiliencehttp: Health needs policies, not nil":     func() { resiliencehttp.Health(nil) },
	} {
		require.PanicsWithError(t, want, build)
	}
}

func TestBulkheadRefusesWhenFull(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	h := resiliencehttp.Server{}.Bulkhead(slots)(hello)
	require.Equal(t, "hello", get(h).Body.String())
	done, _ := slots.Begin(t.Context())
	w := get(h)
	require.Equal(t, 503, w.Code)
	require.Equal(t, "1", w.Header().Get("Retry-After"))
	require.Equal(t, problemTypes+"temporary-reduced-capacity", problemOf(t, w).Type)
	require.NotContains(t, w.Body.String(), "bulkhead", "how the server works is nobody's business")
	done(nil)
	require.Equal(t, 200, get(h).Code)
}

func TestRequestCannotChooseItsPriority(t *testing.T) {
	type account struct{}
	synctest.Test(t, func(t *testing.T) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 10, Levels: 2,
			Priority: func(ctx context.Context) int {
				if ctx.Value(account{}) == "paying" {
					return 0
				}
				return 1
			}})
		done, _ := slots.Begin(t.Context())
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

func TestBulkheadPanicFreesTheSlot(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	aborts := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	h := resiliencehttp.Server{}.Bulkhead(slots)(aborts)
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { get(h) })
	require.Zero(t, slots.Stats().InFlight)
}

func TestRefuse(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	retries := retry.New(retry.Config{Backoff: retry.Constant(0)})
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	tried := resilience.Chain(retries.Wrap,
		circuit.Wrap)(func(context.Context) error { return errors.New("down") })(t.Context())
	require.ErrorIs(t, tried, breaker.ErrOpen, "after an attempt")
	for name, c := range map[string]struct {
		err     error
		ctx     context.Context
		refused bool
		status  int
	}{
		"Nothing":  {nil, t.Context(), false, 200},
		"NoError":  {nil, gone, false, 200},
		"Other":    {errors.New("no such user"), t.Context(), false, 200},
		"Shed":     {&throttle.LimitedError{Reason: throttle.Shed}, t.Context(), true, 503},
		"Other's":  {overLimit{}, t.Context(), true, 429},
		"Limit":    {fmt.Errorf("asking: %w", &throttle.LimitedError{Reason: throttle.OverLimit}), t.Context(), true, 429},
		"Full":     {&bulkhead.FullError{}, t.Context(), true, 503},
		"Open":     {&breaker.OpenError{}, t.Context(), true, 503},
		"Upstream": {fmt.Errorf("asking: %w", &resiliencehttp.StatusError{StatusCode: 529}), t.Context(), true, 503},
		"Failure":  {&resiliencehttp.StatusError{StatusCode: 500}, t.Context(), false, 200},
		"Tried":    {tried, t.Context(), false, 200},
		"Deadline": {context.DeadlineExceeded, t.Context(), true, 503},
		"Late":     {context.DeadlineExceeded, late, true, 503},
		"Gone":     {&bulkhead.FullError{}, gone, true, 503},
		"Ended":    {context.Canceled, gone, true, 503},
		"Both":     {fmt.Errorf("%w, at last", throttle.ErrLimited), gone, true, 503}, // of a retrier, after attempts
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			require.Equal(t, c.refused, resiliencehttp.Server{}.Refuse(w,
				httptest.NewRequest("GET", "/", nil).WithContext(c.ctx), c.err))
			require.Equal(t, c.status, w.Code)
			require.Equal(t, c.status != 200, w.Body.Len() > 0)
		})
	}
}

// overLimit is the error of a limit that this module did not make.
type overLimit struct{ error }

func (overLimit) Refused() bool        { return true }
func (overLimit) Is(target error) bool { return target == throttle.ErrLimited }

func TestUploadsLeaveNoFiles(t *testing.T) {
	mw := resiliencehttp.Server{}.Bulkhead(bulkhead.New(bulkhead.Config{Limit: 9}))
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
}

// TestHalfClosedRequestIsServedOrRefused: net/http cancels the ctx of a request whose client closes
// its sending side and waits for the answer. Plain handlers answer all the same.
func TestHalfClosedRequestIsServedOrRefused(t *testing.T) {
	server := resiliencehttp.Server{}
	full := func() *bulkhead.Bulkhead { return bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1}) }
	limits := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1}})
	busy := full()
	done, _ := busy.Begin(t.Context())
	defer done(nil)
	over := throttle.New(throttle.Config{Rate: 0.001, Burst: 1, MaxWait: -1})
	over.Allow()
	for name, mw := range map[string]func(http.Handler) http.Handler{
		"Bulkhead":   server.Bulkhead(full()),
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
