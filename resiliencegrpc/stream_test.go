package resiliencegrpc_test

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
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
)

// sendsTwo returns a handler that sends two messages, waits for more after each, and then returns err.
func sendsTwo(more <-chan struct{}, err error) func(int64, *testpb.Message, listStream) error {
	return func(_ int64, m *testpb.Message, s listStream) error {
		for range 2 {
			if err := s.Send(m); err != nil {
				return err
			}
			select {
			case <-more:
			case <-s.Context().Done():
				return s.Context().Err()
			}
		}
		return err
	}
}

func TestPoliciesGuardTheOpening(t *testing.T) {
	noLeaks(t)
	more := make(chan struct{})
	_, lis := serve(t, &service{list: sendsTwo(more, nil)})
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	held := 0
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: slots.Wrap},
		intercept(func(ctx context.Context, open opener) (grpc.ClientStream, error) {
			held += slots.Stats().InFlight
			return open(ctx)
		}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for opened := range 10 {
		list, err := client.List(ctx, hello)
		require.NoError(t, err)
		require.Equal(t, opened+1, held, "while it is opened")
		require.Zero(t, slots.Stats().InFlight, "an open stream holds no slot")
		_, err = list.Recv()
		require.NoError(t, err)
	}
	hold(t, slots)
	_, err := client.List(ctx, hello)
	require.ErrorIs(t, err, bulkhead.ErrFull)
}

// A Group does not evict a member while a stream of the member is open.
func TestStreamKeepsGroupMember(t *testing.T) {
	_, lis := serve(t, &service{})
	newBreaker := func(string) *breaker.Breaker { return opensAtOnce() }
	breakers := resilience.NewGroup(newBreaker, resilience.GroupConfig{MaxKeys: 1})
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: breakers.By(resiliencegrpc.MethodOf)})
	chat, err := client.Chat(t.Context())
	require.NoError(t, err)
	_, err = client.Get(t.Context(), hello)
	require.NoError(t, err)
	members := func() (keys []string) {
		for key := range breakers.All() {
			keys = append(keys, key)
		}
		return keys
	}
	require.Equal(t, []string{testpb.Test_Chat_FullMethodName}, members())
	require.NoError(t, chat.CloseSend())
	require.NoError(t, drain(chat.Recv))
	_, err = client.Get(t.Context(), hello)
	require.NoError(t, err)
	require.Equal(t, []string{testpb.Test_Get_FullMethodName}, members())
}

