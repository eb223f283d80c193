package cacheaside

import (
	"context"
	"time"
)

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventLoaded        EventKind = "loaded"
	EventNotFound      EventKind = "not_found"
	EventLoadFailed    EventKind = "load_failed"    // an error that is no answer, a panic or a timeout
	EventLoadAnswered  EventKind = "load_answered"  // another answer
	EventLoadRefused   EventKind = "load_refused"   // by a policy in Middleware
	EventServedStale   EventKind = "served_stale"   // a value past its TTL; with Err, its load failed
	EventCodecFailed   EventKind = "codec_failed"   // of a value from or for the Store; or the Store refused the value
	EventStoreLost     EventKind = "store_lost"     // the first of its shards failed
	EventStoreRestored EventKind = "store_restored" // all of them answer again
	EventFenceFailed   EventKind = "fence_failed"   // a Write went on without a fence
	EventNotPropagated EventKind = "not_propagated" // an invalidation has not reached the Store; it is sent again
	EventWatchBegan    EventKind = "watch_began"    // changes by other processes are heard; memory is used
	EventWatchLost     EventKind = "watch_lost"     // they are not heard; memory is not used
)

// An Event is something that happened in a Cache. Fields that do not apply are zero.
type Event struct {
	Kind EventKind
	Name string        // of the Cache
	Key  any           // of type K; nil if the event is not about one key
	Err  error         // why a load or a call of the Store failed
	Took time.Duration // of the last attempt of the load
}

// Observe calls f with each event from now on, until stop is called. f runs on the goroutine that caused the event,
// before the call or the load continues, with the values of its ctx. f must not call Close. A panic of f propagates
// to the caller of a method; in a load it is logged.
//
// With a Store, the first EventWatchBegan may come before Observe. [Stats].Watching shows whether it has.
func (c *Cache[K, V]) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}
