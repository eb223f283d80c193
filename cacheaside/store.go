package cacheaside

import (
	"context"
	"time"
)

// A Store is a cache that processes share, behind the memory of each. Package redisstore
// implements it on Redis, and package storetest tests what another one must do.
//
// Each method is atomic for each of its keys. The keys of one call belong to one shard. A
// key may occur twice; the call then does what two calls would do, in order. An error
// means that the shard did not answer; the call may have had its effect.
//
// A key has a value, a lease and a generation for each Version. Fences and invalidations
// concern all of them. A generation begins with the first lease after an invalidation, and
// ends with the next invalidation or when a value is filled.
//
// A Store measures time with one clock of its own. It must bound the duration of a call
// itself: the ctx of most calls has no deadline.
type Store interface {
	// Shard returns the part of the Store that holds key, always the same one. Keys fail
	// together with the others of their shard, and Gets then skip it for Config.ErrorPause.
	Shard(key string) uint8

	// Acquire looks keys up and takes the lease of each key that is not fresh, as its Ask
	// says. It returns one answer for each Ask, in order. Each holder of the lease gets the
	// Grant of the current generation: the first holder, and any that takes the lease over
	// when its time has passed.
	Acquire(ctx context.Context, asks ...Ask) ([]Lookup, error)

	// Fill stores values and ends the leases of their keys. A value is stored only if the
	// generation of its Grant has not ended. Fill reports, for each value, whether nothing
	// was invalidated since its Grant.
	Fill(ctx context.Context, values ...Filling) ([]bool, error)

	// Release ends the lease that ask took, if its Token still holds it. The generation
	// goes on. With failed, the load has failed: Acquire tells those who wait for it.
	Release(ctx context.Context, ask Ask, failed bool) error

	// Invalidate deletes the values, leases and generations of keys, but not their
	// fences, and notifies the processes that watch.
	Invalidate(ctx context.Context, keys ...string) error

	// Expire is Invalidate that keeps the values, no longer fresh.
	Expire(ctx context.Context, keys ...string) error

	// InvalidateAll is Invalidate for every key of every shard.
	InvalidateAll(ctx context.Context) error

	// Fence invalidates key and then, until Unfence with the same token, allows neither a
	// lease nor a value for it. Several fences may stand at once. Fence returns how long
	// the write may take. The fence stands for twice as long and then falls.
	Fence(ctx context.Context, key, token string) (time.Duration, error)

	// Unfence removes the fence of token and invalidates key, whether or not the fence
	// still stood. A Fence with the same token that arrives later has no effect.
	Unfence(ctx context.Context, key, token string) error

	// Watch calls up once it hears of all further changes, and heard for each change that
	// this Store did not make itself: with the key, or "" for all keys. It returns when
	// ctx has ended, or with an error as soon as it may have missed a change, and calls
	// nothing after that. A Store that cannot hear of changes calls up and waits for ctx.
	// The Cache makes one call of Watch at a time; its Close waits for it.
	Watch(ctx context.Context, up func(), heard func(key string)) error
}

// An Ask is what a Cache asks a [Store] about a Key and a Version.
type Ask struct {
	Key     string
	Version uint32
	Token   string        // of the caller, which wants the lease
	Refresh bool          // take the lease even if the value is fresh
	Waits   string        // Waits of the first answer that was Busy; "" if there was none
	Pause   time.Duration // how long after a failed load an old value is to be served
}

// A Lookup is the answer of a [Store] to an [Ask].
type Lookup struct {
	State State
	Value []byte        // nil if there is none
	Fresh time.Duration // how much longer Value is fresh; negative: how long ago it ceased to be
	Wait  time.Duration // if Busy: how much longer the lease lasts
	Waits string        // if Busy: what the next Ask presents, to hear of loads that fail from now on
	Grant string        // if Leased: what Fill must present
}

// A Filling is the Value of a Key and a Version for a [Store], with the Grant of its lease. It
// is fresh for Fresh from now and deleted after Keep.
type Filling struct {
	Key         string
	Version     uint32
	Grant       string
	Value       []byte
	Fresh, Keep time.Duration
}

// A State says what the caller of [Store].Acquire does next.
type State string

const (
	Hit    State = "hit"    // use the value, which is fresh
	Leased State = "leased" // load the value, then call Fill or Release
	Busy   State = "busy"   // another process loads the value; ask again
	Failed State = "failed" // a load failed for which the Ask waited, or one within Pause beside an old value
	Fenced State = "fenced" // a write is under way; load the value and do not keep it
)
