package cacheaside

import (
	"context"
	"time"
)

// A Store is a cache that processes share, behind the memory of each: package redisstore is one
// on Redis. Package storetest tests another.
//
// Each method is atomic for each of its keys, which belong to one shard. A key may occur twice,
// as in two calls. After an error the call may have had its effect. A Store measures time with
// one clock of its own, and must bound the duration of a call itself.
//
// A key has a value, a lease and a generation for each Version; fences and invalidations concern
// all of them. A generation begins with the first lease after an invalidation, and ends with the
// next invalidation or when a value is filled.
type Store interface {
	// Shard returns the part of the Store that holds key, always the same one. After a failure it is not
	// called for Config.ErrorPause, and after a call that hung, the other shards are tried one at a time.
	Shard(key string) uint8

	// Acquire looks keys up and takes the leases of those that are not fresh, as each Request says. Each
	// holder of a lease, also one that takes it over when its time has passed, gets the Grant of the
	// current generation.
	Acquire(ctx context.Context, asks ...Request) ([]Response, error)

	// Fill ends the leases of keys and stores the values whose generation has not ended. It reports for
	// each whether nothing was invalidated since its Grant.
	Fill(ctx context.Context, values ...Entry) ([]bool, error)

	// Release ends the lease that ask took, if its Token still holds it. The generation goes on. With
	// failed, Acquire tells those who wait that the load has failed.
	Release(ctx context.Context, ask Request, failed bool) error

	// Invalidate deletes the values, leases and generations of keys, but not their fences, and notifies
	// the processes that watch.
	Invalidate(ctx context.Context, keys ...string) error

	// Expire is Invalidate that keeps the values, no longer fresh.
	Expire(ctx context.Context, keys ...string) error

	// InvalidateAll is Invalidate for every key.
	InvalidateAll(ctx context.Context) error

	// Fence invalidates key and allows neither a lease nor a value for it until Unfence with the same
	// token: several may stand at once. It returns how long the write may take. The fence falls after
	// twice as long.
	Fence(ctx context.Context, key, token string) (time.Duration, error)

	// Unfence removes the fence of token, which has no effect if it arrives later, and invalidates key.
	Unfence(ctx context.Context, key, token string) error

	// Watch calls up once it hears of all further changes, and heard for each change that this Store did
	// not make itself: with the key, or "" for all. It returns when ctx has ended, or with an error as
	// soon as it may have missed one, and calls nothing after that. A Store that cannot hear calls up and
	// waits for ctx. A Cache makes one call of Watch at a time.
	Watch(ctx context.Context, up func(), heard func(key string)) error
}

// An Request is what a Cache asks a [Store] about a Key and a Version.
type Request struct {
	Key       string
	Version   uint32
	Token     string        // of the caller
	Refresh   bool          // take the lease even if the value is fresh
	WaitToken string        // of the first answer that was Busy; "" if there was none
	Pause     time.Duration // how long after a failed load an old value is served
}

// A Response is the answer of a [Store] to an [Request].
type Response struct {
	State     State
	Value     []byte        // nil if there is none
	Fresh     time.Duration // how much longer Value is fresh; negative: since when it is not
	Wait      time.Duration // if Busy: how much longer the lease lasts
	WaitToken string        // if Busy: what the next Request presents, to hear of loads that fail from now on
	Grant     string        // if Leased: what Fill presents
}

// A Entry is a Value for a [Store], fresh for Fresh from now and deleted after Keep.
type Entry struct {
	Key         string
	Version     uint32
	Grant       string
	Value       []byte
	Fresh, Keep time.Duration
}

// A State says what to do next.
type State string

const (
	Hit    State = "hit"    // use the value, which is fresh
	Leased State = "leased" // load, then call Fill or Release
	Busy   State = "busy"   // another process loads; ask again
	Failed State = "failed" // a load failed for which the Request waited, or one within Pause beside an old value
	Fenced State = "fenced" // a write is under way; load, and do not keep the value
)
