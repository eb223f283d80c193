package resiliencegrpc_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
	"github.com/go-resilience/resilience/throttle"
)

func tenants(rate float64, burst int) *throttle.Group[string] {
	return throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Name: "secret", Rate: rate, Burst: burst},
	})
}

func TestServerWithoutPolicies(t *testing.T) {
	var none *throttle.Group[string]
	_, lis := serve(t, &service{}, resiliencegrpc.Server{Limit: none}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	m, err := client.Get(t.Context(), hello)
	require.NoError(t, err)
	require.Equal(t, "hello", m.GetText())
	require.NoError(t, drainList(client.List(t.Context(), hello)))
	chat, err := client.Chat(t.Context())
	require.NoError(t, err)
	require.NoError(t, chat.Send(hello))
	require.NoError(t, chat.CloseSend())
	require.NoError(t, drain(chat.Recv))
}

// The client learns when to retry, and nothing about the limit.
func TestServerLimitReportsRetryTime(t *testing.T) {
	s := &service{}
	_, lis := serve(t, s, resiliencegrpc.Server{Limit: tenants(0.1, 1)}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	for _, call := range []func(...grpc.CallOption) error{
		func(opts ...grpc.CallOption) error { _, err := client.Get(t.Context(), hello, opts...); return err },
		func(opts ...grpc.CallOption) error { return drainList(client.List(t.Context(), hello, opts...)) },
	} {
		_ = call() // the first call takes the only token
		var trailer metadata.MD
		err := call(grpc.Trailer(&trailer))
		st, _ := status.FromError(err)
		require.Equal(t, codes.ResourceExhausted, st.Code())
		require.Equal(t, "the limit for such calls is used up", st.Message())
		require.InDelta(t, 10*time.Second, retryInfoOf(st), float64(time.Second))
		require.Regexp(t, `^(9\d\d\d|10000)$`, trailer.Get("grpc-retry-pushback-ms")[0])
	}
	require.EqualValues(t, 1, s.calls.Load())
}

func TestServerLimitsByKey(t *testing.T) {
	type account struct{}
	authenticate := interceptServer(func(
		ctx context.Context, _ string, handle func(context.Context) (any, error),
	) (any, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		return handle(context.WithValue(ctx, account{}, md.Get("token")[0]))
	})
	_, lis := serve(t, &service{}, append([]grpc.ServerOption{authenticate}, resiliencegrpc.Server{
		Limit: tenants(0.001, 1),
		Key:   func(ctx context.Context) string { return ctx.Value(account{}).(string) },
	}.Options()...)...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	for _, token := range []string{"a", "b"} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "token", token)
		_, err := client.Get(ctx, hello)
		require.NoError(t, err)
		_, err = client.Get(ctx, hello)
		requireCode(t, codes.ResourceExhausted, err)
	}
}

// A keysOf admits every call and sends its key to keys. It is not a pointer.
type keysOf struct{ keys chan string }

func (k keysOf) Admit(_ context.Context, key string) (throttle.Decision, error) {
	k.keys <- key
	return throttle.Decision{}, nil
}

func TestLongKeysAreHashed(t *testing.T) {
	for n, kept := range map[int]bool{200: true, 201: false} {
		long := strings.Repeat("x", n)
		limit := keysOf{make(chan string, 1)}
		_, lis := serve(t, &service{}, resiliencegrpc.Server{
			Limit: limit, Key: func(context.Context) string { return long },
		}.Options()...)
		_, err := dial(t, lis.Addr().String(), resiliencegrpc.Client{}).Get(t.Context(), hello)
		require.NoError(t, err)
		require.Equal(t, kept, <-limit.keys == long, n)
	}
}

func TestFullServerIsUnavailable(t *testing.T) {
	noLeaks(t)
	slots := bulkhead.New(bulkhead.Config{Name: "secret", Limit: 1})
	s := &service{}
	_, lis := serve(t, s, resiliencegrpc.Server{Slots: slots}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	hold(t, slots)
	var trailer metadata.MD
	_, err := client.Get(t.Context(), hello, grpc.Trailer(&trailer))
	requireCode(t, codes.Unavailable, err)
	require.NotContains(t, err.Error(), "secret")
	require.Empty(t, trailer.Get("grpc-retry-pushback-ms"), "the time of a retry is unknown")
	requireCode(t, codes.Unavailable, drainList(client.List(t.Context(), hello)))
	require.Zero(t, s.calls.Load())
}

func TestServerStreamSlots(t *testing.T) {
	noLeaks(t)
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	streams := bulkhead.New(bulkhead.Config{Limit: 1})
	more := make(chan struct{})
	_, lis := serve(t, &service{list: sendsTwo(more, nil)},
		resiliencegrpc.Server{Slots: slots, StreamSlots: streams}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	list, err := client.List(t.Context(), hello)
	require.NoError(t, err)
	_, err = list.Recv()
	require.NoError(t, err)
	_, err = client.Get(t.Context(), hello)
	require.NoError(t, err)
	requireCode(t, codes.Unavailable, drainList(client.List(t.Context(), hello)))
	more <- struct{}{}
	more <- struct{}{}
	require.NoError(t, drain(list.Recv))
	require.Eventually(t, func() bool { return streams.Stats().InFlight == 0 }, time.Minute, time.Millisecond)
}

func TestServerBreakerCountsHandlerErrors(t *testing.T) {
	var fail error
	s := &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) { return hello, fail }}
	b := opensAtOnce()
	_, lis := serve(t, s, resiliencegrpc.Server{Middleware: b.Wrap}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	get := func() error { _, err := client.Get(t.Context(), hello); return err }

	for _, code := range []codes.Code{
		codes.OK, codes.NotFound, codes.InvalidArgument, codes.ResourceExhausted, codes.Unauthenticated,
	} {
		fail = status.Error(code, "")
		requireCode(t, code, get())
		require.Equal(t, breaker.Closed, b.State(), code)
	}
	fail = context.Canceled // the handler returns it although its ctx has not ended
	requireCode(t, codes.Canceled, get())
	require.Equal(t, breaker.Closed, b.State())
	for _, err := range []error{
		errors.New("plain"), status.Error(codes.Internal, ""), status.Error(codes.Unavailable, ""), context.DeadlineExceeded,
	} {
		fail = err
		code := status.FromContextError(err).Code()
		if _, ok := status.FromError(err); ok {
			code = status.Code(err)
		}
		requireCode(t, code, get())
		require.Equal(t, breaker.Open, b.State(), err)
		var trailer metadata.MD
		_, err := client.Get(t.Context(), hello, grpc.Trailer(&trailer))
		requireCode(t, codes.Unavailable, err)
		require.NotEmpty(t, trailer.Get("grpc-retry-pushback-ms"))
		b.Reset()
	}
}

// gRPC reports the end of the connection to the handler before the handler's ctx ends. If the handler's error counted,
// a broken connection with many streams would open a breaker for all clients, or a cancel would close it.
func TestDisconnectedClientIsIgnored(t *testing.T) {
	send := func(s chatStream) error {
		return s.Send(&testpb.Message{Text: strings.Repeat("a", 1<<14)})
	}
	receive := func(s chatStream) error {
		_, err := s.Recv()
		return err
	}
	for name, do := range map[string]func(chatStream) error{
		"sends": send, "receives": receive,
	} {
		for _, breaks := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", breaks: ", breaks), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ours := breaker.New(breaker.Config{})
					lis := serveInBubble(t, &service{chat: func(_ int64, s chatStream) error {
						for {
							if err := do(s); err != nil {
								return err
							}
						}
					}}, resiliencegrpc.Server{Middleware: resilience.Chain(late, ours.Wrap)}.Options()...)
					client := dial(t, "passthrough:bubble", resiliencegrpc.Client{}, dialer(lis))
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					_, err := client.Chat(ctx)
					require.NoError(t, err)
					synctest.Wait()
					if breaks {
						lis.cut()
					} else {
						cancel()
					}
					time.Sleep(time.Second)
					require.Equal(t, []int64{0, 0, 1, 0}, outcomes(ours.Stats()))
				})
			})
		}
	}
}