func TestBreakerCountsStreams(t *testing.T) {
	more := make(chan struct{}, 2)
	returns := func(err error) func(int64, *testpb.Message, listStream) error {
		return func(int64, *testpb.Message, listStream) error { return err }
	}
	for _, c := range []struct {
		name  string
		list  func(int64, *testpb.Message, listStream) error
		end   codes.Code
		then  breaker.State
		calls int64 // number of calls that succeeded
	}{
		{"ends well", sendsTwo(more, nil), codes.OK, breaker.Closed, 1},
		{"is empty", returns(nil), codes.OK, breaker.Closed, 1},
		{"fails at once", returns(status.Error(codes.Unavailable, "")), codes.Unavailable, breaker.Open, 0},
		{"is answered at once", returns(status.Error(codes.NotFound, "")), codes.NotFound, breaker.Closed, 1},
		{"breaks", sendsTwo(more, status.Error(codes.Unavailable, "")), codes.Unavailable, breaker.Open, 1},
		{"is answered", sendsTwo(more, status.Error(codes.NotFound, "")), codes.NotFound, breaker.Closed, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			more <- struct{}{}
			more <- struct{}{}
			defer func() {
				for len(more) > 0 {
					<-more
				}
			}()
			_, lis := serve(t, &service{list: c.list})
			b := opensAtOnce()
			ends := make(chan error, 1)
			client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: resilience.Chain(b.Wrap, observes(ends))})
			requireCode(t, c.end, drainList(client.List(t.Context(), hello)))
			require.Equal(t, c.then, b.State())
			require.Equal(t, c.then == breaker.Open, <-ends != nil)
			require.EqualValues(t, c.calls, b.Stats().Succeeded, "when it was answered")
		})
	}
	t.Run("caller cancels", func(t *testing.T) {
		_, lis := serve(t, &service{list: sendsTwo(make(chan struct{}), nil)})
		b := opensAtOnce()
		ends, why := make(chan error, 1), errors.New("why")
		client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: resilience.Chain(b.Wrap, observes(ends))})
		for _, receiving := range []bool{false, true} {
			ctx, cancel := context.WithCancelCause(t.Context())
			list, err := client.List(ctx, hello)
			require.NoError(t, err)
			_, err = list.Recv()
			require.NoError(t, err)
			time.AfterFunc(time.Millisecond, func() { cancel(why) })
			if receiving {
				_, err = list.Recv()
				requireCode(t, codes.Canceled, err)
			}
			end := <-ends
			require.ErrorIs(t, end, context.Canceled)
			require.ErrorIs(t, end, why)
			require.Equal(t, breaker.Closed, b.State())
		}
	})
	t.Run("caller cancels a probe", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
			client := inBubble(t, &service{list: sendsTwo(make(chan struct{}), nil)}, resiliencegrpc.Client{Middleware: b.Wrap})
			_ = b.Do(t.Context(), func(context.Context) error { return errors.New("down") })
			time.Sleep(2 * time.Second)
			ctx, cancel := context.WithCancel(t.Context())
			list, err := client.List(ctx, hello)
			require.NoError(t, err)
			_, err = list.Recv()
			require.NoError(t, err)
			cancel()
			synctest.Wait()
			require.Equal(t, breaker.HalfOpen, b.State(), "the probe has no result")
		})
	})
}

// A stream ends before the policies have returned, or before it is open.
func TestEarlyEndIsObserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ends := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		leaves := func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				err := next(ctx)
				cancel()
				synctest.Wait()
				return err
			}
		}
		client := inBubble(t, &service{list: sendsTwo(make(chan struct{}), nil)}, resiliencegrpc.Client{
			Middleware: resilience.Chain(observes(ends), leaves),
		})
		_, err := client.List(ctx, hello)
		require.NoError(t, err)
		require.ErrorIs(t, <-ends, context.Canceled)

		client = inBubbleWith(t, &service{}, resiliencegrpc.Client{Middleware: observes(ends)},
			intercept(func(ctx context.Context, open opener) (grpc.ClientStream, error) {
				stream, err := open(ctx)
				require.NoError(t, err)
				require.NoError(t, stream.CloseSend())
				require.NoError(t, stream.RecvMsg(new(testpb.Message)), "which is its end")
				return stream, nil
			}))
		_, err = client.Upload(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		require.Len(t, ends, 1)
		require.NoError(t, <-ends)
	})
}

// If Send returns io.EOF, the status that Recv returns counts.
func TestStatusCountsAfterFailedSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{chat: func(int64, chatStream) error {
			return status.Error(codes.Unavailable, "")
		}}
		b := opensAtOnce()
		client := inBubble(t, s, resiliencegrpc.Client{Middleware: b.Wrap})
		chat, err := client.Chat(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		require.Equal(t, io.EOF, chat.Send(hello))
		_, err = chat.Recv()
		requireCode(t, codes.Unavailable, err)
		require.Equal(t, breaker.Open, b.State())
	})
}

// A unary call leaves no work behind. A stream whose call options do not reach gRPC ends with io.EOF.
func TestProbeEndsWithItsCall(t *testing.T) {
	dropping := interceptWith(true, func(ctx context.Context, open opener) (grpc.ClientStream, error) {
		return open(ctx)
	})
	for name, call := range map[string]func(context.Context, testpb.TestClient) error{
		"unary":  func(ctx context.Context, c testpb.TestClient) error { _, err := c.Get(ctx, hello); return err },
		"stream": func(ctx context.Context, c testpb.TestClient) error { return drainList(c.List(ctx, hello)) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
				client := inBubbleWith(t, &service{}, resiliencegrpc.Client{Middleware: b.Wrap}, dropping)
				_ = b.Do(t.Context(), func(context.Context) error { return errors.New("down") })
				time.Sleep(2 * time.Second)
				require.NoError(t, call(t.Context(), client))
				require.Equal(t, breaker.Closed, b.State())
			})
		})
	}
}

