package resiliencegrpc_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/resiliencegrpc/internal/testpb"
	"github.com/go-resilience/resilience/throttle"
)

// A refusal is the error of a policy of another library.
type refusal struct {
	refused bool
	after   time.Duration
}

func (e refusal) Error() string             { return "refusal" }
func (e refusal) Refused() bool             { return e.refused }
func (e refusal) RetryAfter() time.Duration { return e.after }

// A noStatus has the method GRPCStatus, but may have no status.
type noStatus struct {
	error
	st *status.Status
}

func (e noStatus) GRPCStatus() *status.Status { return e.st }

func (e noStatus) Unwrap() error { return e.error }

func TestPolicyErrorStatus(t *testing.T) {
	const longest = math.MaxInt32 * time.Millisecond
	limited := func(why throttle.Reason) error { return &throttle.LimitedError{Reason: why, After: time.Second} }
	own, later := status.New(codes.DataLoss, "own"), refusal{false, time.Minute}
	for name, tc := range map[string]struct {
		err   error
		code  codes.Code
		after time.Duration // the delay of the RetryInfo
	}{
		"over a limit":                      {limited(throttle.OverLimit), codes.ResourceExhausted, time.Second},
		"a limit that cannot tell":          {limited(throttle.Outage), codes.Unavailable, time.Second},
		"a refusal":                         {refusal{true, time.Minute}, codes.Unavailable, time.Minute},
		"a refusal without a time":          {refusal{true, 0}, codes.Unavailable, 0},
		"a refusal for the longest time":    {refusal{true, longest}, codes.Unavailable, longest},
		"a refusal for longer":              {refusal{true, longest + 1}, codes.Unavailable, 0},
		"a timeout":                         {context.DeadlineExceeded, codes.DeadlineExceeded, 0},
		"a timeout with a time":             {errors.Join(context.DeadlineExceeded, later), codes.DeadlineExceeded, 0},
		"a refusal with a status":           {noStatus{refusal{true, time.Minute}, own}, codes.DataLoss, 0},
		"a status that is none":             {noStatus{refusal{true, time.Minute}, nil}, codes.Unavailable, time.Minute},
		"another error":                     {errors.New("another"), codes.Unknown, 0},
		"another error with a time":         {refusal{false, time.Minute}, codes.Unknown, 0},
		"another error of the end of a ctx": {errors.Join(context.Canceled, errors.New("another")), codes.Unknown, 0},
	} {
		t.Run(name, func(t *testing.T) {
			client := dial(t, "127.0.0.1:1", resiliencegrpc.Client{Middleware: func(resilience.Func) resilience.Func {
				return func(context.Context) error { return tc.err }
			}})
			_, err := client.Get(t.Context(), hello)
			require.ErrorIs(t, err, tc.err)
			st := status.Convert(err)
			require.Equal(t, tc.code, st.Code())
			require.Equal(t, tc.after, retryInfoOf(st))
			require.Equal(t, tc.after > 0, len(st.Details()) > 0)
		})
	}
}

func TestHandlersPolicyErrorStatus(t *testing.T) {
	const longest = math.MaxInt32 * time.Millisecond
	const busy, usedUp = "the server has no capacity for the call right now", "the limit for such calls is used up"
	short, second := refusal{true, time.Millisecond - 1}, refusal{true, time.Second}
	own := status.New(codes.DataLoss, "own")
	overLimit := &throttle.LimitedError{Name: "secret", Reason: throttle.OverLimit, After: time.Second}
	for name, tc := range map[string]struct {
		err     error
		code    codes.Code
		message string
		after   time.Duration // the delay of the RetryInfo
		again   string        // grpc-retry-pushback-ms
	}{
		"over a limit":                   {overLimit, codes.ResourceExhausted, usedUp, time.Second, "1000"},
		"a refusal":                      {short, codes.Unavailable, busy, time.Millisecond - 1, "1"},
		"a refusal without a time":       {refusal{true, 0}, codes.Unavailable, busy, 0, ""},
		"a refusal for the longest time": {refusal{true, longest}, codes.Unavailable, busy, longest, "2147483647"},
		"a refusal for longer":           {refusal{true, longest + 1}, codes.Unavailable, busy, 0, ""},
		"a timeout with a status":        {noStatus{context.DeadlineExceeded, own}, codes.DataLoss, "own", 0, ""},
		"a refusal with a status":        {noStatus{second, own}, codes.Unavailable, busy, time.Second, "1000"},
		"a status":                       {own.Err(), codes.DataLoss, "own", 0, ""},
		"another error":                  {errors.New("another"), codes.Unknown, "another", 0, ""},
		"another error with a time":      {refusal{false, time.Second}, codes.Unknown, "refusal", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, lis := serve(t, &service{unary: func(context.Context, int64, *testpb.Message) (*testpb.Message, error) {
				return nil, tc.err
			}}, resiliencegrpc.Server{Limit: tenants(1000, 1000)}.Options()...)
			var trailer metadata.MD
			_, err := dial(t, lis.Addr().String(), resiliencegrpc.Client{}).Get(t.Context(), hello, grpc.Trailer(&trailer))
			st := status.Convert(err)
			require.Equal(t, tc.code, st.Code())
			require.Equal(t, tc.message, st.Message())
			require.Equal(t, tc.after, retryInfoOf(st))
			require.Equal(t, tc.after > 0, len(st.Details()) > 0)
			require.Equal(t, tc.again, strings.Join(trailer.Get("grpc-retry-pushback-ms"), ","))
		})
	}
}
