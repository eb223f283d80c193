package cacheaside

import (
	"context"
	"time"
)

// A Store is a second-level cache that several processes share. A [Cache] queries it for values that are not in its
// memory. Package redisstore implements a Store on Redis. Package storetest has the tests that every implementation
// must pass. The following line makes the compiler check that a type implements Store:
//
//	var _ cacheaside.Store = (*Store)(nil)
//
// Each method is atomic for each of its keys. All keys of one call belong to one shard. A call may contain the same
// key twice, which has the same effect as two calls. A call that returns an error may nevertheless have taken effect. A
// Store has a single clock, and measures all times with that clock. A Store must limit the duration of each call
// itself, because a Cache waits for the call even if the caller's ctx is done.
//
// For each key and Version (see [Config]), a Store has a value, a lease and a generation:
//
//   - A lease is the right of one process to load the value for a limited time.
//   - A generation is the period in which a loaded value may be stored. It ensures that a value loaded before an
//     invalidation is not stored after the invalidation. A generation starts with the first lease after an
//     invalidation. It ends with the next invalidation, or when a value is stored.
//
// A fence prevents processes from storing a value while a write changes the source. Fences and invalidations apply to
// all Versions of a key.
type Store interface {
	// Shard returns the number of the shard that has key. A shard is a part of the Store that can fail while other parts
	// work. Shard always returns the same number for the same key. After a call to a shard has failed, a Cache reads and
	// stores no values of that shard for the duration Config.ErrorPause. It continues to send fences and invalidations,
	// unless the call has hung. After a call to a shard has hung, the other shards may hang, too. The Cache then calls
	// only one of the other shards at a time, until they have answered.
	Shard(key string) uint8

	// Acquire reads the value of each Request's key. If the key has no fresh value or the Request sets Refresh, the caller
	// gets the lease of the key, unless another process holds the lease. Each holder of a lease gets the Grant of the
	// current generation, even a holder that takes over an expired lease. A Grant is the right to store a value of the key
	// with Fill.
	Acquire(ctx context.Context, requests ...Request) ([]Response, error)

	// Fill stores the value of each entry and ends the lease of the entry's key. Fill does not store a value if the
	// generation of the entry's Grant has ended. For each entry, Fill returns false if the entry's key has been
	// invalidated since the Store gave the Grant, or if the Store no longer knows whether the key was invalidated.
	// Otherwise, Fill returns true.
	Fill(ctx context.Context, entries ...Entry) ([]bool, error)

	// Release ends the lease of the request's key if request.Token still holds the lease. The generation continues. If
	// failed is true, Acquire reports the failure of the load to the callers that wait for the load.
	Release(ctx context.Context, request Request, failed bool) error

	// Invalidate deletes the values, leases and generations of keys, but not their fences. Invalidate also notifies the
	// processes that call Watch.
	Invalidate(ctx context.Context, keys ...string) error

	// Expire is like Invalidate, but makes the values stale instead of deleting them.
	Expire(ctx context.Context, keys ...string) error

	// InvalidateAll is like Invalidate, for every key.
	InvalidateAll(ctx context.Context) error

	// Fence invalidates key and sets a fence on key. The fence is identified by token. While key has a fence, the Store
	// grants no lease for key and stores no value of key. A key may have several fences. Fence returns the time that
	// the caller's write to the source may take. The fence expires after twice this time, unless Unfence removes the
	// fence earlier.
	Fence(ctx context.Context, key, token string) (time.Duration, error)

	// Unfence removes the fence that token identifies, and invalidates key. If a call to Fence reaches the Store later
	// than the call to Unfence with the same token, Fence sets no fence.
	Unfence(ctx context.Context, key, token string) error

	// Watch receives the changes made through other Stores. Watch calls ready when it is able to receive all further
	// changes. For each change, Watch then calls changed with the key, or with "" if all keys have changed. Watch returns
	// when ctx is done. Watch returns an error as soon as it may have missed a change. After Watch has returned, it calls
	// neither ready nor changed. If a Store cannot receive changes, its Watch calls ready and waits until ctx is done. A
	// Cache makes only one call to Watch at a time.
	Watch(ctx context.Context, ready func(), changed func(key string)) error
}

// A Request is a query for the value of a key in a [Store]. If there is no fresh value, it also requests the key's
// lease.
type Request struct {
	Key       string
	Version   uint32
	Token     string        // identifies the caller as the holder of the lease
	Refresh   bool          // take the lease even if the value is fresh
	WaitToken string        // the WaitToken of the first Busy response; "" if no response was Busy
	Pause     time.Duration // the time for which a stale value is served after a failed load
}

// A Response is the result of a [Request].
type Response struct {
	State     State
	Value     []byte        // the stored value; nil if there is none
	Fresh     time.Duration // how much longer Value is fresh; negative if it is stale
	Wait      time.Duration // how much longer the other process's lease lasts; set if Busy
	WaitToken string        // for the next Request, whose Response then reports a failed load; set if Busy
	Grant     string        // the Grant that an Entry needs for Fill; set if Leased
}

// An Entry is a value that Fill stores. Fresh is the time for which the value is fresh. Keep is the time for which the
// Store may return the value. Both times are counted from the call to Fill. The Store may delete the value later than
// Keep.
type Entry struct {
	Key         string
	Version     uint32
	Grant       string
	Value       []byte
	Fresh, Keep time.Duration
}

// A State is the state of a key in a [Store]. The State of a Response determines the next action of a [Cache].
type State string

const (
	Hit    State = "hit"    // the value is fresh; use the value
	Leased State = "leased" // the caller has the lease; load the value, then call Fill or Release
	Busy   State = "busy"   // another process loads the value; query the Store again
	Failed State = "failed" // the load that the Request waited for has failed, or a load failed less than Pause ago
	Fenced State = "fenced" // a write is in progress; load the value, and do not cache it
)
