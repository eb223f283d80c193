package cacheaside

import (
	"context"
	"time"
)

// A Store is a cache that several processes share, behind the memory of each. Package redisstore implements it on
// Redis. Package storetest tests an implementation:
//
//	var _ cacheaside.Store = (*Store)(nil)
//
// Each method is atomic for each of its keys. All keys of one call belong to one shard. A key may occur twice in a
// call, which is like two calls. After an error, the call may have taken effect. A Store measures time with one clock
// of its own, and must limit the duration of each call itself.
//
// For each Version, a key has a value, a lease and a generation. Fences and invalidations apply to all Versions. A
// generation starts with the first lease after an invalidation. It ends with the next invalidation, or when a value is
// stored.
type Store interface {
	// Shard returns the part of the Store that has key, always the same one. After a failure, a shard is not called
	// for Config.ErrorPause. After a call that hung, the other shards are tried one at a time.
	Shard(key string) uint8

	// Acquire looks up keys, and takes the leases of the keys that are not fresh, as each Request says. Each holder
	// of a lease gets the Grant of the current generation, even if it takes over an expired lease.
	Acquire(ctx context.Context, requests ...Request) ([]Response, error)

	// Fill ends leases, and stores the values whose generation has not ended. It reports for each entry whether
	// nothing was invalidated since its Grant.
	Fill(ctx context.Context, entries ...Entry) ([]bool, error)

	// Release ends the lease that a request took, if its Token still holds it. The generation continues. If failed is
	// true, Acquire reports the failed load to the callers that wait for it.
	Release(ctx context.Context, request Request, failed bool) error

	// Invalidate deletes the values, leases and generations of keys, but not their fences, and notifies the
	// processes that watch.
	Invalidate(ctx context.Context, keys ...string) error

	// Expire is like Invalidate, except that the values remain, no longer fresh.
	Expire(ctx context.Context, keys ...string) error

	// InvalidateAll is Invalidate for every key.
	InvalidateAll(ctx context.Context) error

	// Fence invalidates key, and allows no lease and no value for it until Unfence with the same token. A key may
	// have several fences. Fence returns how long the caller's write to the source may take. The fence expires after
	// twice that time.
	Fence(ctx context.Context, key, token string) (time.Duration, error)

	// Unfence removes the fence of token, and invalidates key. If the fence arrives later, it has no effect.
	Unfence(ctx context.Context, key, token string) error

	// Watch calls ready when it will receive all further changes. It then calls changed for each change that was not
	// made through this Store, with the key, or with "" for all keys. It returns when ctx is done, or with an error
	// as soon as it may have missed a change, and then calls neither function. A Store that receives no changes calls
	// ready and waits for ctx. A Cache does not call Watch concurrently.
	Watch(ctx context.Context, ready func(), changed func(key string)) error
}

// A Request asks a [Store] for the value of a key, or for the lease to load it.
type Request struct {
	Key       string
	Version   uint32
	Token     string        // identifies the caller
	Refresh   bool          // take the lease even if the value is fresh
	WaitToken string        // the WaitToken of the first response that was Busy; "" if there was none
	Pause     time.Duration // how long after a failed load a stale value is served
}

// A Response is the result of a [Request].
type Response struct {
	State     State
	Value     []byte        // nil if there is none
	Fresh     time.Duration // how much longer Value is fresh; negative if it is stale
	Wait      time.Duration // if Busy, how much longer the lease lasts
	WaitToken string        // if Busy, the WaitToken of the next Request, which reports loads that fail from now on
	Grant     string        // if Leased, the Grant of the Entry
}

// An Entry is a value to be stored: fresh for Fresh from now, and deleted after Keep.
type Entry struct {
	Key         string
	Version     uint32
	Grant       string
	Value       []byte
	Fresh, Keep time.Duration
}

// A State says what a [Cache] does next.
type State string

const (
	Hit    State = "hit"    // use the value, which is fresh
	Leased State = "leased" // load the value, then call Fill or Release
	Busy   State = "busy"   // another process loads the value; query the Store again
	Failed State = "failed" // a load failed: one that the Request waited for, or one within Pause
	Fenced State = "fenced" // a write is in progress; load the value, and do not cache it
)
