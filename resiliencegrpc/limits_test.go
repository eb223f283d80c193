package resiliencegrpc_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
)

// untilDone is a handler that sends a message and is silent until its ctx ends.
func untilDone(ended chan<- error) func(int64, *testpb.Message, listStream) error {
	return func(_ int64, m *testpb.Message, s listStream) error {
		err := s.Send(m)
		<-s.Context().Done()
		ended <- s.Context().Err()
		return err
	}
}

func TestIdleEndsSilentStream(t *testing.T) {
	for _, idle := range []time.Duration{0, 10 * time.Second} {
		t.Run(idle.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := make(chan error, 1)
				b := opensAtOnce()
				client := inBubble(t, &service{list: untilDone(ended)}, resiliencegrpc.Client{Middleware: b.Wrap, Idle: idle})
				ctx, cancel := context.WithCancel(t.Context())
				list, err := client.List(ctx, hello)
				require.NoError(t, err)
				_, err = list.Recv()
				require.NoError(t, err)
				time.Sleep(time.Minute) // a caller that pauses
				begun := time.Now()
				time.AfterFunc(time.Hour, cancel)
				_, err = list.Recv()
				require.ErrorIs(t, <-ended, context.Canceled)
				if idle == 0 {
					requireCode(t, codes.Canceled, err)
					require.Equal(t, time.Hour, time.Since(begun))
					require.Equal(t, breaker.Closed, b.State(), "a watchdog that cancels does not count")
					return
				}
				requireCode(t, codes.DeadlineExceeded, err)
				require.EqualError(t, err, "resilience: Idle: timed out after 10s")
				require.ErrorIs(t, err, context.DeadlineExceeded)
				_, isTimeout := errors.AsType[*resilience.TimeoutError](err)
				require.True(t, isTimeout)
				require.Equal(t, idle, time.Since(begun))
				require.Equal(t, breaker.Open, b.State())
				_, again := list.Recv()
				require.Equal(t, err, again)
			})
		})
	}
}

// Idle covers every wait for the server: for the first message, for the header, and for flow control.
func TestIdleCoversEveryWait(t *testing.T) {
	type chat = grpc.BidiStreamingClient[testpb.Message, testpb.Message]
	for name, wait := range map[string]func(chat) error{
		"RecvMsg": func(c chat) error { _, err := c.Recv(); return err },
		"Header":  func(c chat) error { _, err := c.Header(); return err },
		"SendMsg": func(c chat) (err error) {
			for err == nil {
				err = c.Send(&testpb.Message{Payload: make([]byte, 10_000)})
			}
			if err == io.EOF {
				_, err = c.Recv()
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &service{chat: func(_ int64, s chatStream) error {
					<-s.Context().Done()
					return s.Context().Err()
				}}
				b, slots := opensAtOnce(), bulkhead.New(bulkhead.Config{Limit: 1})
				client := inBubble(t, s, resiliencegrpc.Client{Middleware: b.Wrap, StreamSlots: slots, Idle: time.Second})
				chat, err := client.Chat(t.Context())
				require.NoError(t, err)
				begun := time.Now()
				err = wait(chat)
				require.Equal(t, time.Second, time.Since(begun))
				if err != nil { // Header may return neither
					requireCode(t, codes.DeadlineExceeded, err)
				}
				_, err = chat.Recv()
				requireCode(t, codes.DeadlineExceeded, err)
				require.Equal(t, breaker.Open, b.State())
				require.Zero(t, slots.Stats().InFlight)
			})
		})
	}
}

// A stream whose messages arrive within Idle is not cut off, and its status counts.
func TestIdleSparesLivingStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{list: func(_ int64, m *testpb.Message, s listStream) error {
			for range 100 {
				time.Sleep(9 * time.Second)
				_ = s.Send(m)
			}
			return status.Error(codes.Unavailable, "restarting")
		}}
		b := opensAtOnce()
		client := inBubble(t, s, resiliencegrpc.Client{Middleware: b.Wrap, Idle: 10 * time.Second})
		begun := time.Now()
		requireCode(t, codes.Unavailable, drainList(client.List(t.Context(), hello)))
		require.Equal(t, 900*time.Second, time.Since(begun))
		require.Equal(t, breaker.Open, b.State())
	})
}