// A handler returns the refusal of a database's breaker, or of another service's.
func TestHandlerReturnsRefusal(t *testing.T) {
	secret := breaker.New(breaker.Config{Name: "secret"})
	secret.ForceOpen(nil)
	_, other := serve(t, &service{})
	upstream := dial(t, other.Addr().String(), resiliencegrpc.Client{Middleware: secret.Wrap})
	s := &service{unary: func(ctx context.Context, _ int64, m *testpb.Message) (*testpb.Message, error) {
		if m.GetText() == "service" {
			return upstream.Get(ctx, m)
		}
		err := secret.Do(ctx, func(context.Context) error { return nil })
		return nil, fmt.Errorf("find user: %w", err)
	}}
	b := opensAtOnce()
	_, lis := serve(t, s, resiliencegrpc.Server{Middleware: b.Wrap}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	for _, text := range []string{"database", "service"} {
		var trailer metadata.MD
		_, err := client.Get(t.Context(), &testpb.Message{Text: text}, grpc.Trailer(&trailer))
		requireCode(t, codes.Unavailable, err)
		require.NotContains(t, err.Error(), "secret")
		require.NotEmpty(t, trailer.Get("grpc-retry-pushback-ms"))
		require.Equal(t, breaker.Closed, b.State())
	}
}

func TestImpossibleCallIsNotRetried(t *testing.T) {
	costly := throttle.New(throttle.Config{Rate: 1, Burst: 1, Cost: func(context.Context) int { return 2 }})
	_, lis := serve(t, &service{}, resiliencegrpc.Server{Middleware: costly.Wrap}.Options()...)
	s := resiliencegrpc.Client{Middleware: twice().Wrap}
	client := dial(t, lis.Addr().String(), s)
	var trailer metadata.MD
	_, err := client.Get(t.Context(), hello, grpc.Trailer(&trailer))
	requireCode(t, codes.ResourceExhausted, err)
	require.Equal(t, []string{"-1"}, trailer.Get("grpc-retry-pushback-ms"))
	require.EqualValues(t, 1, costly.Stats().Refused)
}

func TestServerTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &service{unary: func(ctx context.Context, n int64, m *testpb.Message) (*testpb.Message, error) {
			<-ctx.Done()
			switch m.GetText() {
			case "heeds":
				return nil, context.Cause(ctx)
			case "says":
				return nil, status.Error(codes.Aborted, "in the middle")
			}
			return m, nil
		}}
		b := opensAtOnce()
		client := inBubble(t, s, resiliencegrpc.Client{}, resiliencegrpc.Server{
			Middleware: resilience.Chain(b.Wrap, resilience.NamedTimeout("secret", time.Second)),
		}.Options()...)
		_, err := client.Get(t.Context(), &testpb.Message{Text: "heeds"})
		requireCode(t, codes.DeadlineExceeded, err)
		require.NotContains(t, err.Error(), "secret")
		require.Equal(t, breaker.Open, b.State())
		b.Reset()
		_, err = client.Get(t.Context(), &testpb.Message{Text: "says"})
		requireCode(t, codes.Aborted, err)
		_, err = client.Get(t.Context(), &testpb.Message{Text: "is late"})
		require.NoError(t, err)

		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		b.Reset()
		_, err = client.Get(ctx, &testpb.Message{Text: "heeds"})
		requireCode(t, codes.DeadlineExceeded, err)
		synctest.Wait()
		require.Equal(t, breaker.Closed, b.State(), "the client's deadline is not the handler's fault")
	})
}