// The timeout passes before an interceptor returns the stream. Another error is not replaced.
func TestLateOpeningFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []error
		retries := retry.New(retry.Config{Attempts: 3, Backoff: retry.Constant(0)})
		policies := resilience.Chain(retries.Wrap, resilience.Timeout(time.Second), look(&seen))
		client := inBubbleWith(t, &service{}, resiliencegrpc.Client{Middleware: policies},
			intercept(func(ctx context.Context, open opener) (grpc.ClientStream, error) {
				stream, err := open(ctx)
				switch len(seen) {
				case 0:
					<-ctx.Done()
				case 1:
					<-ctx.Done()
					return nil, status.Error(codes.Unavailable, "of the interceptor")
				}
				return stream, err
			}))
		require.NoError(t, drainList(client.List(t.Context(), hello)))
		require.Len(t, seen, 3)
		requireCode(t, codes.DeadlineExceeded, seen[0])
		requireCode(t, codes.Unavailable, seen[1])
		require.NoError(t, seen[2])
	})
}

// observes returns a policy that sends the end of the work to ends.
func observes(ends chan<- error) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			work := resilience.WorkOf(ctx)
			err := next(ctx)
			if err != nil || !work.OnEnd(func(err error) { ends <- err }) {
				ends <- err
			}
			return err
		}
	}
}

func TestTimeoutCoversTheOpening(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var deadlines, opened atomic.Int64
		s := &service{list: func(n int64, m *testpb.Message, s listStream) error {
			if _, ok := s.Context().Deadline(); ok {
				deadlines.Add(1)
			}
			for range 5 {
				if err := s.Send(m); err != nil {
					return err
				}
				time.Sleep(time.Minute)
			}
			return nil
		}}
		b, slots := breaker.New(breaker.Config{ConsecutiveFailures: 2}), bulkhead.New(bulkhead.Config{Limit: 1})
		policies := resilience.Chain(twice().Wrap, b.Wrap, slots.Wrap, resilience.Timeout(time.Second))
		client := inBubbleWith(t, s, resiliencegrpc.Client{Middleware: policies},
			intercept(func(ctx context.Context, open opener) (grpc.ClientStream, error) {
				if opened.Add(1) == 1 || resiliencegrpc.MethodOf(ctx) == testpb.Test_Run_FullMethodName {
					<-ctx.Done()
				}
				return open(ctx)
			}))
		begun := time.Now()
		require.NoError(t, drainList(client.List(t.Context(), hello)))
		require.Equal(t, 5*time.Minute+time.Second, time.Since(begun), "only the first attempt timed out")
		require.EqualValues(t, 1, s.calls.Load())
		require.Zero(t, deadlines.Load(), "the server does not get the timeout")
		require.Equal(t, breaker.Closed, b.State())
		_, err := client.Run(t.Context(), hello)
		requireCode(t, codes.DeadlineExceeded, err)
		require.Zero(t, slots.Stats().InFlight)
	})
}

func TestCallersDeadlineCoversStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{list: func(_ int64, m *testpb.Message, s listStream) error {
			if _, ok := s.Context().Deadline(); !ok {
				return errors.New("no deadline")
			}
			_ = s.Send(m)
			<-s.Context().Done()
			return s.Context().Err()
		}}
		b := opensAtOnce()
		client := inBubble(t, s, resiliencegrpc.Client{
			Middleware: resilience.Chain(b.Wrap, resilience.Timeout(time.Second)),
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begun := time.Now()
		requireCode(t, codes.DeadlineExceeded, drainList(client.List(ctx, hello)))
		require.Equal(t, time.Minute, time.Since(begun))
		require.Equal(t, breaker.Open, b.State(), "the caller waited for the server for a minute")
	})
}

