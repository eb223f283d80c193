package bulkhead_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

// get returns the status of an answer; 0 if there is none.
func get(ctx context.Context, client *http.Client, url string) int {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	res, err := client.Do(req)
	if err != nil {
		return 0
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return 0
	}
	return res.StatusCode
}

// A shop has a number of workers for all its pages. One page needs service A, the
// other service B.
type shop struct {
	url     string
	atA     atomic.Int64 // calls that hang there
	handled atomic.Int64 // requests that have a worker
}

const shopWorkers = 20

func openShop(t *testing.T, slotsOfA func(func(context.Context) error) func(context.Context) error) *shop {
	s := &shop{}
	unblock := make(chan struct{})
	a := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		s.atA.Add(1)
		<-unblock
	}))
	b := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	client := &http.Client{Transport: &http.Transport{}}
	page := func(call func(context.Context) error) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if err := call(r.Context()); errors.Is(err, bulkhead.ErrFull) {
				w.WriteHeader(http.StatusServiceUnavailable)
			} else if err != nil {
				w.WriteHeader(http.StatusBadGateway)
			}
		}
	}
	call := func(url string) func(context.Context) error {
		return func(ctx context.Context) error {
			if status := get(ctx, client, url); status != http.StatusOK {
				return errors.New("no answer")
			}
			return nil
		}
	}
	pages := http.NewServeMux()
	pages.Handle("/a", page(slotsOfA(call(a.URL))))
	pages.Handle("/b", page(call(b.URL)))
	workers := make(chan struct{}, shopWorkers)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case workers <- struct{}{}:
			defer func() { <-workers }()
			s.handled.Add(1)
			pages.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}))
	s.url = server.URL
	t.Cleanup(func() {
		close(unblock)
		server.Close()
		client.CloseIdleConnections()
		a.Close()
		b.Close()
	})
	return s
}

// visit asks for page A until everything has settled, then for page B, and returns
// how many visitors of B get an answer while A hangs, and how many goroutines the
// visitors of A have left behind.
func (s *shop) visit(t *testing.T, settled func(answeredA int64) bool) (answeredB, goroutines int) {
	before := runtime.NumGoroutine()
	client := &http.Client{Transport: &http.Transport{}}
	ctx, leave := context.WithCancel(t.Context())
	var visitors sync.WaitGroup
	defer visitors.Wait()
	defer client.CloseIdleConnections()
	defer leave()

	var answeredA atomic.Int64
	for range 100 {
		visitors.Go(func() {
			if get(ctx, client, s.url+"/a") == http.StatusServiceUnavailable {
				answeredA.Add(1)
			}
		})
	}
	require.Eventually(t, func() bool { return settled(answeredA.Load()) }, time.Minute, time.Millisecond)
	client.CloseIdleConnections()
	goroutines = runtime.NumGoroutine() - before
	for range 50 { // the goroutines of visitors that were answered take a moment to end
		time.Sleep(time.Millisecond)
		goroutines = min(goroutines, runtime.NumGoroutine()-before)
	}

	for range 10 {
		patience := 100 * time.Millisecond // is only waited for where no answer can come
		if s.handled.Load() > shopWorkers {
			patience = time.Minute
		}
		ctx, cancel := context.WithTimeout(ctx, patience)
		if get(ctx, client, s.url+"/b") == http.StatusOK {
			answeredB++
		}
		cancel()
	}
	return answeredB, goroutines
}

// The story of the pattern: service A hangs. Without a bulkhead, calls to it take
// every worker, and a visitor that only needs B gets nothing either.
func TestAServiceThatHangsDoesNotTakeTheOthersDown(t *testing.T) {
	var goroutines, goroutinesBare int
	t.Run("with a bulkhead", func(t *testing.T) {
		var answered int
		slots := bulkhead.New(bulkhead.Config{Name: "A", Limit: 5})
		s := openShop(t, slots.Wrap)
		answered, goroutines = s.visit(t, func(answeredA int64) bool { return answeredA == 95 && s.atA.Load() == 5 })
		require.Equal(t, 10, answered, "A hangs, and B answers everybody")
		require.EqualValues(t, 5, s.atA.Load())
		require.EqualValues(t, 5, slots.Stats().Admitted)
		require.EqualValues(t, 95, slots.Stats().Refused)
	})
	t.Run("without one", func(t *testing.T) {
		var answered int
		s := openShop(t, func(call func(context.Context) error) func(context.Context) error { return call })
		answered, goroutinesBare = s.visit(t, func(int64) bool { return s.atA.Load() == shopWorkers })
		require.Zero(t, answered, "every worker waits for A")
	})
	t.Logf("goroutines: %d with a bulkhead, %d without one", goroutines, goroutinesBare)
	require.Less(t, goroutines, goroutinesBare/2)
}
