package resiliencegrpc_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

func TestEmptyClientHasNoOptions(t *testing.T) {
	require.Empty(t, resiliencegrpc.Client{}.DialOptions())
}

func TestServerErrorIsUnchanged(t *testing.T) {
	s := &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) {
		return nil, status.Error(codes.NotFound, "no such user")
	}}
	_, lis := serve(t, s)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{
		Middleware: resilience.Chain(twice().Wrap, opensAtOnce().Wrap),
	})
	for range 3 {
		_, err := client.Get(t.Context(), hello)
		require.Equal(t, "rpc error: code = NotFound desc = no such user", err.Error())
	}
	client = dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: opensAtOnce().Wrap})
	_, err := client.Create(t.Context(), hello)
	require.IsType(t, status.Error(codes.NotFound, ""), err)
	require.NoError(t, drainList(client.List(t.Context(), hello)))
	require.EqualValues(t, 5, s.calls.Load(), "an answer is not retried and opens no breaker")
}

func TestRetryWaitsForRetryInfo(t *testing.T) {
	for _, h := range []struct {
		name string
		fail func(ctx context.Context) error
		wait time.Duration
	}{
		{"RetryInfo", func(context.Context) error {
			return withRetryInfo(codes.ResourceExhausted, 3*time.Second)
		}, 3 * time.Second},
		{"pushback", func(ctx context.Context) error {
			_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", "2000"))
			return status.Error(codes.Unavailable, "")
		}, 2 * time.Second},
		{"the longer one", func(ctx context.Context) error {
			_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", "5000"))
			return withRetryInfo(codes.Aborted, 3*time.Second)
		}, 5 * time.Second},
	} {
		t.Run(h.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &service{unary: func(ctx context.Context, n int64, m *testpb.Message) (*testpb.Message, error) {
					if n == 1 {
						return nil, h.fail(ctx)
					}
					return m, nil
				}}
				client := inBubble(t, s, resiliencegrpc.Client{Middleware: twice().Wrap})
				begun := time.Now()
				_, err := client.Get(t.Context(), hello)
				require.NoError(t, err)
				require.InEpsilon(t, h.wait*11/10, time.Since(begun), 0.1, "with a little jitter")
			})
		})
	}
}

func TestBreakerOpensForRetryInfo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{unary: func(ctx context.Context, n int64, m *testpb.Message) (*testpb.Message, error) {
			if n == 1 {
				return nil, withRetryInfo(codes.Unavailable, 7*time.Second)
			}
			return m, nil
		}}
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		client := inBubble(t, s, resiliencegrpc.Client{Middleware: b.Wrap})
		_, err := client.Get(t.Context(), hello)
		requireCode(t, codes.Unavailable, err)
		_, err = client.Get(t.Context(), hello)
		require.ErrorIs(t, err, breaker.ErrOpen)
		left := resilience.RetryAfter(err)
		require.InDelta(t, 7*time.Second, left, float64(7*time.Second/10), "and up to a tenth more")
		time.Sleep(left)
		_, err = client.Get(t.Context(), hello)
		require.NoError(t, err)
	})
}

func withRetryInfo(code codes.Code, after time.Duration) error {
	st, err := status.New(code, "come back later").WithDetails(retryInfo(after))
	if err != nil {
		return err
	}
	return st.Err()
}

