package adaptive_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/bulkhead/adaptive"
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

// A real server on loopback, whose capacity changes while the calls go on.
func TestAdaptiveFollowsARealServer(t *testing.T) {
	if testing.Short() {
		t.Skip("seconds")
	}
	var mu sync.Mutex
	wake := sync.NewCond(&mu)
	workers, busy := 20, 0
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		mu.Lock()
		for busy >= workers {
			wake.Wait()
		}
		busy++
		mu.Unlock()
		time.Sleep(20 * time.Millisecond)
		mu.Lock()
		busy--
		wake.Broadcast()
		mu.Unlock()
	}))
	defer server.Close()
	setWorkers := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		workers = n
		wake.Broadcast()
	}

	var limit atomic.Int64
	limit.Store(4)
	b := adaptive.New(adaptive.Config{
		Initial: 4,
	})
	onLimit(t, b, func(c change) {
		if !c.Probe {
			limit.Store(int64(c.To))
		}
	})
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	for range 80 {
		clients.Go(func() {
			for ctx.Err() == nil {
				err := b.Do(ctx, func(ctx context.Context) error {
					if get(ctx, client, server.URL) != http.StatusOK {
						return errors.New("no answer")
					}
					return nil
				})
				if errors.Is(err, bulkhead.ErrFull) {
					select {
					case <-ctx.Done():
					case <-time.After(10 * time.Millisecond):
					}
				}
			}
		})
	}
	until := func(ok func(limit int64) bool, what string) {
		require.Eventually(t, func() bool { return ok(limit.Load()) }, time.Minute, 10*time.Millisecond, what)
		t.Logf("%s: %d", what, limit.Load())
	}
	until(func(l int64) bool { return l >= 18 }, "grows to the capacity of 20")
	setWorkers(5)
	until(func(l int64) bool { return l <= 11 }, "shrinks to the capacity of 5")
	setWorkers(20)
	until(func(l int64) bool { return l >= 18 }, "grows again")
	stop()
	clients.Wait()
	client.CloseIdleConnections()
	requireIdle(t, b)
}
