package faults

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// A Kind is a kind of fault. The text of a Kind appears in settings files and metrics.
type Kind string

const (
	// Latency delays the call by [Plan].Delay plus a random time of up to Plan.Spread. If ctx is done during
	// the delay, the call is not started.
	Latency Kind = "latency"
	// Fail returns [Plan].Err without starting the call. In a [Handler], Fail responds with the HTTP status
	// Plan.Status.
	Fail Kind = "fail"
	// Status responds with the HTTP status [Plan].Status and the time Plan.RetryAfter, without starting the
	// call. In a [Func], Status returns an error that has the plan's RetryAfter.
	Status Kind = "status"
	// Hang waits until ctx is done, without starting the call.
	Hang Kind = "hang"
	// Refuse fails the call as if the server's port were closed, with an error that wraps
	// syscall.ECONNREFUSED. A Handler closes the connection or, over HTTP/2, resets the stream.
	Refuse Kind = "refuse"
	// Reset runs the call and breaks the connection while the response's body is read. After [Plan].Bytes
	// bytes, or at the end of a shorter body, Read returns an error that wraps syscall.ECONNRESET. A [Func]
	// returns an error that wraps syscall.ECONNRESET if the call has succeeded. A Handler closes the
	// connection or, over HTTP/2, resets the stream.
	Reset Kind = "reset"
	// SlowBody runs the call and delivers the body of its response at [Plan].Rate bytes per second, in pieces of
	// at most Rate/10 bytes, or of 1 byte if Rate is below 10. A [Func] waits for Plan.Delay after a successful
	// call, and returns the error of ctx if ctx is done first.
	SlowBody Kind = "slow_body"
)

var kinds = []Kind{Latency, Fail, Status, Hang, Refuse, Reset, SlowBody}

// A Plan specifies a fault and the calls that it applies to.
type Plan struct {
	Kind Kind // required

	// At is the time at which the plan starts, counted from New or from the last Update.
	At time.Duration
	// For is the duration of the plan. Zero means that the plan does not end.
	For time.Duration
	// Share, in (0, 1], is the probability that the plan applies to a call. If an earlier plan ends the call,
	// only Latency plans are still considered for the call. Zero means 1.
	Share float64
	// Count is the maximum number of calls that the plan applies to. Zero means no limit.
	Count int

	// Delay is the minimum delay of a Latency plan, and Spread is the maximum random time that is added to
	// Delay. Delay is also the time that a [Func] waits for a SlowBody plan.
	Delay, Spread time.Duration
	// Err is the error of a Fail plan. Nil means [ErrInjected].
	Err error
	// Status, in [200, 599], is the HTTP status in the response of a Status plan, or of a Fail plan in a
	// [Handler]. Zero means 503.
	Status int
	// RetryAfter is the time after which the client may retry. A Status plan sends RetryAfter, and so does a
	// Fail plan in a [Handler]. In an HTTP response, RetryAfter is rounded up to whole seconds. Zero means
	// that the response has no Retry-After.
	RetryAfter time.Duration
	// Bytes is the number of bytes of the body that a Reset plan delivers before it breaks the connection.
	// Zero means that only the header is delivered.
	Bytes int64
	// Rate is the number of bytes per second that a SlowBody plan delivers. Zero means 1000.
	Rate int
}

// status returns the HTTP status of the plan.
func (p *Plan) status() int { return cmp.Or(p.Status, 503) }

// rate returns the bytes per second of the plan.
func (p *Plan) rate() int { return cmp.Or(p.Rate, 1000) }

// ErrInjected is the error of a Fail plan that has no Err.
var ErrInjected = errors.New("faults: injected failure")

// A statusError is the error that Func returns for a Status plan.
type statusError struct {
	code  int
	after time.Duration
}

func (e *statusError) Error() string { return fmt.Sprintf("faults: injected status %d", e.code) }

// RetryAfter returns the plan's RetryAfter.
func (e *statusError) RetryAfter() time.Duration { return e.after }
