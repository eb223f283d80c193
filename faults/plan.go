package faults

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// A Kind is a kind of fault. Settings files and metrics use its text.
type Kind string

const (
	// Latency delays the call by Delay and a random time up to Spread. If ctx ends first, the
	// call is not made.
	Latency Kind = "latency"
	// Fail returns Err, and a Handler answers with Status, without making the call.
	Fail Kind = "fail"
	// Status answers with Status and RetryAfter, without making the call. Func returns a failure
	// with this RetryAfter.
	Status Kind = "status"
	// Hang waits until ctx ends, without making the call.
	Hang Kind = "hang"
	// Refuse fails the call like a closed port, with an error that wraps syscall.ECONNREFUSED. A Handler closes the
	// connection, or the stream in HTTP/2.
	Refuse Kind = "refuse"
	// Reset makes the call and truncates the body of the response after Bytes, or at its end, with an error that
	// wraps syscall.ECONNRESET. Func returns such an error instead of nil. A Handler closes the connection, or the
	// stream in HTTP/2.
	Reset Kind = "reset"
	// SlowBody makes the call and delivers the body of its response at Rate bytes per second, in up to 10 pieces
	// per second. Func waits for Delay after a success.
	SlowBody Kind = "slow_body"
)

var kinds = []Kind{Latency, Fail, Status, Hang, Refuse, Reset, SlowBody}

// A Plan specifies a fault and the calls that it applies to.
type Plan struct {
	Kind Kind // required

	// At is the time from New or the last Update to the start of the plan.
	At time.Duration
	// For is the duration of the plan. Zero means that the plan does not end.
	For time.Duration
	// Share, in (0, 1], is the share of the calls that the plan applies to, chosen at random. Except for Latency,
	// calls that an earlier plan ends are not counted. Zero means 1.
	Share float64
	// Count is the maximum number of calls that the plan applies to. Zero means no limit.
	Count int

	// Delay and Spread are the minimum delay of a Latency and the most that chance adds to it. Delay is also the
	// delay of a SlowBody in Func.
	Delay, Spread time.Duration
	// Err is the error of a Fail. Nil means ErrInjected.
	Err error
	// Status, in [200, 599], is the HTTP status of a Status, and of a Fail in Handler. Zero means 503.
	Status int
	// RetryAfter is the time after which the client may retry, for a Status and for a Fail in Handler. HTTP rounds
	// it up to whole seconds. Zero means none.
	RetryAfter time.Duration
	// Bytes is the number of bytes of the body that are delivered before a Reset. Zero means only the headers.
	Bytes int64
	// Rate is the number of bytes per second of a SlowBody. Zero means 1000.
	Rate int
}

// status returns the HTTP status of the plan.
func (p *Plan) status() int { return cmp.Or(p.Status, 503) }

// rate returns the bytes per second of the plan.
func (p *Plan) rate() int { return cmp.Or(p.Rate, 1000) }

// ErrInjected is the error of a Fail without an Err.
var ErrInjected = errors.New("faults: injected failure")

// A statusError is the error that Func returns for a Status.
type statusError struct {
	code  int
	after time.Duration
}

func (e *statusError) Error() string { return fmt.Sprintf("faults: injected status %d", e.code) }

// RetryAfter returns the plan's RetryAfter.
func (e *statusError) RetryAfter() time.Duration { return e.after }