func TestUnusualServerMiddleware(t *testing.T) {
	for name, c := range map[string]struct {
		mw   resilience.Middleware
		code codes.Code
		fail error // the handler's
	}{
		"not serve": {func(resilience.Func) resilience.Func {
			return func(context.Context) error { return nil }
		}, codes.Internal, nil},
		"lose the ctx": {func(next resilience.Func) resilience.Func {
			return func(context.Context) error { return next(context.Background()) }
		}, codes.Unknown, nil},
		"end the ctx": {func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				ctx, cancel := context.WithCancel(ctx)
				cancel()
				return next(ctx)
			}
		}, codes.Canceled, nil},
		"fail after success": {func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { _ = next(ctx); return errors.New("too late") }
		}, codes.OK, nil},
		"serve twice": {func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error { _ = next(ctx); return next(ctx) }
		}, codes.Unavailable, status.Error(codes.Unavailable, "down")},
	} {
		t.Run(name, func(t *testing.T) {
			s := &service{unary: func(_ context.Context, _ int64, m *testpb.Message) (*testpb.Message, error) {
				return m, c.fail
			}}
			_, lis := serve(t, s, resiliencegrpc.Server{Middleware: c.mw}.Options()...)
			client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
			_, err := client.Get(t.Context(), hello)
			requireCode(t, c.code, err)
			require.LessOrEqual(t, s.calls.Load(), int64(1))
		})
	}
}

