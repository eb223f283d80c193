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

// A StatusError is the error that policies see if a call does not end with OK. The call is an attempt of a [Client], or
// the call of a handler of a [Server].
//
// The status determines how policies count the call:
//
//	UNAVAILABLE                            failed; worth another attempt
//	DEADLINE_EXCEEDED                      failed; worth another attempt only if the
//	                                       attempt's own timeout passed
//	UNKNOWN, INTERNAL, DATA_LOSS           failed
//	CANCELED, if the ctx has ended         ignored
//	RESOURCE_EXHAUSTED and every other     answered: the server works
//
// Policies ignore a call that is wrong in itself, such as a call whose metadata cannot be sent or whose message cannot
// be encoded.
//
// A RetryInfo detail or the trailer grpc-retry-pushback-ms makes any of these worth another attempt after the given
// time. If there are both, the longer time counts. A negative pushback means that no attempt is worthwhile. All of
// this applies only if the call may be repeated.
//
// If a message is too large, the call also ends with RESOURCE_EXHAUSTED, on either side, and another attempt would
// end in the same way. Therefore RESOURCE_EXHAUSTED alone is not worth another attempt.
type StatusError struct {
	Method string     // the full method: "/users.v1.Users/Get"
	Code   codes.Code // the code of the status
	Err    error      // the error that gRPC or the handler returned

	may      bool          // the call may be sent again
	worth    hint          // whether another attempt is worthwhile
	after    time.Duration // the time that the server asked for; 0 if none
	local    bool          // the caller or its program caused the error
	canceled bool          // the code is CANCELED because the ctx of the call has ended
}

// A hint is what a status and a server report about another attempt.
type hint uint8

const (
	unknown hint = iota
	yes
	no
)

// pushbackKey is the trailer by which a server specifies when the call may be retried (gRFC A6).
const pushbackKey = "grpc-retry-pushback-ms"

// newStatusError returns err, the error of a call under ctx, as policies see it. sent is nil on the server.
func newStatusError(ctx context.Context, method string, err error, sent *evidence) *StatusError {
	st := statusOf(err)
	e := &StatusError{Method: method, Code: st.Code(), Err: err}
	// As an answer, a probe that hangs until its caller cancels would close a breaker.
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
	// For example, the metadata cannot be sent, or the connection was closed by the program.
	e.local = sent.neverSent() && e.Code != codes.Unavailable && e.Code != codes.DeadlineExceeded
	// Or a message cannot be encoded, such as one with text from outside that is not UTF-8. A server that cannot
	// encode its answer returns the same message, but has a trailer.
	e.local = e.local || len(sent.trailer) == 0 && failedToEncode(st)
	return e
}

// pushback returns the value of grpc-retry-pushback-ms (gRFC A6). A value that is not a number means that there may be
// no other attempt.
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

// RetryAfter returns the time for which the server asked not to be called, or 0.
func (e *StatusError) RetryAfter() time.Duration { return e.after }

// Retryable reports whether the call may be sent again and another attempt is worthwhile.
func (e *StatusError) Retryable() bool { return e.may && e.worth == yes }

// Answered reports whether the status shows that the server works.
func (e *StatusError) Answered() bool { return !e.canceled && (e.local || answers(e.Code)) }

// Throttled reports whether the server rejected the call to shed load: the code is RESOURCE_EXHAUSTED or UNAVAILABLE,
// and the server specified when to retry. Package bulkhead/adaptive counts the call as throttled.
func (e *StatusError) Throttled() bool {
	return e.after > 0 && (e.Code == codes.ResourceExhausted || e.Code == codes.Unavailable)
}

// ErrorType returns the code in the form "UNAVAILABLE", for OpenTelemetry's attribute error.type.
func (e *StatusError) ErrorType() string { return code.Code(e.Code).String() }

// Timeout reports whether the code is DEADLINE_EXCEEDED.
func (e *StatusError) Timeout() bool { return e.Code == codes.DeadlineExceeded }

// A notMadeError is the error of an attempt that was not made because of this process: the attempt ended while it
// waited for a stream of a connection, or there was no file descriptor or local port. It does not count against the
// server.
type notMadeError struct{ *StatusError }

// Refused returns true.
func (e *notMadeError) Refused() bool { return true }

// Unwrap returns the StatusError.
func (e *notMadeError) Unwrap() error { return e.StatusError }

// A wrongCallError is the error of a call that is wrong in itself, such as a call with metadata that cannot be sent.
// The policies see it as a refusal, which they do not count: as an answer, it would close the breaker of a server that
// is down. The caller gets it as an answer, because a saga repeats a refused call until it is made.
type wrongCallError struct {
	*StatusError
	decided atomic.Bool // the policies have returned
}

// Refused reports whether the policies have not returned yet.
func (e *wrongCallError) Refused() bool { return !e.decided.Load() }

// Unwrap returns the StatusError.
func (e *wrongCallError) Unwrap() error { return e.StatusError }

// answers reports whether a server that returns the code works.
func answers(code codes.Code) bool {
	switch code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Unknown, codes.Internal, codes.DataLoss:
		return false
	}
	return true
}
