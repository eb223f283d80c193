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
	EventLoadFailed    EventKind = "load_failed"    // a load panicked, timed out or returned an error other than an answer
	EventLoadAnswered  EventKind = "load_answered"  // a load returned an answer other than ErrNotFound
	EventLoadRefused   EventKind = "load_refused"   // a policy in Middleware refused a load
	EventServedStale   EventKind = "served_stale"   // a value was served after its TTL; Err is set if its load failed
	EventCodecFailed   EventKind = "codec_failed"   // the Codec failed for a value, or the Store rejected a value
	EventStoreLost     EventKind = "store_lost"     // a shard of the Store failed; before that, all shards worked
	EventStoreRestored EventKind = "store_restored" // all shards of the Store work again
	EventFenceFailed   EventKind = "fence_failed"   // a Write continues without a fence
	EventNotPropagated EventKind = "not_propagated" // an invalidation did not reach the Store; it will be retried
	EventWatchBegan    EventKind = "watch_began"    // notifications of other processes arrive; memory is used from now on
	EventWatchLost     EventKind = "watch_lost"     // notifications no longer arrive; memory is not used
)

// An Event describes something that happened in a [Cache]. Fields that do not apply are zero.
type Event struct {
	Kind EventKind
	Name string        // the Name of the Config
	Key  any           // the key, of type K; nil if the event is not about a single key
	Err  error         // the error of a load, a Codec or a call to the Store
	Took time.Duration // the duration of a load's last attempt or, if the load timed out, of the whole load
}

// Observe calls f with each event from now on, until stop is called. f runs on the goroutine that caused the event. The
// call or the load continues only after f has returned. The ctx of f has the values of the ctx of the call or load that
// caused the event. f must not call Close. If f panics while a method of the Cache calls it, the panic propagates to
// the method's caller. If f panics during a load, or with an event that reports the state of the Store or of its
// notifications, the panic is logged.
//
// With a Store, the first EventWatchBegan may occur before Observe is called. To find out whether notifications
// already arrive, read [Stats].Watching.
func (c *Cache[K, V]) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}