// A full server answers health checks and reflection.
func TestHealthChecksPassFullServer(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	hold(t, slots)
	served := grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error { return status.Error(codes.Aborted, "") })
	_, lis := serveWith(t, &service{}, func(s *grpc.Server) {
		healthpb.RegisterHealthServer(s, health.NewServer())
	}, append(resiliencegrpc.Server{Slots: slots}.Options(), served)...)
	conn := connect(t, lis.Addr().String(), resiliencegrpc.Client{})
	client := healthpb.NewHealthClient(conn)
	_, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	watch, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	_, err = watch.Recv()
	require.NoError(t, err)

	for method, want := range map[string]codes.Code{
		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      codes.Aborted,
		"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": codes.Aborted,
		"/grpc.health.v1.HealthX/Check":                                  codes.Unavailable,
		"/grpc.channelz.v1.Channelz/GetServers":                          codes.Unavailable,
		testpb.Test_Get_FullMethodName:                                   codes.Unavailable,
	} {
		requireCode(t, want, conn.Invoke(t.Context(), method, hello, new(testpb.Message)))
	}
}

func TestServerExempt(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	hold(t, slots)
	_, lis := serve(t, &service{}, resiliencegrpc.Server{
		Slots: slots, Exempt: func(method string) bool { return method != testpb.Test_Create_FullMethodName },
	}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	_, err := client.Get(t.Context(), hello)
	require.NoError(t, err)
	require.NoError(t, drainList(client.List(t.Context(), hello)))
	_, err = client.Create(t.Context(), hello)
	requireCode(t, codes.Unavailable, err)
}

func TestPanicReleasesServerSlot(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	recovering := interceptServer(func(
		ctx context.Context, _ string, handle func(context.Context) (any, error),
	) (_ any, err error) {
		defer func() {
			if r := recover(); r != nil {
				err = status.Errorf(codes.Internal, "%v", r)
			}
		}()
		return handle(ctx)
	})
	s := &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) { panic("boom") }}
	_, lis := serve(t, s, append([]grpc.ServerOption{recovering}, resiliencegrpc.Server{Slots: slots}.Options()...)...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	for range 2 {
		_, err := client.Get(t.Context(), hello)
		requireCode(t, codes.Internal, err)
		require.ErrorContains(t, err, "boom")
	}
	require.Zero(t, slots.Stats().InFlight)
}

// A handler that panicked has not answered, even if a policy recovers the panic.
func TestRecoveredHandlerPanicIsFailure(t *testing.T) {
	s := &service{
		unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) { panic("boom") },
		list:  func(int64, *testpb.Message, listStream) error { panic("boom") },
	}
	_, lis := serve(t, s, resiliencegrpc.Server{Middleware: recovers}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	_, err := client.Get(t.Context(), hello)
	requireCode(t, codes.Unknown, err)
	require.ErrorContains(t, err, "recovered: boom")
	requireCode(t, codes.Unknown, drainList(client.List(t.Context(), hello)))
}