// A refusal has a status that proxies and status.FromError understand. It still is the policy's error.
func TestRefusalHasStatus(t *testing.T) {
	_, lis := serve(t, &service{})
	full := bulkhead.New(bulkhead.Config{Name: "users", Limit: 1})
	spent := throttle.New(throttle.Config{Rate: 0.1, Burst: 1})
	open := opensAtOnce()
	open.ForceOpen(nil)
	for _, c := range []struct {
		name  string
		mw    resilience.Middleware
		is    error
		code  codes.Code
		after bool
	}{
		{"an open breaker", open.Wrap, breaker.ErrOpen, codes.Unavailable, true},
		{"a full bulkhead", full.Wrap, bulkhead.ErrFull, codes.Unavailable, false},
		{"a spent limit", spent.Wrap, throttle.ErrLimited, codes.ResourceExhausted, true},
		{"a retrier that gave up on one", func(next resilience.Func) resilience.Func {
			return twice().Wrap(full.Wrap(next))
		}, bulkhead.ErrFull, codes.Unavailable, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			hold(t, full)
			spent.Allow()
			client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: c.mw})
			for _, call := range []func() error{
				func() error { _, err := client.Create(t.Context(), hello); return err },
				func() error { _, err := client.List(t.Context(), hello); return err },
				func() error { _, err := client.Chat(t.Context()); return err },
			} {
				err := call()
				require.ErrorIs(t, err, c.is)
				require.True(t, resilience.Refused(err))
				st, ok := status.FromError(err)
				require.True(t, ok)
				require.Equal(t, c.code, st.Code())
				require.Equal(t, err.Error(), st.Message())
				require.Equal(t, c.after, retryInfoOf(st) > 0, "%v", st.Details())
			}
		})
	}
}

// hold keeps the only slot of b until the test ends.
func hold(t *testing.T, b *bulkhead.Bulkhead) {
	t.Helper()
	taken, leave := make(chan struct{}), make(chan struct{})
	over := make(chan struct{})
	go func() {
		defer close(over)
		_ = b.Do(context.Background(), func(context.Context) error {
			close(taken)
			<-leave
			return nil
		})
	}()
	<-taken
	t.Cleanup(func() { close(leave); <-over })
}

func retryInfoOf(st *status.Status) time.Duration {
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration()
		}
	}
	return 0
}

func TestEndOfCallersCtxHasStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{
			unary: func(ctx context.Context, _ int64, _ *testpb.Message) (*testpb.Message, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			},
			list: func(_ int64, _ *testpb.Message, s listStream) error {
				<-s.Context().Done()
				return s.Context().Err()
			},
		}
		b := opensAtOnce()
		var seen error
		look := func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { seen = next(ctx); return seen }
		}
		client := inBubble(t, s, resiliencegrpc.Client{Middleware: resilience.Chain(twice().Wrap, b.Wrap, look)})

		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := client.Get(canceled, hello)
		requireCode(t, codes.Canceled, err)
		require.ErrorIs(t, err, context.Canceled)
		_, err = client.List(canceled, hello)
		requireCode(t, codes.Canceled, err)
		require.Zero(t, s.calls.Load())

		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err = client.Get(short, hello)
		requireCode(t, codes.DeadlineExceeded, err)
		require.EqualValues(t, 1, s.calls.Load(), "the deadline of the caller is not retried")
		require.False(t, resilience.Retryable(seen))

		short, cancel = context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		requireCode(t, codes.DeadlineExceeded, drainList(client.List(short, hello)))
		require.EqualValues(t, 2, s.calls.Load())
		require.Equal(t, breaker.Closed, b.State(), "a deadline of a millisecond is too short to judge the server")
	})
}

func TestAttemptTimeoutIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{
			unary: func(ctx context.Context, n int64, m *testpb.Message) (*testpb.Message, error) {
				switch {
				case m.GetText() == "says so":
					return nil, status.Error(codes.DeadlineExceeded, "that of another service")
				case n == 1:
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return m, nil
			},
		}
		late := interceptUnary(false, func(ctx context.Context, req any, invoke resilience.Func) error {
			err := invoke(ctx)
			if req.(*testpb.Message).GetText() == "is of the client" {
				<-ctx.Done()
				return status.Error(codes.Internal, "late")
			}
			return err
		})
		client := inBubbleWith(t, s, resiliencegrpc.Client{
			Middleware: resilience.Chain(twice().Wrap, resilience.Timeout(time.Second)),
		}, late)
		_, err := client.Get(t.Context(), hello)
		require.NoError(t, err)
		require.EqualValues(t, 2, s.calls.Load())

		s.calls.Store(0)
		_, err = client.Create(t.Context(), hello)
		requireCode(t, codes.DeadlineExceeded, err)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		var timeout *resilience.TimeoutError
		require.ErrorAs(t, err, &timeout)
		require.EqualValues(t, 1, s.calls.Load(), "it may have been done")

		for _, text := range []string{"says so", "is of the client"} {
			s.calls.Store(1)
			_, err = client.Get(t.Context(), &testpb.Message{Text: text})
			require.Error(t, err)
			require.EqualValues(t, 2, s.calls.Load(), "no timeout of the attempt: it %s", text)
		}
	})
}

