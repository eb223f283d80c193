package resiliencegrpc

import (
	"context"
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// A StatusError is the error that policies see if a call does not end with OK. The call is either an attempt
// of a [Client] or a handler's call on a [Server].
//
// The status determines how policies count the call:
//
//	UNAVAILABLE                            failed; worth another attempt
//	DEADLINE_EXCEEDED                      failed; worth another attempt only if the
//	                                       attempt's own timeout passed
//	UNKNOWN, INTERNAL, DATA_LOSS           failed
//	CANCELED, if the call's ctx is done     ignored
//	RESOURCE_EXHAUSTED and every other     answered: the server works
//
// Policies ignore a call that fails because of the caller's own mistake, such as metadata that cannot be sent
// or a message that cannot be encoded.
//
// A server can specify when to retry: in a RetryInfo detail of the status, or in the trailer
// grpc-retry-pushback-ms. The call is then worth another attempt after the specified time, regardless of the
// status code. If there are both a RetryInfo and a trailer, the longer time counts. A negative trailer means
// that another attempt cannot help. A call that is worth another attempt is retried only if it may be
// repeated: see [Client].
//
// RESOURCE_EXHAUSTED without a time is not worth another attempt, because a request or a response may be too
// large. A request that is too large would fail again in the next attempt.
type StatusError struct {
	Method string     // the full method: "/users.v1.Users/Get"
	Code   codes.Code // the code of the status
	Err    error      // the error that gRPC or the handler returned

	may      bool          // whether the call may be repeated
	worth    hint          // whether another attempt is worthwhile
	after    time.Duration // the time that the server specified for a retry; 0 if none
	local    bool          // the client program caused the error
	canceled bool          // the code is CANCELED because the call's ctx is done
}

// A hint is the information from a status and a server about whether another attempt can help.
type hint uint8

const (
	unknown hint = iota
	yes
	no
)

// pushbackKey is the trailer in which a server specifies when the call may be retried (gRFC A6).
const pushbackKey = "grpc-retry-pushback-ms"

// newStatusError returns the error that policies see if err is the result of a call under ctx. sent is nil on
// the server.
func newStatusError(ctx context.Context, method string, err error, sent *evidence) *StatusError {
	st := statusOf(err)
	e := &StatusError{Method: method, Code: st.Code(), Err: err}
	// A canceled call must not count as an answer. Otherwise a probe that hangs until its caller cancels
	// would close the breaker.
	e.canceled = e.Code == codes.Canceled && ctx.Err() != nil
	if e.Code == codes.Unavailable {
		e.worth = yes
	}
	for _, detail := range st.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			e.worth = yes
			e.after = max(0, info.GetRetryDelay().AsDuration())
		}
	}
	if sent == nil {
		return e
	}
	switch after, hint := pushback(sent.trailer); hint {
	case yes:
		e.worth = yes
		e.after = max(e.after, after)
	case no:
		e.worth, e.after = no, 0
	}
	// The client program is the cause if, for example, the metadata cannot be sent or the program closed the
	// connection.
	e.local = sent.neverSent() && e.Code != codes.Unavailable && e.Code != codes.DeadlineExceeded
	// It is also the cause if its message cannot be encoded, for example because a string is not valid UTF-8.
	// A server that cannot encode its reply returns the same text, but also a trailer.
	e.local = e.local || len(sent.trailer) == 0 && failedToEncode(st)
	return e
}

// pushback returns the value of grpc-retry-pushback-ms (gRFC A6). A value that is not a number means that the
// call must not be retried.
func pushback(trailer metadata.MD) (time.Duration, hint) {
	values := trailer.Get(pushbackKey)
	if len(values) == 0 {
		return 0, unknown
	}
	ms, err := strconv.ParseInt(values[0], 10, 32)
	if err != nil || ms < 0 || len(values) > 1 {
		return 0, no
	}
	return time.Duration(ms) * time.Millisecond, yes
}

func (e *StatusError) Error() string { return "resiliencegrpc: " + e.Method + ": " + e.Err.Error() }

// Unwrap returns Err.
func (e *StatusError) Unwrap() error { return e.Err }

// GRPCStatus returns the status of Err.
func (e *StatusError) GRPCStatus() *status.Status { return statusOf(e.Err) }

// statusOf returns the status that gRPC sends for err.
func statusOf(err error) *status.Status {
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err)
	}
	return st
}

// RetryAfter returns the time to wait before another attempt, as the server specified it, or 0.
func (e *StatusError) RetryAfter() time.Duration { return e.after }

// Retryable reports whether the call may be repeated and another attempt is worthwhile.
func (e *StatusError) Retryable() bool { return e.may && e.worth == yes }

// Answered reports whether the status shows that the server works.
func (e *StatusError) Answered() bool { return !e.canceled && (e.local || answers(e.Code)) }

// Throttled reports whether the server rejected the call to shed load: the code is RESOURCE_EXHAUSTED or
// UNAVAILABLE, and the server specified when to retry. Package bulkhead/adaptive counts such a call as a sign
// of overload.
func (e *StatusError) Throttled() bool {
	return e.after > 0 && (e.Code == codes.ResourceExhausted || e.Code == codes.Unavailable)
}

// ErrorType returns the name of the code, such as "UNAVAILABLE", for OpenTelemetry's attribute error.type.
func (e *StatusError) ErrorType() string { return code.Code(e.Code).String() }

// Timeout reports whether the code is DEADLINE_EXCEEDED.
func (e *StatusError) Timeout() bool { return e.Code == codes.DeadlineExceeded }

// A notMadeError is the error of an attempt that was never sent, for a reason in this process. Either the
// attempt ended while it waited for a free HTTP/2 stream on a connection, or the process had no file
// descriptor or local port left. Policies do not count the error as a failure of the server.
type notMadeError struct{ *StatusError }

// Refused returns true.
func (e *notMadeError) Refused() bool { return true }

// Unwrap returns the StatusError.
func (e *notMadeError) Unwrap() error { return e.StatusError }

// A wrongCallError is the error of a call that failed because of the caller's own mistake, such as a call
// with metadata that cannot be sent. The policies see the error as a refusal, which they ignore. If it were
// an answer, it would close the breaker of a server that is down. After the policies have returned, the error
// becomes an answer, because a saga would repeat a refused call forever.
type wrongCallError struct {
	*StatusError
	decided atomic.Bool // the policies have returned
}

// Refused returns true while the policies run, and false after they have returned.
func (e *wrongCallError) Refused() bool { return !e.decided.Load() }

// Unwrap returns the StatusError.
func (e *wrongCallError) Unwrap() error { return e.StatusError }

// answers reports whether code shows that the server works.
func answers(code codes.Code) bool {
	switch code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Unknown, codes.Internal, codes.DataLoss:
		return false
	}
	return true
}
