package lease

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrLost is matched by every [*LostError]. After a term is over, [Term.Err] and [Term.Fence] return a LostError. It
	// is also the cause of the term's ctx, unless that ctx was done before; see [Term.Context].
	ErrLost = errors.New("lease: lost")

	// ErrRunTaken is returned by [Store].Renew if the store has already recorded this run of [Candidate.Every] or a later
	// run. If Renew returns ErrRunTaken, Every does not call its function for the run.
	ErrRunTaken = errors.New("lease: run taken")

	// ErrHeld is matched by every [*HeldError].
	ErrHeld = errors.New("lease: held by another")

	// ErrNoFence is returned by [Term.Fence] if the store is not a [Fencer].
	ErrNoFence = errors.New("lease: store cannot fence transactions")
)

// A reason is the reason why a term is over.
type reason string

const (
	notRenewed reason = "not renewed in time"
	endedThere reason = "ended by the store" // another term has started, or the store has lost the lease's record
	resigned   reason = "resigned"
	neverBegan reason = "zero Term"
)

// A LostError reports that a term is over, and why: the term was not renewed in time, the store has ended it, or it was
// resigned. It matches [ErrLost].
type LostError struct {
	Name  string // the name of the lease
	Epoch int64  // the term's epoch
	Err   error  // the error of the last renewal if the term was not renewed in time; may be nil

	reason reason
}

// Error names the lease, the term and the reason.
func (e *LostError) Error() string {
	if e.reason == neverBegan {
		return "lease: zero Term is over"
	}
	text := fmt.Sprintf("lease: %s: term %d is over: %s", e.Name, e.Epoch, e.reason)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Is reports whether target is [ErrLost].
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Unwrap returns Err.
func (e *LostError) Unwrap() error { return e.Err }

// Retryable returns false: a term that is over is not resumed.
func (e *LostError) Retryable() bool { return false }

// A HeldError reports that [Candidate.TryCampaign] did not get the lease, and which process holds it. It matches
// [ErrHeld].
type HeldError struct {
	Name string // the name of the lease

	// Holder is the Config.Holder of the process that holds the lease. Holder is empty while another process is
	// acquiring the lease, or while a fenced transaction of the last holder is still open.
	Holder string

	After time.Duration // the time until the lease ends unless it is renewed; if Holder is empty, the wait until a retry
}

// Error names the lease and its holder.
func (e *HeldError) Error() string {
	if e.Holder == "" {
		return fmt.Sprintf("lease: %s: another process is getting it, or a fenced transaction of the last holder is open",
			e.Name)
	}
	return fmt.Sprintf("lease: %s: held by %s", e.Name, e.Holder)
}

// Is reports whether target is [ErrHeld].
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// Refused returns true: no term started.
func (e *HeldError) Refused() bool { return true }

// RetryAfter returns After.
func (e *HeldError) RetryAfter() time.Duration { return e.After }
