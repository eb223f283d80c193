package cacheaside

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says how a [Cache] loads, keeps and shares its values. A zero field
// means its default. A negative value is an error unless its field gives it a
// meaning. Load is required.
type Config[K comparable, V any] struct {
	// Name appears in errors and events.
	Name string

	// Load reads a value from the store of record. It returns an error that is
	// [ErrNotFound] for a key that does not exist. It runs on a goroutine of its
	// own, with the values of the ctx of the call that began it but not its end:
	// its ctx ends after LoadTimeout, when nobody waits for it any more (see Finish),
	// and with Close. A Load that does not heed that keeps one of Loads until it
	// returns; where two loads of a key do so, the next waits until one has returned.
	//
	// Load may call Get for other keys, with its ctx. Where loads need each other in a
	// circle, one of these calls fails with [ErrRecursive]. Required.
	Load func(ctx context.Context, key K) (V, error)
	// LoadMany reads several values at once, for GetMany; a key that is not in
	// what it returns does not exist. If it returns an error as well, the values
	// beside it are kept, and the other keys have failed. Nil: Load for each key.
	LoadMany func(ctx context.Context, keys []K) (map[K]V, error)

	// TTL is how long a value is fresh, counted from the start of its load.
	// 0: 5 minutes. SetTTL, called by a load, overrides it.
	TTL time.Duration
	// Jitter is the share of TTL by which it is shortened at random, so that what
	// was loaded together does not expire together: from 0 to 1. 0: 0.1;
	// negative: none.
	Jitter float64
	// Stale is for how long after TTL a value is still served, at once, while it
	// is being refreshed in the background. 0: not.
	Stale time.Duration
	// StaleOnError is for how long after TTL a value is served when its load
	// fails. 0: not.
	StaleOnError time.Duration
	// ErrorPause is how long an old value is served after a failed load before the
	// next load, and how long a shard of the Store that has failed is left alone,
	// by reads and by writes. An error is not remembered: where there is no old
	// value to serve, each call tries. 0: 1 s; negative: no pause.
	ErrorPause time.Duration
	// Ahead refreshes a fresh value in the background before it expires, with a
	// probability that grows towards its end and with the time that its load
	// took: the beta of XFetch. 0: off; 1: as in the paper; more: earlier.
	Ahead float64
	// NotFoundTTL is how long ErrNotFound is remembered. 0: not.
	NotFoundTTL time.Duration

	// LoadTimeout bounds each load, the wait for one of Loads included. Callers are
	// answered when it has passed, whether Load heeds its ctx or not. 0: 30 s.
	LoadTimeout time.Duration
	// SoftTimeout is how long a load may take before its callers are given the old
	// value that StaleOnError allows; the load goes on. It counts from the start of
	// the load: later callers do not wait for a load that is late already. It needs
	// StaleOnError. 0: off.
	SoftTimeout time.Duration
	// Finish lets a load go on when its last caller has left, until LoadTimeout. Later
	// callers join it, and its result is kept unless it was invalidated meanwhile. So
	// a load that takes longer than its callers wait ends at some time, instead of
	// being begun anew by each. The cost is that work goes on, and takes one of Loads,
	// that perhaps nobody needs any more. False: the load is canceled.
	Finish bool
	// Inline runs a load on the goroutine of the Get that begins it, which saves a
	// quick load the price of a goroutine. It is for loads that heed their ctx: the
	// Get that begins a load returns when the load returns. If its ctx ends earlier, it
	// leaves as the others do: the load is canceled, or goes on for the others, and the
	// Get returns the end of its ctx after the load. The calls that join a load leave
	// when their own ctx ends, as ever. runtime.Goexit in a load ends the goroutine of
	// that caller. GetMany and refreshes in the background load on goroutines of their
	// own. Not with a Store or SoftTimeout. False: each load has a goroutine.
	Inline bool
	// Loads is how many loads run at once, in this process. A load that calls Get
	// with its ctx, of this Cache or of another, does not count while it waits for the
	// answer, and waits for one of Loads again before it goes on. 0: 64.
	Loads int
	// Around puts policies around each load: a retry, a breaker. It must call
	// what it wraps on its own goroutine and not after it has returned. For a key
	// that does not exist the policies see an error whose method Answered returns
	// true, which is a success to a breaker and ends a retry. A load that a policy
	// refused has failed; it is told apart by LoadRefused and Stats.Refused. A load
	// that returns another answer, such as resilience.Answer(err), has not failed:
	// callers get the answer, and no old value.
	// Nil: none.
	Around func(func(context.Context) error) func(context.Context) error

	// Capacity is how many entries are kept in memory, or how much cost where
	// Cost is set. 0: 10 000. Negative: none, so that each Get asks Store, which
	// is then required; no process is then given what another has updated.
	Capacity int
	// Cost is what an entry counts for against Capacity; less than 1 counts as 1.
	// SetCost, called by a load, overrides it. Nil: 1 for each.
	Cost func(key K, value V) int

	// Store is the cache that is shared by processes, behind the one in memory.
	// A Store serves one Cache. Nil: this process only.
	Store Store
	// MemoryInOutage keeps memory in use while the subscription to Store is lost, or has
	// not begun: what is fresh there is served, and what is loaded is kept. What other
	// processes change meanwhile is not heard of, so a value may be out of date until
	// its TTL is over (and then as Stale and StaleOnError allow), or until the
	// subscription is back, when all of memory is given up. What this process updates
	// or invalidates is served by it as ever. It needs a Store and a Capacity. False:
	// memory is not used until the subscription is back, and every Get asks Store or
	// loads.
	MemoryInOutage bool
	// Key writes a key for Store. Two keys must not be written alike. Nil: as %v,
	// for strings and integers; required for other types.
	Key func(key K) string
	// Codec writes and reads values for Store. Nil: JSON.
	Codec Codec[V]

	// Clone copies a value for each caller. Nil: callers share what is cached and
	// must not change it.
	Clone func(V) V

	// OnEvent is told what happens besides hits and misses, after it happened, on
	// the goroutine that did it, which waits for it; it may call the Cache. Its ctx
	// has the values of that of the call or the load, if any, that it is about. A
	// panic in it changes nothing; Stats.Panics counts it.
	OnEvent func(context.Context, Event)
}

