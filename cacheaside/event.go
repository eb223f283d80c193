package cacheaside

import (
	"context"
	"time"
)

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventLoaded        EventKind = "loaded"         // a load returned a value
	EventNotFound      EventKind = "not_found"      // a load returned ErrNotFound
	EventLoadFailed    EventKind = "load_failed"    // with an error that is no answer, a panic or a timeout
	EventLoadAnswered  EventKind = "load_answered"  // with an answer other than ErrNotFound
	EventLoadRefused   EventKind = "load_refused"   // by a policy in Middleware
	EventServedStale   EventKind = "served_stale"   // a value after its TTL; Err is why its load failed, if it did
	EventCodecFailed   EventKind = "codec_failed"   // for a value from or for the Store, or the Store refused the value
	EventStoreLost     EventKind = "store_lost"     // the first shard failed
	EventStoreRestored EventKind = "store_restored" // all shards work again
	EventFenceFailed   EventKind = "fence_failed"   // a Write continues without a fence
	EventNotPropagated EventKind = "not_propagated" // an invalidation did not reach the Store; it will be retried
	EventWatchBegan    EventKind = "watch_began"    // notifications of other processes arrive; memory is used
	EventWatchLost     EventKind = "watch_lost"     // notifications do not arrive; memory is not used
)

// An Event describes something that happened in a [Cache]. Fields that do not apply are zero.
type Event struct {
	Kind EventKind
	Name string        // the Name of the Config
	Key  any           // a K; nil if the event is not about one key
	Err  error         // why a load, a Codec or a call to the Store failed
	Took time.Duration // the duration of the last attempt of a load
}

// Observe calls f with each event from now on, until stop is called. f runs on the goroutine that caused the event,
// before the call or the load continues, with the values of its ctx. f must not call Close. A panic of f propagates
// to the caller of a method; in a load it is logged.
//
// With a Store, the first EventWatchBegan may come before Observe. [Stats].Watching shows whether it has.
func (c *Cache[K, V]) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}