// Idle needs no Middleware.
func TestIdleAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := inBubble(t, &service{list: untilDone(make(chan error, 1))}, resiliencegrpc.Client{Idle: time.Second})
		requireCode(t, codes.DeadlineExceeded, drainList(client.List(t.Context(), hello)))
	})
}

// A watchdog finds that a stream is stale. Without ReportFailure, the end by ctx would not count.
func TestReportFailure(t *testing.T) {
	stale := errors.New("no update for a minute")
	synctest.Test(t, func(t *testing.T) {
		outer, inner := opensAtOnce(), opensAtOnce()
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		lis := serveInBubble(t, &service{list: untilDone(make(chan error, 1))})
		client := dial(t, "passthrough:bubble", resiliencegrpc.Client{Middleware: outer.Wrap, StreamSlots: slots},
			append(resiliencegrpc.Client{Middleware: inner.Wrap}.DialOptions(), dialer(lis))...)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		list, err := client.List(ctx, hello)
		require.NoError(t, err)
		_, err = list.Recv()
		require.NoError(t, err)

		require.False(t, resiliencegrpc.ReportFailure(list, nil))
		require.False(t, resiliencegrpc.ReportFailure(nil, stale))
		require.True(t, resiliencegrpc.ReportFailure(list, stale))
		require.False(t, resiliencegrpc.ReportFailure(list, stale), "once")
		for _, b := range []*breaker.Breaker{outer, inner} {
			require.Equal(t, breaker.Open, b.State())
			require.Equal(t, stale, b.Stats().LastErr)
		}
		require.Equal(t, 1, slots.Stats().InFlight, "the stream is open")
		cancel()
		requireCode(t, codes.Canceled, drain(list.Recv))
		require.Zero(t, slots.Stats().InFlight)
		require.EqualValues(t, 1, outer.Stats().Failed)
	})
}

func TestReportFailureOfOtherStreams(t *testing.T) {
	stale := errors.New("stale")
	b := opensAtOnce()
	_, lis := serve(t, &service{})
	ended := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: b.Wrap})
	list, err := ended.List(t.Context(), hello)
	require.NoError(t, err)
	require.NoError(t, drain(list.Recv))
	require.False(t, resiliencegrpc.ReportFailure(list, stale), "it has ended")

	list, err = dial(t, lis.Addr().String(), resiliencegrpc.Client{}).List(t.Context(), hello)
	require.NoError(t, err)
	require.False(t, resiliencegrpc.ReportFailure(list, stale), "it is of no Client")

	exempt := resiliencegrpc.Client{Middleware: b.Wrap, Exempt: func(string) bool { return true }}
	list, err = dial(t, lis.Addr().String(), exempt).List(t.Context(), hello)
	require.NoError(t, err)
	require.False(t, resiliencegrpc.ReportFailure(list, stale), "it is exempt")
	require.Equal(t, breaker.Closed, b.State())
}

func TestStreamHoldsItsSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slots := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: 10 * time.Second, Queue: 1})
		client := inBubble(t, &service{list: untilDone(make(chan error, 2))}, resiliencegrpc.Client{
			Middleware: resilience.Chain(twice().Wrap, resilience.Timeout(time.Second)), StreamSlots: slots,
		})
		ctx, cancel := context.WithCancel(t.Context())
		list, err := client.List(ctx, hello)
		require.NoError(t, err)
		_, err = list.Recv()
		require.NoError(t, err)
		time.Sleep(time.Hour)
		require.Equal(t, 1, slots.Stats().InFlight)
		_, err = client.Get(t.Context(), hello)
		require.NoError(t, err, "a unary call needs no slot")

		begun := time.Now()
		_, err = client.List(t.Context(), hello)
		require.ErrorIs(t, err, bulkhead.ErrFull)
		requireCode(t, codes.Unavailable, err)
		require.Equal(t, 10*time.Second, time.Since(begun), "MaxWait, and not the timeout of the opening")

		time.AfterFunc(time.Second, cancel)
		ctx, cancel = context.WithCancel(t.Context())
		defer cancel()
		_, err = client.List(ctx, hello)
		require.NoError(t, err)
		require.Equal(t, 1, slots.Stats().InFlight)
	})
}