const (
	defaultTTL         = 5 * time.Minute
	defaultJitter      = 0.1
	defaultErrorPause  = time.Second
	defaultLoadTimeout = 30 * time.Second
	defaultCapacity    = 10_000
	defaultLoads       = 64
)

// Validate returns an error that names each field whose value cannot mean
// anything, or nil. New panics with that error.
func (cfg Config[K, V]) Validate() error {
	f := invalid.Fields{Type: "cacheaside.Config"}
	f.Need(cfg.Load != nil, "Load", "nil", "a function that reads from the store of record")
	f.Need(cfg.TTL >= 0, "TTL", cfg.TTL, "0 (for 5 minutes) or more")
	f.Need(cfg.Jitter <= 1, "Jitter", cfg.Jitter, "0 (for 0.1), at most 1, or negative (for none)")
	f.Need(cfg.Stale >= 0, "Stale", cfg.Stale, "0 (for none) or more")
	f.Need(cfg.StaleOnError >= 0, "StaleOnError", cfg.StaleOnError, "0 (for none) or more")
	f.Need(cfg.Ahead >= 0 && cfg.Ahead <= math.MaxFloat64, "Ahead", cfg.Ahead, "0 (for off) or a positive number")
	f.Need(cfg.NotFoundTTL >= 0, "NotFoundTTL", cfg.NotFoundTTL, "0 (for none) or more")
	f.Need(cfg.LoadTimeout >= 0, "LoadTimeout", cfg.LoadTimeout, "0 (for 30s) or more")
	f.Need(cfg.SoftTimeout >= 0, "SoftTimeout", cfg.SoftTimeout, "0 (for off) or more")
	f.Need(cfg.SoftTimeout <= 0 || cfg.StaleOnError > 0, "SoftTimeout", cfg.SoftTimeout,
		"0 where StaleOnError is 0: there is no old value to serve")
	f.Need(!cfg.Inline || cfg.Store == nil && cfg.SoftTimeout == 0, "Inline", cfg.Inline,
		"false with a Store or SoftTimeout: the caller that loads cannot be answered before the load ends")
	f.Need(cfg.Loads >= 0, "Loads", cfg.Loads, "0 (for 64) or more")
	f.Need(cfg.Capacity >= 0 || cfg.Store != nil, "Capacity", cfg.Capacity,
		"0 (for 10 000) or more where there is no Store")
	f.Need(!cfg.MemoryInOutage || cfg.Store != nil && cfg.Capacity >= 0, "MemoryInOutage", cfg.MemoryInOutage,
		"false without a Store, and where nothing is kept in memory")
	if cfg.Store != nil {
		f.Need(cfg.Key != nil || plainKey(reflect.TypeFor[K]()), "Key", "nil",
			fmt.Sprintf("a function for a Store: two values of %v could be written alike", reflect.TypeFor[K]()))
		f.Need(cfg.Codec != nil || survivesJSON(reflect.TypeFor[V](), nil), "Codec", "nil",
			fmt.Sprintf("a Codec for a Store: %v does not survive JSON", reflect.TypeFor[V]()))
	}
	return f.Err()
}

func (cfg Config[K, V]) withDefaults() Config[K, V] {
	if cfg.TTL == 0 {
		cfg.TTL = defaultTTL
	}
	switch {
	case cfg.Jitter == 0:
		cfg.Jitter = defaultJitter
	case !(cfg.Jitter > 0):
		cfg.Jitter = 0
	}
	switch {
	case cfg.ErrorPause == 0:
		cfg.ErrorPause = defaultErrorPause
	case cfg.ErrorPause < 0:
		cfg.ErrorPause = 0
	}
	if cfg.LoadTimeout == 0 {
		cfg.LoadTimeout = defaultLoadTimeout
	}
	if cfg.Capacity == 0 {
		cfg.Capacity = defaultCapacity
	}
	if cfg.Loads == 0 {
		cfg.Loads = defaultLoads
	}
	if cfg.Key == nil {
		cfg.Key = writeKey[K]
	}
	if cfg.Codec == nil {
		cfg.Codec = jsonCodec[V]{}
	}
	return cfg
}

// plainKey reports whether %v writes different values of t differently and says
// nothing else of them.
func plainKey(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.String,
		reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		return true
	}
	return false
}

// writeKey writes the value itself: a String method may write two values alike.
func writeKey[K comparable](key K) string {
	v := reflect.ValueOf(key)
	switch {
	case v.Kind() == reflect.String:
		return v.String()
	case v.CanInt():
		return strconv.FormatInt(v.Int(), 10)
	}
	return strconv.FormatUint(v.Uint(), 10)
}
