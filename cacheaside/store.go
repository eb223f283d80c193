package cacheaside

import (
	"context"
	"time"
)

// A Store is a second-level cache that several processes share. A [Cache] queries it for values that are not in its
// memory. Package redisstore implements a Store on Redis. Package storetest has the tests that every implementation
// must pass. With this line, the compiler checks that a type implements Store:
//
//	var _ cacheaside.Store = (*Store)(nil)
//
// Each method is atomic for each of its keys. All keys of one call belong to one shard. A key may occur twice in a
// call, with the same effect as two calls. A call that returns an error may nevertheless have taken effect. A Store
// measures all times with a single clock, its own. It must limit the duration of each call itself, because a Cache
// waits for the call even if the ctx of its caller is done.
//
// For each key and Version (see [Config]), a Store has a value, a lease and a generation:
//
//   - A lease is the right of one process to load the value. It expires.
//   - A generation prevents a value that was loaded before an invalidation from being stored after it. A generation
//     starts with the first lease after an invalidation. It ends with the next invalidation, or when a value is stored.
//
// A fence prevents processes from storing a value while a write changes the source. Fences and invalidations apply to
// all Versions of a key.
type Store interface {
	// Shard returns the number of the shard that has key. A shard is a part of the Store that can fail while other parts
	// work. Shard always returns the same number for the same key. After a call to a shard has failed, a Cache does not
	// call that shard for Config.ErrorPause. After a call has hung, the Cache tries the other shards one at a time.
	Shard(key string) uint8

	// Acquire looks up the key of each Request. If the key has no fresh value, or the Request is a Refresh, Acquire takes
	// the lease of the key for the caller, unless another process holds it. Each holder of a lease gets the Grant of the
	// current generation, even if it takes over an expired lease. The Grant is the right to fill the key.
	Acquire(ctx context.Context, requests ...Request) ([]Response, error)

	// Fill stores the value of each entry and ends the lease of its key. It does not store a value if the generation of
	// the entry's Grant has ended. For each entry, Fill returns true if its key has not been invalidated since the Grant.
	Fill(ctx context.Context, entries ...Entry) ([]bool, error)

	// Release ends the lease that request took, if request.Token still holds the lease. The generation continues. If
	// failed is true, the load has failed, and Acquire reports this to the callers that wait for the load.
	Release(ctx context.Context, request Request, failed bool) error

	// Invalidate deletes the values, leases and generations of keys, but not their fences, and notifies the processes that
	// call Watch.
	Invalidate(ctx context.Context, keys ...string) error

	// Expire is like Invalidate, except that the values remain as stale values.
	Expire(ctx context.Context, keys ...string) error

	// InvalidateAll is like Invalidate, for every key.
	InvalidateAll(ctx context.Context) error

	// Fence invalidates key and sets a fence on it, which is identified by token. While key has a fence, the Store grants
	// no lease for it and stores no value. A key may have several fences. Fence returns how long the caller's write to the
	// source may take. The fence expires after twice that time, unless Unfence removes it earlier.
	Fence(ctx context.Context, key, token string) (time.Duration, error)

	// Unfence removes the fence that token identifies, and invalidates key. If the Store receives the call to Fence with
	// this token only after Unfence, that call sets no fence.
	Unfence(ctx context.Context, key, token string) error

	// Watch receives the changes that are made through other Stores. It calls ready when it will receive all further
	// changes. It then calls changed for each change, with the key that has changed, or with "" if all keys have. Watch
	// returns when ctx is done. It returns an error as soon as it may have missed a change. After it has returned, it
	// calls neither function. If a Store cannot receive changes, its Watch calls ready and waits until ctx is done. A
	// Cache does not call Watch concurrently.
	Watch(ctx context.Context, ready func(), changed func(key string)) error
}

// A Request is a query for the value of a key in a [Store] and, if there is no fresh value, for the lease to load it.
type Request struct {
	Key       string
	Version   uint32
	Token     string        // identifies the caller as the holder of the lease
	Refresh   bool          // take the lease even if the value is fresh
	WaitToken string        // the WaitToken of the first response that was Busy; "" if there was none
	Pause     time.Duration // how long after a failed load a stale value is served
}

// A Response is the result of a [Request].
type Response struct {
	State     State
	Value     []byte        // nil if there is none
	Fresh     time.Duration // how much longer Value is fresh; negative if it is stale
	Wait      time.Duration // if Busy, how much longer the other process's lease lasts
	WaitToken string        // if Busy, for the next Request, which then reports a load that fails from now on
	Grant     string        // if Leased, the Grant of the Entry to be filled
}

// An Entry is a value that Fill stores. The value is fresh for the duration Fresh, and is not returned after the
// duration Keep, both counted from the call to Fill. The Store may delete it later.
type Entry struct {
	Key         string
	Version     uint32
	Grant       string
	Value       []byte
	Fresh, Keep time.Duration
}

// A State is the state of a key in a [Store]. It determines what a [Cache] does next.
type State string

const (
	Hit    State = "hit"    // the value is fresh: use it
	Leased State = "leased" // the caller has the lease: load the value, then call Fill or Release
	Busy   State = "busy"   // another process loads the value; query the Store again
	Failed State = "failed" // the load that the Request waited for has failed, or a load failed less than Pause ago
	Fenced State = "fenced" // a write is in progress; load the value, and do not cache it
)
