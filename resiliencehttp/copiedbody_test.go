package resiliencehttp_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/resiliencehttp"
)

// A POST that was never processed is sent again, with its body, whatever that is.
func TestUnprocessedPostIsSentAgain(t *testing.T) {
	for limit, sent := range map[int64]bool{0: false, 10: true, 1 << 20: true} {
		synctest.Test(t, func(t *testing.T) {
			base := serveMemory(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) }, nil)
			dial, dials := base.DialContext, 0
			base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if dials++; dials == 1 {
					return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
				}
				return dial(ctx, network, addr)
			}
			client := &http.Client{Transport: &resiliencehttp.Transport{
				Base: base, MaxBuffer: limit, Middleware: retries(2).Wrap,
			}}
			resp, err := client.Post("http://a/", "text/plain", &trackedBody{Reader: strings.NewReader("0123456789")})
			if sent {
				require.NoError(t, err)
				require.Equal(t, "0123456789", answer(t, resp, nil))
			} else {
				require.ErrorIs(t, err, syscall.ECONNREFUSED)
			}
		})
	}
}

// A Read that is under way when an attempt ends loses nothing for the next.
func TestCopiedBodyLosesNoReadInProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		body, writer := io.Pipe()
		attempts := 0
		transport := &resiliencehttp.Transport{MaxBuffer: 100, Middleware: retries(2).Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				if attempts++; attempts == 1 {
					go func() {
						b := make([]byte, 4)
						_, _ = io.ReadFull(r.Body, b)
						_, _ = r.Body.Read(b) // waits
					}()
					_, _ = io.WriteString(writer, "0123")
					synctest.Wait()
					return nil, errors.New("reset")
				}
				go func() {
					_, _ = io.WriteString(writer, "456789")
					_ = writer.Close()
				}()
				b, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				require.NoError(t, r.Body.Close())
				return response(200, strings.NewReader(string(b))), nil
			})}
		req, err := http.NewRequest("PUT", "http://a/", body)
		require.NoError(t, err)
		resp, err := transport.RoundTrip(req)
		require.Equal(t, "0123456789", answer(t, resp, err))
	})
}

// Bases that read for longer than their RoundTrip, all at once, get the body from its beginning.
func TestCopiedBodyIsReadByManyAtOnce(t *testing.T) {
	want := strings.Repeat("0123456789", 1000)
	for range 20 {
		var reads sync.WaitGroup
		body := &trackedBody{Reader: strings.NewReader(want)}
		transport := &resiliencehttp.Transport{MaxBuffer: 1 << 20, Middleware: retries(4).Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				reads.Go(func() {
					again, err := r.GetBody()
					if err != nil {
						return // the call has ended
					}
					var got strings.Builder
					for {
						n, err := io.CopyN(&got, again, 1+rand.Int64N(500))
						if n == 0 || err != nil {
							break
						}
						time.Sleep(time.Duration(rand.IntN(3)) * time.Microsecond)
					}
					_ = again.Close()
					if !strings.HasPrefix(want, got.String()) {
						t.Error("the body differs")
					}
				})
				_ = r.Body.Close()
				return nil, errors.New("reset")
			})}
		req, err := http.NewRequest("PUT", "http://a/", body)
		require.NoError(t, err)
		_, err = transport.RoundTrip(req)
		require.Error(t, err)
		reads.Wait()
		require.EqualValues(t, 1, body.closed.Load())
	}
}