// The caller's ctx ends the stream while the caller does not receive.
func TestPausingCallerIsNoServerFailure(t *testing.T) {
	list := func(client testpb.TestClient, ctx context.Context) func() error {
		list, err := client.List(ctx, hello)
		return func() error { return drainList(list, err) }
	}
	canceled := func(t *testing.T) context.Context {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		return ctx
	}
	late := func(t *testing.T) context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		t.Cleanup(cancel)
		return ctx
	}
	for name, tc := range map[string]struct {
		open func(testpb.TestClient, context.Context) (end func() error)
		ctx  func(*testing.T) context.Context
		code codes.Code
	}{
		"an upload": {func(client testpb.TestClient, ctx context.Context) func() error {
			up, err := client.Upload(ctx)
			require.NoError(t, err)
			return func() error { _, err := up.CloseAndRecv(); return err }
		}, late, codes.DeadlineExceeded},
		"a list": {list, late, codes.DeadlineExceeded},
		"a list whose header is there": {func(client testpb.TestClient, ctx context.Context) func() error {
			list, err := client.List(ctx, hello)
			require.NoError(t, err)
			_, err = list.Header()
			require.NoError(t, err)
			return func() error { return drain(list.Recv) }
		}, late, codes.DeadlineExceeded},
		"a list that was read": {func(client testpb.TestClient, ctx context.Context) func() error {
			list, err := client.List(ctx, hello)
			require.NoError(t, err)
			_, err = list.Recv()
			require.NoError(t, err)
			return func() error { return drain(list.Recv) }
		}, late, codes.DeadlineExceeded},
		"a list whose caller leaves": {list, canceled, codes.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &service{list: func(_ int64, m *testpb.Message, s listStream) error {
					_ = s.Send(m)
					<-s.Context().Done()
					return s.Context().Err()
				}}
				b := opensAtOnce()
				slots := bulkhead.New(bulkhead.Config{Limit: 1})
				policies := resilience.Chain(twice().Wrap, b.Wrap, slots.Wrap, resilience.Timeout(time.Second))
				swallow := resilience.Fallback(func(context.Context, error) error { return nil })
				for _, mw := range []resilience.Middleware{policies, resilience.Chain(swallow, policies)} {
					s.calls.Store(0)
					end := tc.open(inBubble(t, s, resiliencegrpc.Client{Middleware: mw}), tc.ctx(t))
					time.Sleep(time.Minute)
					require.Zero(t, slots.Stats().InFlight)
					requireCode(t, tc.code, end())
					require.EqualValues(t, 1, s.calls.Load())
					require.Equal(t, breaker.Closed, b.State())
				}
			})
		})
	}
}

// Flow control blocks Send, or the header does not arrive.
func TestBlockedSendIsServerFailure(t *testing.T) {
	for _, waits := range []func(grpc.BidiStreamingClient[testpb.Message, testpb.Message]) error{
		func(chat grpc.BidiStreamingClient[testpb.Message, testpb.Message]) (err error) {
			for err == nil {
				err = chat.Send(&testpb.Message{Payload: make([]byte, 10_000)})
			}
			return err
		},
		func(chat grpc.BidiStreamingClient[testpb.Message, testpb.Message]) error {
			_, err := chat.Header()
			require.NoError(t, err)
			return io.EOF
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &service{chat: func(_ int64, s chatStream) error {
				<-s.Context().Done()
				return s.Context().Err()
			}}
			b := opensAtOnce()
			client := inBubble(t, s, resiliencegrpc.Client{Middleware: b.Wrap})
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			chat, err := client.Chat(ctx)
			require.NoError(t, err)
			require.Equal(t, io.EOF, waits(chat))
			synctest.Wait()
			_, err = chat.Recv()
			requireCode(t, codes.DeadlineExceeded, err)
			require.Equal(t, breaker.Open, b.State())
		})
	}
}

