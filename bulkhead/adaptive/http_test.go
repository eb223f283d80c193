package adaptive_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
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

// A pipes is a listener whose connections are in memory, so that time can be virtual.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if conn, ok := <-p; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}
func (p pipes) Close() error   { close(p); return nil }
func (p pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes"} }

func (p pipes) dial(context.Context, string, string) (net.Conn, error) {
	near, far := net.Pipe()
	p <- far
	return near, nil
}

// An HTTP server whose capacity changes while the calls go on.
func TestAdaptiveFollowsAServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		wake := sync.NewCond(&mu)
		workers, busy := 20, 0
		listener := make(pipes)
		server := http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
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
		})}
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		setWorkers := func(n int) {
			mu.Lock()
			defer mu.Unlock()
			workers = n
			wake.Broadcast()
		}

		b := adaptive.New(adaptive.Config{Initial: 4})
		client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100, DialContext: listener.dial}}
		ctx, stop := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		for range 80 {
			clients.Go(func() {
				for ctx.Err() == nil {
					err := b.Do(ctx, func(ctx context.Context) error {
						if get(ctx, client, "http://server") != http.StatusOK {
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
		until := func(ok func(limit int) bool, what string) {
			start := time.Now()
			for s := b.Stats(); s.Probing || !ok(s.Limit); s = b.Stats() {
				time.Sleep(time.Millisecond)
				require.Less(t, time.Since(start), 10*time.Second, "%s: %d", what, s.Limit)
			}
		}
		until(func(l int) bool { return l >= 18 }, "grows to the capacity of 20")
		setWorkers(5)
		until(func(l int) bool { return l <= 11 }, "shrinks to the capacity of 5")
		setWorkers(20)
		until(func(l int) bool { return l >= 18 }, "grows again")
		stop()
		clients.Wait()
		client.CloseIdleConnections()
		requireIdle(t, b)
		time.Sleep(time.Minute) // the server's last answers
		require.NoError(t, server.Close())
		<-served
	})
}