// The method of a stream is known when the stream takes its slot.
func TestStreamSlotsKnowTheMethod(t *testing.T) {
	var seen string
	slots := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Second, Share: func(ctx context.Context) string {
		seen = resiliencegrpc.MethodOf(ctx)
		return seen
	}})
	_, lis := serve(t, &service{})
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{StreamSlots: slots})
	require.NoError(t, drainList(client.List(t.Context(), hello)))
	require.Equal(t, testpb.Test_List_FullMethodName, seen)
}

func TestHealthChecksPassOpenBreaker(t *testing.T) {
	_, lis := serveWith(t, &service{}, func(s *grpc.Server) {
		healthpb.RegisterHealthServer(s, health.NewServer())
	})
	b, slots := opensAtOnce(), bulkhead.New(bulkhead.Config{Limit: 1})
	b.ForceOpen(nil)
	hold(t, slots)
	conn := connect(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: b.Wrap, StreamSlots: slots})
	client := healthpb.NewHealthClient(conn)
	_, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	watch, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	_, err = watch.Recv()
	require.NoError(t, err)
	_, err = testpb.NewTestClient(conn).Get(t.Context(), hello)
	require.ErrorIs(t, err, breaker.ErrOpen)

	conn = connect(t, lis.Addr().String(), resiliencegrpc.Client{
		Middleware: b.Wrap,
		Exempt:     func(method string) bool { return method == testpb.Test_Get_FullMethodName },
	})
	_, err = testpb.NewTestClient(conn).Get(t.Context(), hello)
	require.NoError(t, err)
	_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.ErrorIs(t, err, breaker.ErrOpen)
}

// The server rejects one stream of five at once. The others last 5s. None is refused.
func TestRejectedStreamsBesideLongStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{list: func(n int64, m *testpb.Message, s listStream) error {
			if n%5 == 0 {
				return status.Error(codes.Unavailable, "")
			}
			_ = s.Send(m)
			time.Sleep(5 * time.Second)
			return nil
		}}
		b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
		client := inBubble(t, s, resiliencegrpc.Client{Middleware: b.Wrap})
		for range 600 {
			go func() { _ = drainList(client.List(t.Context(), hello)) }()
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		stats := b.Stats()
		require.Zero(t, stats.Refused)
		require.EqualValues(t, 120, stats.Failed)
		require.EqualValues(t, 480, stats.Succeeded)
	})
}

// A stream that the program ends before the server has answered is neither a failure nor a success.
func TestAbandonedStreamIsIgnored(t *testing.T) {
	for name, abandon := range map[string]func(context.Context, testpb.TestClient){
		"message cannot be encoded": func(ctx context.Context, c testpb.TestClient) {
			chat, err := c.Chat(ctx)
			require.NoError(t, err)
			requireCode(t, codes.Internal, chat.Send(&testpb.Message{Text: "\xff"}))
		},
		"deadline while the caller pauses": func(ctx context.Context, c testpb.TestClient) {
			ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
			defer cancel()
			_, err := c.Chat(ctx)
			require.NoError(t, err)
			time.Sleep(time.Hour)
		},
		"canceled": func(ctx context.Context, c testpb.TestClient) {
			ctx, cancel := context.WithCancel(ctx)
			_, err := c.Chat(ctx)
			require.NoError(t, err)
			cancel()
			synctest.Wait()
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
				s := &service{list: func(int64, *testpb.Message, listStream) error {
					return status.Error(codes.Unavailable, "")
				}}
				client := inBubble(t, s, resiliencegrpc.Client{Middleware: b.Wrap})
				requireCode(t, codes.Unavailable, drainList(client.List(t.Context(), hello)))
				abandon(t.Context(), client)
				require.Equal(t, []int64{0, 1, 1, 0}, outcomes(b.Stats()))
				requireCode(t, codes.Unavailable, drainList(client.List(t.Context(), hello)))
				require.Equal(t, breaker.Open, b.State())
			})
		})
	}
}