// A stream releases its slots and detaches from the caller's ctx. It does so even if an inner interceptor drops the
// call options, and gRPC does not report the end.
func TestStreamLeavesNothingBehind(t *testing.T) {
	after := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { _ = next(ctx); panic("boom") }
	}
	refuses := opensAtOnce()
	refuses.ForceOpen(nil)
	for name, tc := range map[string]struct {
		mw  resilience.Middleware
		use func(context.Context, testpb.TestClient)
	}{
		"failed": {nil, func(ctx context.Context, c testpb.TestClient) {
			_ = drainList(c.List(ctx, &testpb.Message{Text: "fail"}))
		}},
		"empty": {nil, func(ctx context.Context, c testpb.TestClient) {
			_ = drainList(c.List(ctx, &testpb.Message{Text: "empty"}))
		}},
		"drained": {nil, func(ctx context.Context, c testpb.TestClient) { _ = drainList(c.List(ctx, hello)) }},
		"an upload": {nil, func(ctx context.Context, c testpb.TestClient) {
			up, _ := c.Upload(ctx)
			_, _ = up.CloseAndRecv()
		}},
		"an inner interceptor refuses": {nil, func(ctx context.Context, c testpb.TestClient) {
			_, err := c.List(ctx, hello)
			requireCode(t, codes.Canceled, err)
		}},
		"a policy panics": {after, func(ctx context.Context, c testpb.TestClient) {
			require.Panics(t, func() { _, _ = c.List(ctx, hello) })
		}},
		"a policy refuses": {refuses.Wrap, func(ctx context.Context, c testpb.TestClient) {
			_, err := c.List(ctx, hello)
			require.ErrorIs(t, err, breaker.ErrOpen)
		}},
		"the server is silent": {nil, func(ctx context.Context, c testpb.TestClient) {
			requireCode(t, codes.DeadlineExceeded, drainList(c.List(ctx, &testpb.Message{Text: "hang"})))
		}},
		"a message cannot be sent": {nil, func(ctx context.Context, c testpb.TestClient) {
			chat, err := c.Chat(ctx)
			require.NoError(t, err)
			requireCode(t, codes.Internal, chat.Send(&testpb.Message{Text: "\xff"}))
		}},
		"the deadline of a caller that receives": {nil, func(ctx context.Context, c testpb.TestClient) {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			requireCode(t, codes.DeadlineExceeded, drainList(c.List(ctx, &testpb.Message{Text: "hang"})))
		}},
		"the deadline of a caller that pauses": {nil, func(ctx context.Context, c testpb.TestClient) {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			_, err := c.Chat(ctx)
			require.NoError(t, err)
			time.Sleep(time.Minute)
		}},
		"its caller cancels and does not receive": {nil, func(ctx context.Context, c testpb.TestClient) {
			ctx, cancel := context.WithCancel(ctx)
			_, _ = c.Chat(ctx)
			cancel()
			time.Sleep(time.Minute)
		}},
	} {
		for _, drops := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := &service{list: func(n int64, m *testpb.Message, s listStream) error {
						switch {
						case m.GetText() == "fail" && n == 1:
							return status.Error(codes.Unavailable, "")
						case m.GetText() == "empty":
							return nil
						case m.GetText() == "hang":
							<-s.Context().Done()
							return s.Context().Err()
						}
						return s.Send(m)
					}}
					slots, streams := bulkhead.New(bulkhead.Config{Limit: 1}), bulkhead.New(bulkhead.Config{Limit: 1})
					refused := name == "an inner interceptor refuses"
					var inner []context.Context
					look := interceptWith(drops, func(ctx context.Context, open opener) (grpc.ClientStream, error) {
						inner = append(inner, ctx)
						if refused {
							return nil, status.Error(codes.Canceled, "not with me")
						}
						return open(ctx)
					})
					tc.use(t.Context(), inBubbleWith(t, s, resiliencegrpc.Client{
						Middleware: resilience.Chain(tc.mw, twice().Wrap, slots.Wrap), StreamSlots: streams, Idle: time.Minute,
					}, look))
					require.Zero(t, slots.Stats().InFlight)
					require.Zero(t, streams.Stats().InFlight)
					require.EqualValues(t, 1, streams.Stats().Admitted)
					for _, ctx := range inner {
						require.Error(t, ctx.Err())
					}
				})
			})
		}
	}
}

