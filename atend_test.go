package resilience_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
)

// A meter is middleware of a user's own: it counts the calls that are under way, and
// notes how each of them ended.
type meter struct {
	mu       sync.Mutex
	inFlight int
	ends     []error
}

func (m *meter) Wrap(next resilience.Func) resilience.Func {
	return func(ctx context.Context) error {
		m.count(1)
		return resilience.AtEnd(ctx, next, func(err error) {
			m.count(-1)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.ends = append(m.ends, err)
		})
	}
}

func (m *meter) count(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inFlight += n
}

func (m *meter) underWay() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.inFlight
}

type backend func(*http.Request) (*http.Response, error)

func (f backend) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// serves is a backend that responds with a status and a body.
func serves(status int, body io.Reader) backend {
	return func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: status, Body: io.NopCloser(body), ContentLength: -1, Header: http.Header{}}, nil
	}
}

func TestAtEndWaitsForTheResponsesBody(t *testing.T) {
	full := bulkhead.New(bulkhead.Config{Limit: 1})
	_, err := full.Begin(t.Context())
	require.NoError(t, err)
	read := func(resp *http.Response) { _, _ = io.ReadAll(resp.Body) }
	nothing := func(*http.Response) {}
	for name, c := range map[string]struct {
		base     backend
		inside   resilience.Middleware
		consume  func(*http.Response) // what the caller does with the response
		underWay int                  // when RoundTrip has returned
		ends     func(error) bool     // which error f gets
	}{
		"Read": {serves(200, strings.NewReader("hello")), nil, read, 1, is(nil)},
		"Closed": {serves(200, strings.NewReader("hello")), nil,
			func(resp *http.Response) { _ = resp.Body.Close() }, 1, is(nil)},
		"BreaksOff": {serves(200, iotest.ErrReader(errDown)), nil, read, 1, is(errDown)},
		"NoBody":    {serves(204, strings.NewReader("")), nil, nothing, 0, is(nil)},
		"FailedStatus": {serves(503, strings.NewReader("")), nil, nothing, 0,
			func(err error) bool { return resilience.Retryable(err) }},
		"Fails":   {func(*http.Request) (*http.Response, error) { return nil, errDown }, nil, nothing, 0, is(errDown)},
		"Refused": {serves(200, strings.NewReader("")), full.Wrap, nothing, 0, resilience.Refused},
		"Panics":  {func(*http.Request) (*http.Response, error) { panic(errDown) }, nil, nothing, 0, notNil},
		"Exits": {func(*http.Request) (*http.Response, error) { runtime.Goexit(); return nil, nil }, nil,
			nothing, 0, notNil},
		"TimedOut": {slowBody(2 * time.Second), resilience.Timeout(time.Second), read, 1, is(context.DeadlineExceeded)},
		"NeverClosed": {slowBody(time.Hour), resilience.Timeout(time.Second),
			func(*http.Response) { time.Sleep(time.Minute) }, 1, is(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &meter{}
				transport := &resiliencehttp.Transport{Base: c.base, Middleware: resilience.Chain(m.Wrap, c.inside)}
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://backend/", nil)
				require.NoError(t, err)
				done := make(chan struct{})
				go func() { // which may end with the call
					defer close(done)
					defer func() { _ = recover() }()
					resp, _ := transport.RoundTrip(req)
					if !(resp == nil) {
						require.Equal(t, c.underWay, m.underWay(), "the response is there")
						c.consume(resp)
					}
				}()
				<-done
				synctest.Wait()
				require.Zero(t, m.underWay())
				require.Len(t, m.ends, 1)
				require.True(t, c.ends(m.ends[0]), "%v", m.ends[0])
			})
		})
	}
}

func is(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

func notNil(err error) bool { return err != nil }

// slowBody is a backend whose response has a body that is silent for d, or until its
// request's ctx ends.
func slowBody(d time.Duration) backend {
	return func(req *http.Request) (*http.Response, error) {
		return serves(200, readFunc(func([]byte) (int, error) {
			select {
			case <-time.After(d):
				return 0, io.EOF
			case <-req.Context().Done():
				return 0, req.Context().Err()
			}
		}))(req)
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

func TestAtEndWithoutWork(t *testing.T) {
	for name, c := range map[string]struct {
		fn   resilience.Func
		ends func(error) bool
	}{
		"Succeeds": {func(context.Context) error { return nil }, is(nil)},
		"Fails":    {func(context.Context) error { return errDown }, is(errDown)},
		"Panics":   {func(context.Context) error { panic(errDown) }, notNil},
		"Exits":    {func(context.Context) error { runtime.Goexit(); return nil }, notNil},
	} {
		t.Run(name, func(t *testing.T) {
			m := &meter{}
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }()
				err := m.Wrap(c.fn)(t.Context())
				require.True(t, c.ends(err))
			}()
			<-done
			require.Zero(t, m.underWay())
			require.Len(t, m.ends, 1)
			require.True(t, c.ends(m.ends[0]))
		})
	}
}