// The handlers count how many calls are served at the same time.
func TestServerSlotsUnderLoad(t *testing.T) {
	noLeaks(t)
	var handlers gauge
	s := &service{
		unary: func(_ context.Context, _ int64, m *testpb.Message) (*testpb.Message, error) {
			defer handlers.enter()()
			return m, nil
		},
		list: func(_ int64, m *testpb.Message, s listStream) error {
			defer handlers.enter()()
			return s.Send(m)
		},
	}
	slots := bulkhead.New(bulkhead.Config{Limit: 5})
	_, lis := serve(t, s, resiliencegrpc.Server{Slots: slots}.Options()...)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for i := range 40 {
				if i%2 == 0 {
					_, _ = client.Get(context.Background(), hello)
				} else {
					_ = drainList(client.List(context.Background(), hello))
				}
			}
		})
	}
	wg.Wait()
	require.LessOrEqual(t, handlers.most.Load(), int64(5))
	require.Eventually(t, func() bool { return slots.Stats().InFlight == 0 }, time.Minute, time.Millisecond)
	stats := slots.Stats()
	require.EqualValues(t, 2000, stats.Admitted+stats.Refused)
	require.Equal(t, stats.Admitted, s.calls.Load())
}

// A call that a tap rejects may have been sent, so only idempotent calls are retried.
func TestServerRejectsInTap(t *testing.T) {
	var taps atomic.Int64
	s := &service{}
	_, lis := serve(t, s, grpc.InTapHandle(func(ctx context.Context, _ *tap.Info) (context.Context, error) {
		if taps.Add(1)%2 == 1 {
			return nil, status.Error(codes.Unavailable, "not now")
		}
		return ctx, nil
	}))
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: twice().Wrap})
	_, err := client.Get(t.Context(), hello)
	require.NoError(t, err)
	_, err = client.Create(t.Context(), hello)
	requireCode(t, codes.Unavailable, err)
	require.EqualValues(t, 1, s.calls.Load())
}

func TestClientIP(t *testing.T) {
	key := resiliencegrpc.ClientIP()
	for addr, want := range map[string]string{
		"[2001:db8:1:2:3:4:5:6]:1234": "2001:db8:1:2::/64",
		"bufconn":                     "bufconn",
	} {
		ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: address(addr)})
		require.Equal(t, want, key(ctx))
	}
	require.Empty(t, key(t.Context()))
	require.Empty(t, key(peer.NewContext(t.Context(), &peer.Peer{})))
}

func TestClientIPBehindTrustedProxies(t *testing.T) {
	key := resiliencegrpc.ClientIP(netip.MustParsePrefix("10.0.0.0/8"))
	for _, c := range []struct {
		remote string
		md     metadata.MD
		want   string
	}{
		{"192.0.2.1:1", metadata.Pairs("x-forwarded-for", "9.9.9.9"), "192.0.2.1"},
		{"10.0.0.1:1", nil, "10.0.0.1"},
		{"10.0.0.1:1", metadata.Pairs("x-forwarded-for", "6.6.6.6, 192.0.2.9, 10.1.1.1"), "192.0.2.9"},
		{"10.0.0.1:1", metadata.Pairs("x-forwarded-for", "6.6.6.6", "x-forwarded-for", "192.0.2.9"), "192.0.2.9"},
	} {
		ctx := peer.NewContext(metadata.NewIncomingContext(t.Context(), c.md), &peer.Peer{Addr: address(c.remote)})
		require.Equal(t, c.want, key(ctx), c)
	}
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("x-forwarded-for", "192.0.2.9"))
	ctx = peer.NewContext(ctx, &peer.Peer{Addr: address("10.0.0.1:1")})
	require.Equal(t, "10.0.0.1", resiliencegrpc.ClientIP()(ctx), "no proxy is trusted")
}

type address string

func (a address) Network() string { return "test" }
func (a address) String() string  { return string(a) }

// outcomes returns the numbers of calls that succeeded, failed, were ignored and were refused.
func outcomes(s breaker.Stats) []int64 { return []int64{s.Succeeded, s.Failed, s.Ignored, s.Refused} }