// A program that starts a watch and then makes a change sees the change.
func TestWatchIsOpenOnReturn(t *testing.T) {
	watching := make(chan struct{})
	changed := make(chan struct{})
	s := &service{list: func(_ int64, m *testpb.Message, s listStream) error {
		close(watching)
		<-changed
		return s.Send(m)
	}}
	_, lis := serve(t, s)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: twice().Wrap})
	list, err := client.List(t.Context(), hello)
	require.NoError(t, err)
	<-watching // without a Recv
	close(changed)
	require.NoError(t, drain(list.Recv))
}

// An open stream is not repeated, even if its method is idempotent.
func TestOpenStreamIsNotRepeated(t *testing.T) {
	s := &service{list: func(_ int64, _ *testpb.Message, s listStream) error {
		_ = s.SendHeader(metadata.Pairs("x", "y"))
		return status.Error(codes.Unavailable, "")
	}}
	_, lis := serve(t, s)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: twice().Wrap})
	list, err := client.List(t.Context(), hello)
	require.NoError(t, err)
	md, err := list.Header()
	require.NoError(t, err)
	require.Equal(t, []string{"y"}, md.Get("x"))
	_, err = list.Recv()
	requireCode(t, codes.Unavailable, err)
	require.EqualValues(t, 1, s.calls.Load())
	require.NotNil(t, list.Context())
	require.NoError(t, list.CloseSend())
	require.Empty(t, list.Trailer())
}

func TestMissingHeaderEndsStream(t *testing.T) {
	s := &service{list: func(int64, *testpb.Message, listStream) error {
		return status.Error(codes.Unavailable, "")
	}}
	_, lis := serve(t, s)
	b := opensAtOnce()
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: b.Wrap})
	list, err := client.List(t.Context(), hello)
	require.NoError(t, err)
	md, err := list.Header()
	require.NoError(t, err)
	require.Nil(t, md)
	require.Equal(t, breaker.Open, b.State())
	requireCode(t, codes.Unavailable, drain(list.Recv))
}

// The connection is cut while a stream is open, before and after the first message.
func TestBrokenConnection(t *testing.T) {
	noLeaks(t)
	reached := make(chan struct{}, 10)
	s := &service{list: func(n int64, m *testpb.Message, s listStream) error {
		reached <- struct{}{}
		if m.GetText() == "after" {
			_ = s.Send(m)
		}
		<-s.Context().Done()
		return s.Context().Err()
	}}
	_, lis := serve(t, s)
	for _, text := range []string{"before", "after"} {
		b := opensAtOnce()
		client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: resilience.Chain(twice().Wrap, b.Wrap)})
		s.calls.Store(0)
		list, err := client.List(t.Context(), &testpb.Message{Text: text}, grpc.WaitForReady(true))
		require.NoError(t, err)
		if text == "after" {
			_, err = list.Recv()
			require.NoError(t, err)
		}
		<-reached
		lis.cut()
		requireCode(t, codes.Unavailable, drain(list.Recv))
		require.EqualValues(t, 1, s.calls.Load())
		require.Equal(t, breaker.Open, b.State())
	}
}

// The caller does not receive until flow control has stopped the server. It then receives every message.
func TestSlowConsumer(t *testing.T) {
	noLeaks(t)
	var sent atomic.Int64
	s := &service{list: func(_ int64, _ *testpb.Message, s listStream) error {
		for range 1000 {
			if err := s.Send(&testpb.Message{Payload: make([]byte, 10_000)}); err != nil {
				return err
			}
			sent.Add(1)
		}
		return nil
	}}
	_, lis := serve(t, s)
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: resilience.Chain(twice().Wrap, slots.Wrap)})
	list, err := client.List(t.Context(), hello)
	require.NoError(t, err)
	_, err = list.Recv()
	require.NoError(t, err)
	before := int64(-1)
	require.Eventually(t, func() bool { // the server has stopped
		now := sent.Load()
		defer func() { before = now }()
		return now == before
	}, time.Minute, 100*time.Millisecond)
	require.Less(t, sent.Load(), int64(1000))
	received := 1
	for err == nil {
		if _, err = list.Recv(); err == nil {
			received++
		}
	}
	require.Equal(t, io.EOF, err)
	require.Equal(t, 1000, received)
	require.Zero(t, slots.Stats().InFlight)
}

