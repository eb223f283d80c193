package resiliencegrpc

import (
	"context"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// A StatusError is a call that did not end with OK, as policies see it: an attempt of a
// [Client], or what a handler returned to a [Server].
//
// What the status says of the server:
//
//	UNAVAILABLE                            failed; worth another attempt
//	DEADLINE_EXCEEDED                      failed; worth another attempt only if it was
//	                                       the attempt's own timeout that passed
//	UNKNOWN, INTERNAL, DATA_LOSS           failed
//	CANCELED, if the ctx has ended         nothing
//	RESOURCE_EXHAUSTED and every other     answered: the server works, and its answer is no
//
// A RetryInfo detail or grpc-retry-pushback-ms makes any of them worth another attempt
// after the time that it gives, the longer one of both; a negative pushback, none. Any of
// that holds only if the call may be repeated.
//
// A message that is too large also ends with RESOURCE_EXHAUSTED, on either side, and would
// be too large again. That is why this status by itself is not worth another attempt.
type StatusError struct {
	Method string     // "/users.v1.Users/Get"
	Code   codes.Code // codes.Unavailable
	Err    error      // as gRPC or the handler returned it

	may   bool // be sent again
	worth said
	after time.Duration
	local bool // the caller or its program is at fault
	left  bool // the ctx of the call has ended, and the status says no more
}

// said is what a server says about another attempt.
type said uint8

const (
	unsaid said = iota
	yes
	no
)

// pushbackKey is the trailer by which a server says when to come back (gRFC A6).
const pushbackKey = "grpc-retry-pushback-ms"

// newStatusError returns the err of a call under ctx as policies see it. sent is nil on the server.
func newStatusError(ctx context.Context, method string, err error, sent *evidence) *StatusError {
	st := statusOf(err)
	e := &StatusError{Method: method, Code: st.Code(), Err: err}
	// As an answer, a probe that hangs until its caller leaves would close a breaker.
	e.left = e.Code == codes.Canceled && ctx.Err() != nil
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
	switch after, said := pushback(sent.trailer); said {
	case yes:
		e.worth = yes
		e.after = max(e.after, after)
	case no:
		e.worth, e.after = no, 0
	}
	// A call that fails in the program itself, such as one with metadata that cannot be
	// sent or on a connection that is closed.
	e.local = sent.never() && e.Code != codes.Unavailable && e.Code != codes.DeadlineExceeded
	// Or with a message that cannot be encoded, such as one with text from outside that is not UTF-8. A server
	// that cannot encode its answer says the same, in a trailer.
	e.local = e.local || len(sent.trailer) == 0 && strings.HasPrefix(st.Message(), "grpc: error while marshaling: ")
	return e
}

// pushback returns what a server asks for by grpc-retry-pushback-ms (gRFC A6). What is not
// a number asks for no other attempt.
func pushback(trailer metadata.MD) (time.Duration, said) {
	values := trailer.Get(pushbackKey)
	if len(values) == 0 {
		return 0, unsaid
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

// RetryAfter returns how long the server asked to be left alone: 0 if it did not.
func (e *StatusError) RetryAfter() time.Duration { return e.after }

// Retryable reports whether the call may be sent again, and whether that is worth it.
func (e *StatusError) Retryable() bool { return e.may && e.worth == yes }

// Answered reports whether the status says nothing against the server.
func (e *StatusError) Answered() bool { return !e.left && (e.local || answers(e.Code)) }

// Throttled reports whether the server turned the call away to shed load: the code is
// RESOURCE_EXHAUSTED or UNAVAILABLE, and the server said when to come back. A
// package adaptive counts it as throttled.
func (e *StatusError) Throttled() bool {
	return e.after > 0 && (e.Code == codes.ResourceExhausted || e.Code == codes.Unavailable)
}

// ErrorType returns the code as "UNAVAILABLE", for the attribute error.type of
// OpenTelemetry.
func (e *StatusError) ErrorType() string { return code.Code(e.Code).String() }

// Timeout reports whether the status is DEADLINE_EXCEEDED.
func (e *StatusError) Timeout() bool { return e.Code == codes.DeadlineExceeded }

// answers reports whether a server that returns the status works.
func answers(code codes.Code) bool {
	switch code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Unknown, codes.Internal, codes.DataLoss:
		return false
	}
	return true
}
