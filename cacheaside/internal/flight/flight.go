// Package flight decides about the loads of a cache's keys: which call begins one, which
// calls wait for it, and what is kept of its result. It reads no clock, takes no lock,
// starts nothing and calls nothing of the application.
package flight

import (
	"math"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
)

// A Flight is one load of a key and the right to keep its result: the result is kept only
// if the Table still finds this Flight under its key when it lands. An invalidation removes
// it from there. The Flight then still answers its callers, but later callers do not find
// it.
type Flight[K comparable, V any] struct {
	Key   K
	Began time.Duration // since the cache began
	Terms Terms
	End   func() // ends the load

	Done chan struct{} // closed when the callers may read the Answer

	mark    entry.Mark // when it began
	phase   phase
	waiters int
	jam     chan struct{} // closed while it waits for a slot; nil if nobody asked
	old     *oldValue[V]  // may be served if the load fails
	offered chan struct{} // closed when it gets the next old value; nil if nobody asked
	answer  Answer[V]
}

// Terms are the settings of a Flight.
type Terms struct {
	Finish     bool          // the load goes on when the last caller leaves
	ErrorPause time.Duration // how long an old value is served after a failure
	Soft       time.Duration // how long callers wait before they get an old value; 0 forever
}

// An Answer is what the callers of a Flight get.
type Answer[V any] struct {
	Entry *entry.Entry[V]
	Err   error
	Stale bool // Entry is past its TTL
	With  any  // what failed, if several flights failed with it

	current bool // no invalidation until the flight landed
}

// Answer returns the answer of f, after Done.
func (f *Flight[K, V]) Answer() Answer[V] { return f.answer }

// A phase is how far a Flight has come. It only goes on.
type phase int

const (
	flying    phase = iota
	passing         // its result is not kept: it does not hear of changes during its load
	following       // it takes its answer from another flight
	lost            // its callers were told why they get nothing, and the load runs on
	landed
)

func (f *Flight[K, V]) answered() bool { return f.phase >= lost }

// An oldValue is what a flight is to replace. A call that began after an invalidation of
// it must not get it:
//
//   - With memory, only callers of a flight that has not been overtaken get it, whenever
//     they called. A flight that may be joined again after it was overtaken has none; see
//     stand.
//   - Without memory, a flight does not hear of invalidations. Only calls that began
//     before at get it, which is when the Store was asked for it.
type oldValue[V any] struct {
	entry *entry.Entry[V]
	at    time.Duration
}

const always = time.Duration(math.MaxInt64)

// NoOld is the time of a call that must not get an old value.
const NoOld time.Duration = -1

// Queue records that f begins or ceases to wait for a slot.
func (f *Flight[K, V]) Queue(waits bool) {
	if !waits {
		f.jam = nil
		return
	}
	f.Jammed()
	close(f.jam)
}

// Jammed returns a channel that is closed once f waits for a slot.
func (f *Flight[K, V]) Jammed() <-chan struct{} {
	if f.jam == nil {
		f.jam = make(chan struct{})
	}
	return f.jam
}

// Offered returns a channel that is closed once f gets another old value.
func (f *Flight[K, V]) Offered() <-chan struct{} {
	if f.offered == nil {
		f.offered = make(chan struct{})
	}
	return f.offered
}

// Findable reports whether a map finds an element stored under key. A key that contains
// NaN does not equal itself.
func Findable[K comparable](key K) bool {
	same := key
	return key == same
}
