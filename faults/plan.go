package faults

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// A Kind is a kind of fault. Its text stands in a Config as it is.
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
	// Refuse ends the call like a port on which nobody listens: with an error that wraps
	// syscall.ECONNREFUSED. A Handler closes the connection, or the stream in HTTP/2.
	Refuse Kind = "refuse"
	// Reset makes the call and breaks the response off after Bytes of its body, or at its end,
	// with an error that wraps syscall.ECONNRESET. Func returns such an error in place of nil. A
	// Handler closes the connection, or the stream in HTTP/2.
	Reset Kind = "reset"
	// SlowBody makes the call and delivers the body of its response at Rate bytes a second, in up
	// to ten pieces a second. Func waits for Delay after a success.
	SlowBody Kind = "slow body"
)

var kinds = []Kind{Latency, Fail, Status, Hang, Refuse, Reset, SlowBody}

// A Plan says which fault happens to which calls.
type Plan struct {
	Kind Kind

	// At is when the plan begins, after the script was made or last updated.
	At time.Duration
	// For is how long the plan lasts. Zero means that it does not end.
	For time.Duration
	// Share, in (0, 1], is the share of the calls, chosen at random, that the plan applies to:
	// but for a Latency, of those that no earlier plan ends. Zero means 1.
	Share float64
	// Count is how many calls the plan applies to at most. Zero means no limit.
	Count int

	// Delay and Spread are the time of a Latency, and Delay that of a SlowBody of Func.
	Delay, Spread time.Duration
	// Err is the error of a Fail. Nil means ErrInjected.
	Err error
	// Status, in [200, 599], is that of a Status, and of a Fail of Handler. Zero means 503.
	Status int
	// RetryAfter is that of a Status, and of a Fail of Handler: in HTTP rounded up to whole
	// seconds. Zero means none.
	RetryAfter time.Duration
	// Bytes of the body are delivered before a Reset. Zero means none but the headers.
	Bytes int64
	// Rate is the bytes a second of a SlowBody. Zero means 1000.
	Rate int
}

func (p *Plan) status() int { return cmp.Or(p.Status, 503) }

func (p *Plan) rate() int { return cmp.Or(p.Rate, 1000) }

// ErrInjected is the error of a Fail without an Err.
var ErrInjected = errors.New("faults: injected failure")

// A statusError is the error that Func returns for a Status.
type statusError struct {
	code  int
	after time.Duration
}

func (e *statusError) Error() string             { return fmt.Sprintf("faults: injected status %d", e.code) }
func (e *statusError) RetryAfter() time.Duration { return e.after }
