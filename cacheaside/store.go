package cacheaside

import (
	"context"
	"time"
)

// A Store is a cache that processes share, behind the memory of each. Package
// redisstore has one on Redis; the rules below are what any other must keep for
// the promise of this package to hold. Each method is atomic for its key. An
// error means that it is not known whether the method had its effect.
//
// A Store measures time by one clock, its own. It bounds how long a call of it
// takes: the ctx that it is given may have no deadline.
type Store interface {
	// Acquire looks key up and, where there is something to load, tries to take
	// the lease to fill it. renew asks for the lease although the value is fresh.
	// A lease that token already holds is granted again.
	Acquire(ctx context.Context, key, token string, renew bool) (Lookup, error)

	// Fill stores a value, fresh for fresh from now and to be forgotten after keep,
	// and gives the lease back, if token still holds it; it reports whether. A
	// lease whose time has passed is still held until someone takes it.
	Fill(ctx context.Context, key, token string, value []byte, fresh, keep time.Duration) (bool, error)

	// Release gives the lease back if token still holds it.
	Release(ctx context.Context, key, token string) error

	// Invalidate deletes the value and the lease, but no fence, and tells all who
	// watch.
	Invalidate(ctx context.Context, key string) error

	// Expire ends the freshness of the value, deletes the lease, and tells all who
	// watch.
	Expire(ctx context.Context, key string) error

	// InvalidateAll is Invalidate for every key.
	InvalidateAll(ctx context.Context) error

	// Fence is Invalidate and then, until Unfence with the same token, allows no
	// lease and no value. Several fences may stand at once. It returns how long the
	// writer may take; the fence stands for longer than that, and then falls.
	Fence(ctx context.Context, key, token string) (time.Duration, error)

	// Unfence removes the fence of token, if it still stands, and is Invalidate
	// whether it does or not.
	Unfence(ctx context.Context, key, token string) error

	// Watch calls up when it hears of every change from there on, and heard for
	// each that this Store did not make itself: with the key, or "" for all of
	// them. It returns when ctx has ended, or else, with an error, as soon as it may
	// have missed one. A Store that nothing can be heard from calls up and waits
	// for ctx. It does not call heard after it has returned.
	Watch(ctx context.Context, up func(), heard func(key string)) error
}

// A Lookup is what a [Store] answers to Acquire.
type Lookup struct {
	State State
	Value []byte        // nil: none
	Fresh time.Duration // Value is fresh for this long from now; less than 0: for how long it has not been
	Wait  time.Duration // Busy: how much longer the lease lasts
}

// A State says what the caller of Acquire is to do.
type State int

const (
	Hit    State = iota + 1 // use the value, which is fresh
	Leased                  // load, and fill
	Busy                    // someone else loads: ask again
	Fenced                  // someone writes: load, and do not keep the result
)
