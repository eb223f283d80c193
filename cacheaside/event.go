package cacheaside

import (
	"context"
	"time"
)

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventLoaded         EventKind = "loaded"          // a load returned a value
	EventNotFound       EventKind = "not found"       // a load returned ErrNotFound
	EventLoadFailed     EventKind = "load failed"     // by an error that is no answer, a panic or a timeout
	EventLoadAnswered   EventKind = "load answered"   // a load returned an answer that is not ErrNotFound
	EventLoadRefused    EventKind = "load refused"    // a policy in Middleware refused the load
	EventServedStale    EventKind = "served stale"    // a caller got a value past its TTL; with Err, the load failed
	EventCodecFailed    EventKind = "codec failed"    // a value could not be read from the Store, or encoded for it
	EventStoreLost      EventKind = "store lost"      // a shard of the Store failed, the first since all answered
	EventStoreRestored  EventKind = "store restored"  // all shards that are asked answer again
	EventFenceFailed    EventKind = "fence failed"    // a Write went on without a fence in the Store
	EventNotInvalidated EventKind = "not invalidated" // the Store could not be told of an invalidation; it is told later
	EventWatchBegun     EventKind = "watch begun"     // changes by other processes are heard; memory is used
	EventWatchLost      EventKind = "watch lost"      // they are not heard; memory is not used
)

// An Event is something that happened in a Cache. Fields that do not apply are zero.
type Event struct {
	Kind EventKind
	Name string        // of the Cache
	Key  any           // of type K; nil if the event is not about one key
	Err  error         // why a load or a call of the Store failed
	Took time.Duration // of the last attempt of the load
}

// Observe calls f with each event from now on, like [Config].OnEvent and after it, until stop is
// called.
func (c *Cache[K, V]) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}
