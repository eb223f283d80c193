package lease

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrLost is matched by a [*LostError]: once a term is over, of its ctx, Err and Fence.
	ErrLost = errors.New("lease: lost")

	// ErrHeld is matched by a [*HeldError].
	ErrHeld = errors.New("lease: held by another")

	// ErrNoFence is the error of Fence if the store is not a [Fencer].
	ErrNoFence = errors.New("lease: the store has no transactions to fence")
)

// A reason says why a term is over.
type reason string

const (
	notRenewed reason = "not renewed in time"
	endedThere reason = "ended by the store" // another term has begun, or the store has lost it
	resigned   reason = "resigned"
)

// A LostError says which term is over and why: no renewal has succeeded in time, the store
// has ended it, or it was given up.
type LostError struct {
	Name  string
	Epoch int64
	Err   error // why the last renewal has failed; nil if it has not

	reason reason
}

func (e *LostError) Error() string {
	text := fmt.Sprintf("lease: %s: term %d is over: %s", e.Name, e.Epoch, e.reason)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

func (e *LostError) Is(target error) bool { return target == ErrLost }

func (e *LostError) Unwrap() error { return e.Err }

// Retryable returns false: a term that is over does not come back.
func (e *LostError) Retryable() bool { return false }

// A HeldError says that TryCampaign did not get the lease, and who holds it.
type HeldError struct {
	Name   string
	Holder string        // empty: another is being given it, or a transaction that the last holder has fenced is open
	After  time.Duration // until the lease ends if it is not renewed, or when to ask again
}

func (e *HeldError) Error() string {
	if e.Holder == "" {
		return fmt.Sprintf("lease: %s: another is being given it, or the last holder has not finished a transaction", e.Name)
	}
	return fmt.Sprintf("lease: %s: held by %s", e.Name, e.Holder)
}

func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// Refused returns true: the call was not made.
func (e *HeldError) Refused() bool { return true }

func (e *HeldError) RetryAfter() time.Duration { return e.After }
