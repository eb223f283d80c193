package resiliencegrpc_test

import (
	"context"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
)

// The tests of this file fail if grpc-go changes the texts that grpcgo.go reads. They pass with grpc-go v1.85.

// aging are the options of a server that closes each connection after 5s, and its streams 1s later.
var aging = grpc.KeepaliveParams(keepalive.ServerParameters{
	MaxConnectionAge: 5 * time.Second, MaxConnectionAgeGrace: time.Second,
})

// Twenty streams end with each of ten connections. No stream is refused, whether or not messages arrive.
func TestMaxConnectionAgeOpensNothing(t *testing.T) {
	for name, pause := range map[string]time.Duration{"events": time.Second, "quiet": time.Hour} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &service{list: func(_ int64, m *testpb.Message, s listStream) error {
					for s.Context().Err() == nil {
						select {
						case <-time.After(pause):
							_ = s.Send(m)
						case <-s.Context().Done():
						}
					}
					return s.Context().Err()
				}}
				b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
				client := inBubble(t, s, resiliencegrpc.Client{Middleware: b.Wrap}, aging)
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(time.Minute, cancel)
				var opened atomic.Int64
				var wg sync.WaitGroup
				for range 20 {
					wg.Go(func() {
						for ctx.Err() == nil {
							list, err := client.List(ctx, hello)
							if ctx.Err() == nil {
								require.NoError(t, err)
								opened.Add(1)
								_ = drain(list.Recv)
								time.Sleep(time.Millisecond) // until gRPC has another connection
							}
						}
					})
				}
				wg.Wait()
				require.GreaterOrEqual(t, opened.Load(), int64(180))
				stats := b.Stats()
				require.Zero(t, stats.Failed+stats.Refused)
			})
		})
	}
}

// The server allows one stream. Calls that end while they wait for it have no result, and were certainly not sent.
func TestWaitForStreamOpensNothing(t *testing.T) {
	timeout := resilience.Timeout(100 * time.Millisecond)
	for name, call := range map[string]func(context.Context, testpb.TestClient) error{
		"unary":  func(ctx context.Context, c testpb.TestClient) error { _, err := c.Create(ctx, hello); return err },
		"stream": func(ctx context.Context, c testpb.TestClient) error { return drainList(c.Run(ctx, hello)) },
	} {
		for _, ofCaller := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b, s := opensAtOnce(), &service{}
					mw := resilience.Chain(twice().Wrap, b.Wrap, timeout)
					if ofCaller {
						mw = resilience.Chain(twice().Wrap, b.Wrap)
					}
					client := inBubble(t, s, resiliencegrpc.Client{Middleware: mw}, grpc.MaxConcurrentStreams(1))
					chat, err := client.Chat(t.Context())
					require.NoError(t, err)
					require.NoError(t, chat.Send(hello))
					_, err = chat.Recv()
					require.NoError(t, err)
					for range 3 {
						ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
						err = call(ctx, client)
						cancel()
						requireCode(t, codes.DeadlineExceeded, err)
						require.Equal(t, breaker.Closed, b.State())
					}
					require.EqualValues(t, 1, s.calls.Load())
					require.NoError(t, chat.CloseSend())
					require.NoError(t, drain(chat.Recv))
					require.NoError(t, call(t.Context(), client))
				})
			})
		}
	}
}

// A wait for a connection counts against the server, unlike a wait for a stream.
func TestWaitForConnectionIsAFailure(t *testing.T) {
	for name, call := range map[string]func(context.Context, testpb.TestClient) error{
		"unary": func(ctx context.Context, c testpb.TestClient) error {
			_, err := c.Create(ctx, hello, grpc.WaitForReady(true))
			return err
		},
		"stream": func(ctx context.Context, c testpb.TestClient) error {
			return drainList(c.Run(ctx, hello, grpc.WaitForReady(true)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
				client := dial(t, "passthrough:bubble", resiliencegrpc.Client{
					Middleware: resilience.Chain(twice().Wrap, b.Wrap, resilience.Timeout(time.Second)),
				}, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
					<-ctx.Done()
					return nil, ctx.Err()
				}))
				requireCode(t, codes.DeadlineExceeded, call(t.Context(), client))
				require.Equal(t, breaker.Open, b.State())
			})
		})
	}
}

// If this process has no file descriptors or ports left, the server has not failed.
func TestOwnShortageOpensNothing(t *testing.T) {
	for errno, then := range map[syscall.Errno]breaker.State{
		syscall.EMFILE: breaker.Closed, syscall.EADDRNOTAVAIL: breaker.Closed, syscall.ECONNREFUSED: breaker.Open,
	} {
		t.Run(errno.Error(), func(t *testing.T) {
			b, attempts := breaker.New(breaker.Config{ConsecutiveFailures: 2}), 0
			client := dial(t, "passthrough:nowhere", resiliencegrpc.Client{
				Middleware: resilience.Chain(twice().Wrap, b.Wrap, counts(&attempts)),
			}, grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
				return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", errno)}
			}))
			_, err := client.Create(t.Context(), hello)
			requireCode(t, codes.Unavailable, err)
			require.Equal(t, 2, attempts)
			require.Error(t, drainList(client.Run(t.Context(), hello)))
			require.Equal(t, then, b.State())
		})
	}
}