// Streams end in every way at the same time. No slot, goroutine or stream is left.
func TestThousandStreams(t *testing.T) {
	noLeaks(t)
	var opening, serving gauge
	s := &service{
		list: func(n int64, m *testpb.Message, s listStream) error {
			defer serving.enter()()
			switch n % 4 {
			case 0:
				return status.Error(codes.Unavailable, "")
			case 1:
				_ = s.Send(m)
				return status.Error(codes.Internal, "")
			}
			for range 3 {
				if err := s.Send(m); err != nil {
					return err
				}
			}
			return nil
		},
		chat: func(n int64, s chatStream) error {
			defer serving.enter()()
			for {
				m, err := s.Recv()
				if err != nil {
					return nil
				}
				if err := s.Send(m); err != nil {
					return err
				}
			}
		},
	}
	_, lis := serve(t, s)
	const limit = 50
	slots := bulkhead.New(bulkhead.Config{Limit: limit})
	count := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			defer opening.enter()()
			return next(ctx)
		}
	}
	retries := retry.New(retry.Config{
		Attempts: retry.Unlimited, Backoff: retry.Exponential(10*time.Millisecond, 500*time.Millisecond),
	})
	streams, b := bulkhead.New(bulkhead.Config{Limit: 1000}), breaker.New(breaker.Config{FailuresInWindow: 1 << 20})
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{
		Middleware:  resilience.Chain(retries.Wrap, b.Wrap, slots.Wrap, count),
		StreamSlots: streams,
		Idle:        time.Minute,
	})
	var wg sync.WaitGroup
	for i := range 1000 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			switch i % 4 {
			case 0: // received to its end
				_ = drainList(client.List(ctx, hello))
			case 1: // canceled after the first message
				if list, err := client.List(ctx, hello); err == nil {
					_, _ = list.Recv()
				}
			case 2: // canceled before the first message
				_, _ = client.Run(ctx, hello)
			case 3:
				chat, err := client.Chat(ctx)
				if err != nil {
					return
				}
				for range 3 {
					if chat.Send(hello) != nil {
						break
					}
					if _, err := chat.Recv(); err != nil {
						break
					}
				}
				_ = chat.CloseSend()
				_ = drain(chat.Recv)
			}
		})
	}
	wg.Wait()
	require.Eventually(t, func() bool {
		return slots.Stats().InFlight+streams.Stats().InFlight == 0 && serving.now.Load() == 0
	}, time.Minute, time.Millisecond)
	require.LessOrEqual(t, opening.most.Load(), int64(limit))
	require.Zero(t, opening.now.Load())
}

// The ctx of inner interceptors has the attempt's values, and ends with the attempt's cause.
func TestInnerInterceptorsSeeTheAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var attempts []int
		var inner []context.Context
		var work []*resilience.Work
		policies := resilience.Chain(twice().Wrap, resilience.NamedTimeout("mine", time.Second))
		client := inBubbleWith(t, &service{}, resiliencegrpc.Client{Middleware: policies},
			intercept(func(ctx context.Context, open opener) (grpc.ClientStream, error) {
				n, _ := retry.AttemptFrom(ctx)
				attempts, inner, work = append(attempts, n), append(inner, ctx), append(work, resilience.WorkOf(ctx))
				<-ctx.Done()
				return open(ctx)
			}))
		_, err := client.List(t.Context(), hello)
		requireCode(t, codes.DeadlineExceeded, err)
		require.Equal(t, []int{1, 2}, attempts)
		require.Equal(t, []*resilience.Work{nil, nil}, work, "they do not get the work of the stream")
		for _, ctx := range inner {
			require.Error(t, ctx.Err())
			require.ErrorContains(t, context.Cause(ctx), "mine: timed out after 1s")
			derived, cancel := context.WithCancel(ctx)
			require.ErrorContains(t, context.Cause(derived), "mine: timed out after 1s")
			cancel()
			require.Equal(t, testpb.Test_List_FullMethodName, resiliencegrpc.MethodOf(ctx))
		}
	})
}