// If both kinds of retries applied, there would be 9 calls.
func TestServiceConfigRetriesAreDisabled(t *testing.T) {
	s := &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) {
		return nil, status.Error(codes.Unavailable, "")
	}}
	_, lis := serve(t, s)
	config := grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {
		"maxAttempts": 3, "initialBackoff": "0.001s", "maxBackoff": "0.001s", "backoffMultiplier": 1,
		"retryableStatusCodes": ["UNAVAILABLE"]}}]}`)
	retries := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(0)})
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: retries.Wrap}, config)
	_, err := client.Get(t.Context(), hello)
	require.ErrorIs(t, err, retry.ErrExhausted)
	requireCode(t, codes.Unavailable, err)
	require.EqualValues(t, 3, s.calls.Load())
}

func TestIdempotentReadsDescriptors(t *testing.T) {
	for method, want := range map[string]bool{
		testpb.Test_Get_FullMethodName:    true,
		testpb.Test_Put_FullMethodName:    true,
		testpb.Test_Create_FullMethodName: false,
		"/resilience.testing.Test/None":   false,
		"/resilience.testing.Message":     false,
		"/not.Registered/Get":             false,
		"":                                false,
	} {
		require.Equal(t, want, resiliencegrpc.Idempotent(method), method)
	}
}

func TestObserversKnowTheMethod(t *testing.T) {
	s := &service{unary: func(ctx context.Context, n int64, m *testpb.Message) (*testpb.Message, error) {
		m.Text = resiliencegrpc.MethodOf(ctx)
		if n == 1 {
			return nil, status.Error(codes.Unavailable, "down")
		}
		return m, nil
	}}
	_, lis := serve(t, s)
	var seen string
	var failed *resiliencegrpc.StatusError
	retries := retry.New(retry.Config{Backoff: retry.Constant(0)})
	retries.Observe(func(ctx context.Context, e retry.Event) {
		if e.Kind == retry.EventRetried {
			seen = resiliencegrpc.MethodOf(ctx)
			require.ErrorAs(t, e.Err, &failed)
		}
	})
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: retries.Wrap})
	m, err := client.Get(t.Context(), hello)
	require.NoError(t, err)
	require.Equal(t, testpb.Test_Get_FullMethodName, m.GetText())
	require.Equal(t, testpb.Test_Get_FullMethodName, seen)
	require.Equal(t, testpb.Test_Get_FullMethodName, failed.Method)
	require.Equal(t, codes.Unavailable, failed.Code)
	require.EqualError(t, failed,
		"resiliencegrpc: /resilience.testing.Test/Get: rpc error: code = Unavailable desc = down")
	require.Empty(t, resiliencegrpc.MethodOf(t.Context()))
}

// A message that is too large ends with RESOURCE_EXHAUSTED, like a call that was rejected for load.
func TestTooLargeMessageIsNotRetried(t *testing.T) {
	noLeaks(t)
	large := &testpb.Message{Payload: make([]byte, 5<<20)}
	s := &service{
		unary: func(_ context.Context, _ int64, m *testpb.Message) (*testpb.Message, error) { return large, nil },
		list: func(_ int64, _ *testpb.Message, s listStream) error {
			return s.Send(large)
		},
	}
	_, lis := serve(t, s)
	b := opensAtOnce()
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{
		Middleware: resilience.Chain(twice().Wrap, b.Wrap, slots.Wrap),
	})

	_, err := client.Get(t.Context(), hello)
	requireCode(t, codes.ResourceExhausted, err) // by the client, which receives
	require.EqualValues(t, 1, s.calls.Load())
	requireCode(t, codes.ResourceExhausted, drainList(client.List(t.Context(), hello)))
	require.EqualValues(t, 2, s.calls.Load())

	_, err = client.Get(t.Context(), large)
	requireCode(t, codes.ResourceExhausted, err) // by the server, which receives
	requireCode(t, codes.ResourceExhausted, drainList(client.List(t.Context(), large)))
	_, err = client.Get(t.Context(), large, grpc.MaxCallSendMsgSize(1<<20))
	requireCode(t, codes.ResourceExhausted, err) // by the client, which sends
	requireCode(t, codes.ResourceExhausted, drainList(client.List(t.Context(), large, grpc.MaxCallSendMsgSize(1<<20))))
	require.EqualValues(t, 2, s.calls.Load())

	up, err := client.Upload(t.Context(), grpc.MaxCallSendMsgSize(1<<20))
	require.NoError(t, err)
	requireCode(t, codes.ResourceExhausted, up.Send(large))
	_, err = up.CloseAndRecv()
	requireCode(t, codes.ResourceExhausted, err)

	require.Equal(t, breaker.Closed, b.State())
	require.Eventually(t, func() bool { return slots.Stats().InFlight == 0 }, time.Minute, time.Millisecond)
}

// A message of the client that cannot be encoded does not count, but one of the server is a failure.
func TestUnencodableAnswerIsServerFailure(t *testing.T) {
	_, lis := serve(t, &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) {
		return &testpb.Message{Text: "\xff"}, nil // not UTF-8
	}})
	b := opensAtOnce()
	_, err := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: b.Wrap}).Get(t.Context(), hello)
	requireCode(t, codes.Internal, err)
	require.Equal(t, breaker.Open, b.State())
}

// The caller gets the trailer of the last attempt.
func TestCallersOptionsApply(t *testing.T) {
	s := &service{unary: func(ctx context.Context, n int64, m *testpb.Message) (*testpb.Message, error) {
		_ = grpc.SetTrailer(ctx, metadata.Pairs("n", string(rune('0'+n))))
		if n == 1 {
			return nil, status.Error(codes.Unavailable, "")
		}
		return m, nil
	}}
	_, lis := serve(t, s)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: twice().Wrap})
	var trailer metadata.MD
	_, err := client.Get(t.Context(), hello, grpc.Trailer(&trailer))
	require.NoError(t, err)
	require.Equal(t, []string{"2"}, trailer.Get("n"))
}

func TestUnusualMiddleware(t *testing.T) {
	s := &service{unary: func(_ context.Context, _ int64, m *testpb.Message) (*testpb.Message, error) {
		if m.GetText() == "fail" {
			return nil, status.Error(codes.Internal, "failed")
		}
		return m, nil
	}}
	_, lis := serve(t, s)
	boom := errors.New("boom")
	get := func(t *testing.T, text string, mw resilience.Middleware) error {
		client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: mw})
		_, err := client.Get(t.Context(), &testpb.Message{Text: text})
		return err
	}
	stream := func(t *testing.T, mw resilience.Middleware) error {
		client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: mw})
		return drainList(client.List(t.Context(), hello))
	}
	t.Run("swallow a failure", func(t *testing.T) {
		err := get(t, "fail", resilience.Fallback(func(context.Context, error) error { return nil }))
		requireCode(t, codes.Internal, err)
	})
	t.Run("make no attempt", func(t *testing.T) {
		idle := func(resilience.Func) resilience.Func { return func(context.Context) error { return nil } }
		require.ErrorContains(t, get(t, "", idle), "made no attempt")
		require.ErrorContains(t, stream(t, idle), "made no attempt")
	})
	t.Run("lose the ctx", func(t *testing.T) {
		lost := func(next resilience.Func) resilience.Func {
			return func(context.Context) error { return next(context.Background()) }
		}
		require.ErrorContains(t, get(t, "", lost), "did not pass on the ctx")
		require.ErrorContains(t, stream(t, lost), "did not pass on the ctx")
	})
	t.Run("continue after success", func(t *testing.T) {
		s.calls.Store(0)
		again := func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { _ = next(ctx); return next(ctx) }
		}
		require.NoError(t, get(t, "", again))
		require.NoError(t, stream(t, again))
		require.EqualValues(t, 2, s.calls.Load())
	})
	t.Run("fail after success", func(t *testing.T) {
		spoil := func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { _ = next(ctx); return boom }
		}
		require.NoError(t, get(t, "", spoil))
		require.NoError(t, stream(t, spoil))
	})
	t.Run("return an error of its own", func(t *testing.T) {
		own := func(resilience.Func) resilience.Func { return func(context.Context) error { return boom } }
		require.Equal(t, boom, get(t, "", own))
		require.Equal(t, boom, stream(t, own))
	})
	t.Run("end its ctx", func(t *testing.T) {
		ended := func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				ctx, cancel := context.WithCancel(ctx)
				cancel()
				return next(ctx)
			}
		}
		require.ErrorIs(t, get(t, "", ended), context.Canceled)
		require.ErrorIs(t, stream(t, ended), context.Canceled)
	})
	t.Run("panic", func(t *testing.T) {
		panics := func(resilience.Func) resilience.Func { return func(context.Context) error { panic(boom) } }
		require.PanicsWithValue(t, boom, func() { _ = get(t, "", panics) })
		require.PanicsWithValue(t, boom, func() { _ = stream(t, panics) })
	})
	t.Run("panic after success", func(t *testing.T) {
		panics := func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { _ = next(ctx); panic(boom) }
		}
		require.PanicsWithValue(t, boom, func() { _ = get(t, "", panics) })
		require.PanicsWithValue(t, boom, func() { _ = stream(t, panics) })
	})
}

// An inner interceptor is called for each attempt. If it refuses an attempt, the attempt was not made.
func TestInnerInterceptorsAreAttempts(t *testing.T) {
	s := &service{}
	_, lis := serve(t, s)
	inner := throttle.New(throttle.Config{Rate: 0.001, Burst: 1})
	inner.Allow()
	b := opensAtOnce()
	retries := twice()
	outer := resiliencegrpc.Client{Middleware: resilience.Chain(retries.Wrap, b.Wrap)}
	client := dial(t, lis.Addr().String(), outer, resiliencegrpc.Client{Middleware: inner.Wrap}.DialOptions()...)
	_, err := client.Create(t.Context(), hello)
	require.ErrorIs(t, err, throttle.ErrLimited)
	_, err = client.Chat(t.Context())
	require.ErrorIs(t, err, throttle.ErrLimited)
	require.Equal(t, breaker.Closed, b.State())
	require.Zero(t, s.calls.Load())
}

func TestDroppedOptionsProveNothing(t *testing.T) {
	dropping := interceptUnary(true, func(ctx context.Context, _ any, invoke resilience.Func) error {
		return invoke(ctx)
	})
	s := &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) {
		return nil, status.Error(codes.Unavailable, "")
	}}
	_, lis := serve(t, s)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: twice().Wrap}, dropping)
	_, err := client.Create(t.Context(), hello)
	requireCode(t, codes.Unavailable, err)
	require.EqualValues(t, 1, s.calls.Load())
}

// A conn of a custom dialer may have no address.
type addrlessConn struct{ net.Conn }

func (addrlessConn) RemoteAddr() net.Addr { return nil }

func TestConnWithoutAddressIsNoProof(t *testing.T) {
	s := &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) {
		return nil, status.Error(codes.Unavailable, "")
	}}
	_, lis := serve(t, s)
	client := dial(t, "passthrough:x", resiliencegrpc.Client{Middleware: twice().Wrap},
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			conn, err := net.Dial("tcp", lis.Addr().String())
			return addrlessConn{conn}, err
		}))
	_, err := client.Create(t.Context(), hello)
	requireCode(t, codes.Unavailable, err)
	require.EqualValues(t, 1, s.calls.Load())
}

// If a policy recovers a panic, it is unknown whether the attempt was sent.
func TestNoRetryAfterPanic(t *testing.T) {
	s := &service{}
	_, lis := serve(t, s)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: resilience.Chain(twice().Wrap, recovers)},
		interceptUnary(false, func(ctx context.Context, _ any, invoke resilience.Func) error {
			_ = invoke(ctx)
			panic("boom")
		}))
	_, err := client.Create(t.Context(), hello)
	requireCode(t, codes.Unknown, err)
	require.EqualValues(t, 1, s.calls.Load())
	_, err = client.Get(t.Context(), hello)
	require.ErrorContains(t, err, "recovered: boom")
	require.EqualValues(t, 3, s.calls.Load())
}

// If the caller cancels a probe that hangs, the breakers of client and server do not close.
func TestCanceledCallIsIgnored(t *testing.T) {
	for name, c := range map[string]struct {
		sent bool
		call func(context.Context, testpb.TestClient) error
	}{
		"served": {true, func(ctx context.Context, c testpb.TestClient) error { _, err := c.Get(ctx, hello); return err }},
		"never sent": {false, func(ctx context.Context, c testpb.TestClient) error {
			_, err := c.Create(ctx, hello, grpc.WaitForReady(true))
			return err
		}},
		"a stream not open": {false, func(ctx context.Context, c testpb.TestClient) error {
			_, err := c.Chat(ctx, grpc.WaitForReady(true))
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				probing := func() *breaker.Breaker {
					b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
					_ = b.Do(t.Context(), func(context.Context) error { return errors.New("down") })
					return b
				}
				ours, theirs := probing(), probing()
				time.Sleep(2 * time.Second)
				s := &service{unary: func(ctx context.Context, _ int64, _ *testpb.Message) (*testpb.Message, error) {
					<-ctx.Done()
					return nil, ctx.Err()
				}}
				policies := resiliencegrpc.Client{Middleware: resilience.Chain(late, ours.Wrap)}
				client := inBubble(t, s, policies, resiliencegrpc.Server{Middleware: theirs.Wrap}.Options()...)
				if !c.sent {
					never := func(ctx context.Context, _ string) (net.Conn, error) {
						<-ctx.Done()
						return nil, ctx.Err()
					}
					client = dial(t, "passthrough:bubble", policies, grpc.WithContextDialer(never))
				}
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(time.Millisecond, cancel)
				requireCode(t, codes.Canceled, c.call(ctx, client))
				synctest.Wait()
				require.Equal(t, breaker.HalfOpen, ours.State())
				require.Equal(t, breaker.HalfOpen, theirs.State())
			})
		})
	}
}

// late is a policy whose ctx ends a moment after its caller's. Contexts that are derived from the same ctx end one
// after another, and this one ends last.
func late(next resilience.Func) resilience.Func {
	return func(caller context.Context) error {
		ctx, cancel := context.WithCancel(context.WithoutCancel(caller))
		defer cancel()
		defer context.AfterFunc(caller, func() { time.Sleep(time.Millisecond); cancel() })()
		return next(ctx)
	}
}

func drainList(s grpc.ServerStreamingClient[testpb.Message], err error) error {
	if err != nil {
		return err
	}
	return drain(s.Recv)
}

// Each row is a kind of status, as policies read it.
func TestStatusError(t *testing.T) {
	var fail error
	s := &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) { return nil, fail }}
	_, lis := serve(t, s)
	var seen error
	look := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { seen = next(ctx); return seen }
	}
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: look})
	for _, c := range []struct {
		err                                     error
		answered, retryable, throttled, timeout bool
		after                                   time.Duration
	}{
		{status.Error(codes.Unavailable, ""), false, true, false, false, 0},
		{withRetryInfo(codes.Unavailable, time.Second), false, true, true, false, time.Second},
		{status.Error(codes.DeadlineExceeded, ""), false, false, false, true, 0},
		{status.Error(codes.Internal, ""), false, false, false, false, 0},
		{withRetryInfo(codes.Internal, time.Second), false, true, false, false, time.Second},
		{status.Error(codes.ResourceExhausted, ""), true, false, false, false, 0},
		{withRetryInfo(codes.ResourceExhausted, time.Second), true, true, true, false, time.Second},
		{withRetryInfo(codes.ResourceExhausted, -time.Second), true, true, false, false, 0},
		{status.Error(codes.NotFound, ""), true, false, false, false, 0},
		{errors.New("plain"), false, false, false, false, 0},
	} {
		fail = c.err
		_, err := client.Get(t.Context(), hello)
		var e *resiliencegrpc.StatusError
		require.ErrorAs(t, seen, &e)
		require.Equal(t, err, e.Err)
		require.Equal(t, status.Code(err), e.Code)
		require.Equal(t, status.Code(err), e.GRPCStatus().Code())
		require.Equal(t, strings.ToUpper(e.Code.String()), strings.ReplaceAll(e.ErrorType(), "_", ""))
		require.Equal(t, c.answered, resilience.Answered(seen), "%v", c.err)
		require.Equal(t, c.retryable, resilience.Retryable(seen), "%v", c.err)
		require.Equal(t, c.throttled, e.Throttled(), "%v", c.err)
		require.Equal(t, c.timeout, e.Timeout(), "%v", c.err)
		require.Equal(t, c.after, resilience.RetryAfter(seen), "%v", c.err)

		_, err = client.Create(t.Context(), hello)
		require.Error(t, err)
		require.False(t, resilience.Retryable(seen), "%v", c.err)
		require.ErrorAs(t, seen, &e)
		require.False(t, e.Retryable(), "%v", c.err)
		require.Equal(t, c.answered, resilience.Answered(seen), "%v", c.err)
	}
}

// A call that is wrong in itself neither closes nor opens a breaker, and its caller does not get a refusal.
func TestWrongCallIsNoResult(t *testing.T) {
	invalid := &testpb.Message{Text: "\xff"} // not UTF-8
	withInvalid := func(ctx context.Context) context.Context { return metadata.AppendToOutgoingContext(ctx, "x", "\x00") }
	for name, call := range map[string]func(context.Context, testpb.TestClient) error{
		"metadata": func(ctx context.Context, c testpb.TestClient) error {
			_, err := c.Create(withInvalid(ctx), hello)
			return err
		},
		"metadata of a stream": func(ctx context.Context, c testpb.TestClient) error {
			return drainList(c.Run(withInvalid(ctx), hello))
		},
		"message": func(ctx context.Context, c testpb.TestClient) error {
			_, err := c.Create(ctx, invalid)
			return err
		},
		"message of an idempotent call": func(ctx context.Context, c testpb.TestClient) error {
			_, err := c.Get(ctx, invalid)
			return err
		},
	} {
		for _, wraps := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b, attempts := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second}), 0
					wrap := func(next resilience.Func) resilience.Func {
						return func(ctx context.Context) error {
							err := next(ctx)
							if err != nil && wraps {
								err = fmt.Errorf("wrapped: %w", err)
							}
							return err
						}
					}
					s := &service{}
					client := inBubble(t, s, resiliencegrpc.Client{
						Middleware: resilience.Chain(wrap, twice().Wrap, b.Wrap, counts(&attempts)),
					})
					b.Trip(errors.New("down"), time.Second)
					time.Sleep(time.Second)
					err := call(t.Context(), client)
					requireCode(t, codes.Internal, err)
					require.False(t, resilience.Refused(err))
					require.Equal(t, wraps, resilience.Answered(err), "gRPC's error has no method")
					require.Equal(t, 1, attempts)
					require.Zero(t, s.calls.Load())
					require.Equal(t, breaker.HalfOpen, b.State())
				})
			})
		}
	}
}
