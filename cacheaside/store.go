package cacheaside

import (
	"context"
	"time"
)

// A Store is a cache that processes share, behind the memory of each. Package
// redisstore has one on Redis; the rules below are what any other must keep for
// the promise of this package to hold.
//
// Each method is atomic for each of its keys. The keys of one call are of one
// shard, and differ. An error means that the shard did not answer, and that it is
// not known whether the method had its effect.
//
// A Store measures time by one clock, its own. It bounds how long a call takes:
// the ctx of most calls has no deadline.
type Store interface {
	// Shard returns the part of the Store that holds key, always the same one.
	// When a call fails, the Cache leaves the shard of its keys alone for
	// Config.ErrorPause, and goes on with the others. A Store whose keys can only
	// fail together returns 0 for each.
	Shard(key string) uint8

	// Acquire looks keys up and takes the lease to load those that are not fresh,
	// as each Ask says. It returns an answer for each, in their order.
	//
	// A key has a generation: it begins with the first lease after an invalidation
	// and ends with the next invalidation, or when a value has been filled. Each
	// holder of the lease, the first and those that take it over when its time has
	// passed, is given the Grant of the present generation.
	Acquire(ctx context.Context, asks ...Ask) ([]Lookup, error)

	// Fill stores values and ends the leases of their keys. A value is stored only
	// if the generation of its Grant lasts, that is, if nothing was invalidated
	// since it was granted and no other load was faster. Fill reports for each
	// value whether nothing was invalidated since.
	Fill(ctx context.Context, values ...Filling) ([]bool, error)

	// Release ends the lease of key if token still holds it. Its generation goes on.
	Release(ctx context.Context, key, token string) error

	// Invalidate deletes the values, the leases and the generations of keys, but no
	// fence, and tells all that watch.
	Invalidate(ctx context.Context, keys ...string) error

	// Expire ends the freshness of the values, deletes the leases and the
	// generations of keys, and tells all that watch.
	Expire(ctx context.Context, keys ...string) error

	// InvalidateAll is Invalidate for every key of every shard.
	InvalidateAll(ctx context.Context) error

	// Fence is Invalidate and then, until Unfence with the same token, allows no
	// lease and no value. Several fences may stand at once. It returns how long the
	// writer may take; the fence stands for twice as long, and then falls.
	Fence(ctx context.Context, key, token string) (time.Duration, error)

	// Unfence removes the fence of token, and is Invalidate whether it still stood
	// or not. A Fence of token that arrives later has no effect.
	Unfence(ctx context.Context, key, token string) error

	// Watch calls up when it hears of every change from there on, and heard for
	// each that this Store did not make itself: with the key, or "" for all of
	// them. It returns when ctx has ended, or else, with an error, as soon as it may
	// have missed one. A Store that nothing can be heard from calls up and waits
	// for ctx. It does not call heard after it has returned.
	Watch(ctx context.Context, up func(), heard func(key string)) error
}

// An Ask is what a Cache asks a [Store] about one key.
type Ask struct {
	Key   string
	Token string // of the one that asks, for the lease; "": look, and take no lease
	Renew bool   // take the lease although the value is fresh
}

// A Lookup is what a [Store] answers to an [Ask].
type Lookup struct {
	State State
	Value []byte        // nil: none
	Fresh time.Duration // Value is fresh for this long from now; less than 0: for how long it has not been
	Wait  time.Duration // Busy: how much longer the lease lasts
	Grant string        // Leased: what Fill has to show
}

// A Filling is a value for a [Store]: fresh for Fresh from now, and to be forgotten
// after Keep.
type Filling struct {
	Key         string
	Grant       string
	Value       []byte
	Fresh, Keep time.Duration
}

// A State says what the caller of Acquire is to do.
type State int

const (
	Hit    State = iota + 1 // use the value, which is fresh
	Leased                  // load, and fill
	Busy                    // another process loads: ask again
	Fenced                  // a writer is at work: load, and do not keep the result
	Missed                  // no fresh value, and no lease was asked for
)
