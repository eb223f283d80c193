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
	// Latency delays the call by Delay and a random time from 0 to Spread. If the ctx of
	// the call ends first, the call is not made and ends with the error of ctx.
	Latency Kind = "latency"
	// Fail returns Err without making the call. A Handler answers with Status instead.
	Fail Kind = "fail"
	// Status answers with Status, and with Retry-After if RetryAfter is set, without
	// making the call. Func returns an error that has this RetryAfter and is otherwise a
	// failure, whatever the Status.
	Status Kind = "status"
	// Hang waits until the ctx of the call ends and returns the error of ctx, without
	// making the call. A ctx that never ends hangs forever.
	Hang Kind = "hang"
	// Refuse ends the call like a port on which nobody listens: with an error that wraps
	// syscall.ECONNREFUSED, without making the call. A Handler closes the connection, or
	// the stream in HTTP/2, before it answers.
	Refuse Kind = "refuse"
	// Reset makes the call and breaks the response off after Bytes of its body, or at
	// the end of a shorter body. Reading on returns an error that wraps
	// syscall.ECONNRESET. Func makes the call and returns such an error if the call
	// succeeded. A Handler closes the connection, or the stream in HTTP/2.
	Reset Kind = "reset"
	// SlowBody makes the call and delivers the body of its response at Rate bytes a
	// second, in up to ten pieces a second. Func makes the call and, if it succeeded,
	// waits for Delay.
	SlowBody Kind = "slow body"
)

var kinds = []Kind{Latency, Fail, Status, Hang, Refuse, Reset, SlowBody}

// A Plan says which fault happens to which calls. The fields below Count belong to the
// kinds that they name. Other kinds ignore them.
type Plan struct {
	Kind Kind

	// At is when the plan begins, counted from when the script was made or last updated.
	// Zero means immediately.
	At time.Duration
	// For is how long the plan lasts. Zero means that it does not end.
	For time.Duration
	// Share is the share of the calls that the plan applies to, in (0, 1], chosen at
	// random. Zero means 1. A plan other than a Latency has no part in calls that an
	// earlier plan ends: of two such plans with a Share of 0.5, the second ends 0.25 of
	// all calls.
	Share float64
	// Count is how many calls the plan applies to at most. Zero means no limit.
	Count int

	// Delay and Spread make up the time of a Latency. Delay is also that of a SlowBody
	// from Func. Zero means none.
	Delay, Spread time.Duration
	// Err is the error of a Fail. Nil means ErrInjected.
	Err error
	// Status is the status of a Status, and of a Fail from Handler, in [200, 599]. Zero
	// means 503.
	Status int
	// RetryAfter is the Retry-After of a Status, and of a Fail from Handler. In HTTP it
	// is rounded up to whole seconds. Zero means none.
	RetryAfter time.Duration
	// Bytes is how much of the body is delivered before a Reset. Zero means none: the
	// response ends after its headers.
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