// A picky stream rejects messages without a text.
type picky struct{ grpc.ClientStream }

func (s picky) SendMsg(m any) error {
	if m.(*testpb.Message).GetText() == "" {
		return status.Error(codes.InvalidArgument, "a message needs a text")
	}
	return s.ClientStream.SendMsg(m)
}

// An error of SendMsg ends the stream, whether or not there was a message before.
func TestMessageRejectedByInterceptor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan error, 2)
		s := &service{chat: func(_ int64, s chatStream) error {
			for {
				m, err := s.Recv()
				if err != nil {
					ended <- err
					return err
				}
				_ = s.Send(m)
			}
		}}
		look := intercept(func(ctx context.Context, open opener) (grpc.ClientStream, error) {
			stream, err := open(ctx)
			return picky{stream}, err
		})
		slots, b := bulkhead.New(bulkhead.Config{Limit: 1}), opensAtOnce()
		client := inBubbleWith(t, s, resiliencegrpc.Client{Middleware: resilience.Chain(b.Wrap, slots.Wrap)}, look)
		for before := range 2 {
			chat, err := client.Chat(t.Context())
			require.NoError(t, err)
			for range before {
				require.NoError(t, chat.Send(hello))
				_, err = chat.Recv()
				require.NoError(t, err)
			}
			requireCode(t, codes.InvalidArgument, chat.Send(&testpb.Message{}))
			require.Zero(t, slots.Stats().InFlight)
			requireCode(t, codes.Canceled, <-ended)
			_, err = chat.Recv()
			require.Error(t, err)
			require.Equal(t, breaker.Closed, b.State())
		}
	})
}

// An inner interceptor waits for the answer, so the opening has been sent when it fails.
func TestSentOpeningIsNotRepeated(t *testing.T) {
	s := &service{chat: func(int64, chatStream) error {
		return status.Error(codes.Unavailable, "")
	}}
	waits := intercept(func(ctx context.Context, open opener) (grpc.ClientStream, error) {
		stream, err := open(ctx)
		if err == nil {
			err = stream.RecvMsg(new(testpb.Message))
		}
		return stream, err
	})
	_, lis := serve(t, s)
	_, err := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: twice().Wrap}, waits).Chat(t.Context())
	requireCode(t, codes.Unavailable, err)
	require.EqualValues(t, 1, s.calls.Load())
}

// Policies cancel a derived ctx when they return. The stream continues.
func TestStreamOutlivesPoliciesCtx(t *testing.T) {
	noLeaks(t)
	more := make(chan struct{}, 2)
	_, lis := serve(t, &service{list: sendsTwo(more, nil)})
	canceling := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			return next(ctx)
		}
	}
	var inner context.Context
	look := intercept(func(ctx context.Context, open opener) (grpc.ClientStream, error) {
		inner = ctx
		return open(ctx)
	})
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: canceling}, look)
	list, err := client.List(t.Context(), hello)
	require.NoError(t, err)
	_, err = list.Recv()
	require.NoError(t, err)
	require.NoError(t, inner.Err())
	require.NoError(t, context.Cause(inner))
	more <- struct{}{}
	more <- struct{}{}
	require.NoError(t, drain(list.Recv))
	require.Error(t, inner.Err(), "an ended stream leaves nothing in the caller's ctx")

	why := errors.New("why")
	ctx, cancel := context.WithCancelCause(t.Context())
	list, err = client.List(ctx, hello)
	require.NoError(t, err)
	_, err = list.Recv()
	require.NoError(t, err)
	cancel(why)
	_, err = list.Recv()
	requireCode(t, codes.Canceled, err)
	require.Equal(t, why, context.Cause(inner), "the cause is the caller's")
}
