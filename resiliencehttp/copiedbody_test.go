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
	"github.com/go-resilience/resilience/retry"
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
				Base: base, MaxBuffer: limit,
				Middleware: retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(time.Second)}).Wrap,
			}}
			start := time.Now()
			resp, err := client.Post("http://a/", "text/plain", &trackedBody{Reader: strings.NewReader("0123456789")})
			if sent {
				require.NoError(t, err)
				require.Equal(t, "0123456789", answer(t, resp, nil))
			} else {
				require.ErrorIs(t, err, syscall.ECONNREFUSED)
				require.Zero(t, time.Since(start), "waited for an attempt that cannot follow")
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

// bodyRequest returns a PUT of a body that http.NewRequest cannot rewind.
func bodyRequest(t *testing.T, source io.Reader) *http.Request {
	req, err := http.NewRequestWithContext(t.Context(), "PUT", "http://a/", &trackedBody{Reader: source})
	require.NoError(t, err)
	return req
}

func TestCopyThatIsGoneFails(t *testing.T) {
	const gone = "no copy of the part that was sent"
	var getBody func() (io.ReadCloser, error)
	transport := &resiliencehttp.Transport{MaxBuffer: 9, Middleware: retries(1).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			getBody = r.GetBody
			behind, err := r.GetBody()
			require.NoError(t, err)
			sent, err := io.ReadAll(r.Body)
			require.NoError(t, err)
			if len(sent) > 9 {
				_, err = behind.Read(make([]byte, 1))
				require.ErrorContains(t, err, gone)
				_, err = r.GetBody()
				require.ErrorContains(t, err, gone)
			}
			require.NoError(t, behind.Close())
			require.NoError(t, r.Body.Close())
			return response(200, strings.NewReader("")), nil
		})}
	for _, body := range []string{"0123456789", "012345678"} {
		resp, err := transport.RoundTrip(bodyRequest(t, strings.NewReader(body)))
		require.Empty(t, answer(t, resp, err))
		_, err = getBody()
		require.ErrorContains(t, err, gone, "the call has ended")
	}
}

func TestCopyLastsWhileTwoReadIt(t *testing.T) {
	var bodies []io.ReadCloser
	transport := &resiliencehttp.Transport{MaxBuffer: 10, Middleware: retries(1).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			again, err := r.GetBody()
			require.NoError(t, err)
			bodies = append(bodies, r.Body, again)
			return response(200, strings.NewReader("")), nil
		})}
	resp, err := transport.RoundTrip(bodyRequest(t, strings.NewReader("0123456789")))
	require.NoError(t, err)
	for _, body := range bodies { // a Base may send the body for longer than its RoundTrip
		sent, err := io.ReadAll(body)
		require.NoError(t, err)
		require.Equal(t, "0123456789", string(sent))
	}
	for _, body := range bodies {
		require.NoError(t, body.Close())
	}
	require.Empty(t, answer(t, resp, nil))
}

// A file, for example, may grow between two attempts.
func TestCopyEndsWhereTheBodyEnded(t *testing.T) {
	parts := []string{"abc", "", "def", ""}
	grows := readerFunc(func(p []byte) (int, error) {
		part := parts[0]
		if parts = parts[1:]; part == "" {
			return 0, io.EOF
		}
		return copy(p, part), nil
	})
	sent := 0
	transport := &resiliencehttp.Transport{MaxBuffer: 100, Middleware: retries(2).Wrap,
		Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			sent++
			b, err := io.ReadAll(r.Body)
			require.NoError(t, err)
			require.Equal(t, "abc", string(b))
			return nil, errors.New("reset")
		})}
	_, err := transport.RoundTrip(bodyRequest(t, grows))
	require.ErrorContains(t, err, "reset")
	require.Equal(t, 2, sent)
}

func TestReadThatOutlastsTheCallFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		parts := make(chan string, 1)
		source := readerFunc(func(p []byte) (int, error) { return copy(p, <-parts), nil })
		var late [2]error
		transport := &resiliencehttp.Transport{MaxBuffer: 100, Middleware: retries(1).Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				again, err := r.GetBody()
				require.NoError(t, err)
				parts <- "01234"
				bodies := []io.ReadCloser{r.Body, again}
				for i, body := range bodies {
					_, err := io.ReadFull(body, make([]byte, 5))
					require.NoError(t, err)
					go func() { _, late[i] = body.Read(make([]byte, 5)) }()
					synctest.Wait() // the first one reads the source, and the second one waits for it
				}
				for _, body := range bodies {
					require.NoError(t, body.Close())
				}
				return nil, errors.New("reset")
			})}
		_, err := transport.RoundTrip(bodyRequest(t, source))
		require.ErrorContains(t, err, "reset")
		parts <- "56"
		synctest.Wait()
		require.ErrorContains(t, late[1], "no copy of the part that was sent")
	})
}

// The race detector checks that a Read may pass MaxBuffer while the Transport decides about the next attempt.
func TestReadPassesMaxBufferBetweenAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := readerFunc(func(p []byte) (int, error) {
			time.Sleep(time.Second)
			return copy(p, "0123456789"), nil
		})
		transport := &resiliencehttp.Transport{MaxBuffer: 5,
			Middleware: retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(2 * time.Second)}).Wrap,
			Base: roundTripper(func(r *http.Request) (*http.Response, error) {
				go func() { _, _ = r.Body.Read(make([]byte, 10)) }()
				return nil, errors.New("reset")
			})}
		start := time.Now()
		_, err := transport.RoundTrip(bodyRequest(t, source))
		require.ErrorContains(t, err, "reset")
		require.Equal(t, 2*time.Second, time.Since(start))
	})
}
