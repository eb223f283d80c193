package resiliencegrpc

import (
	"context"
	"errors"
	"math"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/throttle"
)

// A policyError adds a gRPC status to the error of a policy.
type policyError struct {
	err    error
	code   codes.Code
	public bool // the status is sent to a client and must not describe the policies
}

func (e *policyError) Error() string { return e.err.Error() }
func (e *policyError) Unwrap() error { return e.err }

// GRPCStatus returns the status. The status has a RetryInfo detail if a policy refused the call and specifies
// when to retry.
func (e *policyError) GRPCStatus() *status.Status {
	message := e.err.Error()
	if e.public {
		message = publicMessages[e.code]
	}
	st := status.New(e.code, message)
	refused := e.code == codes.ResourceExhausted || e.code == codes.Unavailable
	if after := resilience.RetryAfter(e.err); refused && 0 < after && after <= longest {
		with, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
		if err == nil {
			st = with
		}
	}
	return st
}

var publicMessages = map[codes.Code]string{
	codes.ResourceExhausted: "the limit for such calls is used up",
	codes.Unavailable:       "the server has no capacity for the call right now",
	codes.DeadlineExceeded:  "the server ran out of time for the call",
	codes.Canceled:          "the call was canceled",
}

// withStatus adds a status to err, the error of a call under ctx. It returns err unchanged if err already has
// a status, or if err comes neither from a policy nor from ctx. If public is set, the status is for a client
// and does not show which policy refused the call.
func withStatus(ctx context.Context, err error, public bool) error {
	refused := resilience.Refused(err)
	if hasStatus(err) && !(refused && public) {
		return err
	}
	e := &policyError{err: err, public: public}
	switch {
	case errors.Is(err, ctx.Err()): // err is not nil
		e.code = status.FromContextError(ctx.Err()).Code()
	case refused && limited(err):
		e.code = codes.ResourceExhausted
	case refused:
		e.code = codes.Unavailable
	case resilience.IsTimeout(err):
		e.code = codes.DeadlineExceeded
	default:
		return err
	}
	return e
}

func hasStatus(err error) bool {
	e, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err)
	return ok && e.GRPCStatus() != nil
}

// limited reports whether a limiter refused the call because its limit is used up. It returns false if the
// limiter refused the call because the state of the limit is unknown, or to protect an overloaded server.
func limited(err error) bool {
	e, ok := errors.AsType[*throttle.LimitedError](err)
	if !ok {
		return false
	}
	switch e.Reason {
	case throttle.Outage, throttle.Shed, throttle.CoolingDown:
		return false
	}
	return true
}

// pushback returns the trailer that specifies when the client may retry. It returns nil if the time is
// unknown, or if the call was not refused.
func (e *policyError) pushback() metadata.MD {
	if e.code != codes.ResourceExhausted && e.code != codes.Unavailable {
		return nil
	}
	after := resilience.RetryAfter(e.err)
	ms := "-1" // the client must not retry
	switch {
	case 0 < after && after <= longest:
		ms = strconv.FormatInt(int64((after+time.Millisecond-1)/time.Millisecond), 10)
	case resilience.Retryable(e.err):
		return nil
	}
	return metadata.Pairs(pushbackKey, ms)
}

// longest is the longest delay that grpc-retry-pushback-ms can express. A longer delay means that the client
// must not retry. For example, the delay is longer if a call needs more tokens than a limiter can ever have.
const longest = math.MaxInt32 * time.Millisecond
