package resiliencegrpc_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
)

// A hint is what a server reports about another attempt.
type hint string

const (
	none     hint = "no hint"
	info     hint = "RetryInfo"
	pushback hint = "pushback"
	at0      hint = "pushback of 0"
	negative hint = "negative pushback"
	garbled  hint = "garbled pushback"
	both     hint = "RetryInfo, negative pushback"
)

// failure returns a status with a hint. set sends the trailer.
func failure(code codes.Code, h hint, set func(metadata.MD)) error {
	st := status.New(code, "the test says so")
	if h == info || h == both {
		st, _ = st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
	}
	switch h {
	case pushback:
		set(metadata.Pairs("grpc-retry-pushback-ms", "1"))
	case at0:
		set(metadata.Pairs("grpc-retry-pushback-ms", "0"))
	case negative, both:
		set(metadata.Pairs("grpc-retry-pushback-ms", "-1"))
	case garbled:
		set(metadata.Pairs("grpc-retry-pushback-ms", "soon"))
	}
	return st.Err()
}

// A phase is the progress of a call when it failed.
type phase string

const (
	atOnce      phase = "at once"
	afterHeader phase = "after its header"
	afterFirst  phase = "after its first message"
)

// A call is retried if the status makes it worthwhile, and if the method and the phase allow it.
func TestRetriedStatuses(t *testing.T) {
	noLeaks(t)
	worth := func(code codes.Code, h hint) bool {
		switch h {
		case negative, garbled, both:
			return false
		case info, pushback, at0:
			return true
		}
		return code == codes.Unavailable
	}
	allowed := map[string]map[phase]bool{
		"Get":    {atOnce: true, afterHeader: true},
		"Put":    {atOnce: true, afterHeader: true},
		"Create": {atOnce: false, afterHeader: false},
		"List":   {atOnce: false, afterHeader: false, afterFirst: false},
		"Run":    {atOnce: false, afterHeader: false, afterFirst: false},
		"Upload": {atOnce: false, afterHeader: false},
		"Chat":   {atOnce: false, afterHeader: false, afterFirst: false},
	}
	var fail func(set func(metadata.MD)) error
	var when phase
	s := &service{}
	s.unary = func(ctx context.Context, n int64, m *testpb.Message) (*testpb.Message, error) {
		if n > 1 {
			return m, nil
		}
		if when == afterHeader {
			_ = grpc.SendHeader(ctx, metadata.Pairs("x", "y"))
		}
		return nil, fail(func(md metadata.MD) { _ = grpc.SetTrailer(ctx, md) })
	}
	stream := func(n int64, s grpc.ServerStream, send func() error) error {
		switch {
		case n > 1:
			return send()
		case when == afterHeader:
			_ = s.SendHeader(metadata.Pairs("x", "y"))
		case when == afterFirst:
			_ = send()
		}
		return fail(s.SetTrailer)
	}
	s.list = func(n int64, m *testpb.Message, s listStream) error {
		return stream(n, s, func() error { return s.Send(m) })
	}
	s.upload = func(n int64, s uploadStream) error {
		return stream(n, s, func() error { return s.SendAndClose(hello) })
	}
	s.chat = func(n int64, s chatStream) error {
		return stream(n, s, func() error { return s.Send(hello) })
	}
	_, lis := serve(t, s)
	client := dial(t, lis.Addr().String(), resiliencegrpc.Client{Middleware: twice().Wrap})

	hints := []hint{none, info, pushback, at0, negative, garbled, both}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		for _, h := range hints {
			for method, phases := range allowed {
				for p, may := range phases {
					t.Run(fmt.Sprintf("%v/%s/%s/%s", code, h, method, p), func(t *testing.T) {
						s.calls.Store(0)
						when = p
						fail = func(set func(metadata.MD)) error { return failure(code, h, set) }
						err := call(client, method)
						if may && worth(code, h) {
							require.NoError(t, err)
							require.EqualValues(t, 2, s.calls.Load())
							return
						}
						requireCode(t, code, err)
						require.EqualValues(t, 1, s.calls.Load())
					})
				}
			}
		}
	}
}

// There is no server. A call that was certainly never sent may be repeated, whatever its method.
func TestUnsentCallsAreRetried(t *testing.T) {
	noLeaks(t)
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, lis.Close())
	for _, method := range []string{"Get", "Put", "Create", "List", "Run", "Upload", "Chat"} {
		attempts := 0
		b := breaker.New(breaker.Config{ConsecutiveFailures: 2})
		client := dial(t, lis.Addr().String(), resiliencegrpc.Client{
			Middleware: resilience.Chain(twice().Wrap, b.Wrap, counts(&attempts)),
		})
		requireCode(t, codes.Unavailable, call(client, method))
		require.Equal(t, 2, attempts, method)
		require.Equal(t, breaker.Open, b.State(), method)
	}
}

// call calls the method and returns the result.
func call(client testpb.TestClient, method string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var err error
	switch method {
	case "Get":
		_, err = client.Get(ctx, hello)
	case "Put":
		_, err = client.Put(ctx, hello)
	case "Create":
		_, err = client.Create(ctx, hello)
	case "List", "Run":
		list := client.List
		if method == "Run" {
			list = client.Run
		}
		stream, err := list(ctx, hello)
		if err != nil {
			return err
		}
		return drain(stream.Recv)
	case "Upload":
		stream, err := client.Upload(ctx)
		if err != nil {
			return err
		}
		_ = stream.Send(hello)
		_, err = stream.CloseAndRecv()
		return err
	case "Chat":
		stream, err := client.Chat(ctx)
		if err != nil {
			return err
		}
		_ = stream.Send(hello)
		_ = stream.CloseSend()
		return drain(stream.Recv)
	}
	return err
}

// drain receives all messages, and returns nil at the end of the stream.
func drain(recv func() (*testpb.Message, error)) error {
	for {
		if _, err := recv(); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// A pushback that forbids another attempt outweighs the RetryInfo.
func TestPushbackForbidsRetry(t *testing.T) {
	for name, pushback := range map[string]metadata.MD{
		"negative": metadata.Pairs("grpc-retry-pushback-ms", "-1"),
		"two":      metadata.Pairs("grpc-retry-pushback-ms", "1", "grpc-retry-pushback-ms", "1"),
	} {
		s := &service{}
		s.unary = func(ctx context.Context, _ int64, _ *testpb.Message) (*testpb.Message, error) {
			_ = grpc.SetTrailer(ctx, pushback)
			return nil, failure(codes.Unavailable, info, nil)
		}
		_, lis := serve(t, s)
		var seen []error
		client := dial(t, lis.Addr().String(), resiliencegrpc.Client{
			Middleware: resilience.Chain(twice().Wrap, look(&seen)),
		})
		_, err := client.Get(t.Context(), hello)
		requireCode(t, codes.Unavailable, err)
		require.EqualValues(t, 1, s.calls.Load(), name)
		require.False(t, resilience.Retryable(seen[0]), name)
		require.Zero(t, resilience.RetryAfter(seen[0]), name)
	}
}
