package cacheaside

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// None, as a Config's Jitter or ErrorPause, switches it off. Test for it before calculating with a value.
const None = -1 << 31

// Config says how a [Cache] loads, keeps and shares its values. A zero field means its default. A
// negative value is an error unless the field gives it a meaning.
type Config[K comparable, V any] struct {
	// Name appears in errors and events.
	Name string

	// Load reads a value from the store of record. For a key that does not exist it returns an error
	// that matches [ErrNotFound]. Required.
	//
	// It runs on a goroutine of its own. Its ctx has the values of that of the call that began it, and
	// ends with LoadTimeout, with the last caller (see FinishLoads), or with Close. It may call Get for other
	// keys with its ctx.
	Load func(ctx context.Context, key K) (V, error)
	// LoadMany reads several values for GetMany. A key missing from the map does not exist or, if
	// LoadMany returns an error other than [ErrNotFound], also one joined to it, has failed. Nil means a
	// Load for each.
	LoadMany func(ctx context.Context, keys []K) (map[K]V, error)

	// TTL is how long a value is fresh, from the start of its load; see SetTTL. Zero means 5 minutes.
	TTL time.Duration
	// Jitter shortens each TTL by a random share of at most Jitter. At most 1. Zero means 0.1; [None] means
	// none.
	Jitter float64
	// StaleWhileRevalidate is how long after its TTL a value is served at once while it is refreshed. Zero
	// means never.
	StaleWhileRevalidate time.Duration
	// StaleIfError is how long after its TTL a value is served if its load fails. A caller whose ctx ends
	// while the load hangs does not get it, unless SoftTimeout has passed.
	StaleIfError time.Duration
	// ErrorPause is how long an old value is served after a failed load before the next load, in every
	// process that shares a Store, and how long a shard of the Store that has failed is not called. While the
	// Store hangs, at most two callers wait for it in each ErrorPause. Without an old value each call loads.
	// Zero means 1 second; [None] means no pause.
	ErrorPause time.Duration
	// RefreshAhead is the beta of XFetch, which refreshes fresh values in the background, more probably toward
	// the end of the TTL and after a long load: 1 is the paper's value, more is earlier. Zero means never.
	RefreshAhead float64
	// NotFoundTTL is how long ErrNotFound is remembered.
	NotFoundTTL time.Duration
	// ReplicaLag is how long after a change Load may read what was before it, from a replica. What is loaded
	// within ReplicaLag of a change of its key, by another process from when it is heard, is served no longer
	// than until ReplicaLag has passed.
	ReplicaLag time.Duration

	// LoadTimeout bounds each load. Callers then get a [*TimeoutError], even if Load ignores its ctx. Zero
	// means 30 seconds.
	LoadTimeout time.Duration
	// SoftTimeout is how long after the start of a load, which goes on, callers get the old value that
	// StaleIfError allows. One that only the Store has is served once that has answered. Zero means never.
	SoftTimeout time.Duration
	// FinishLoads lets a load go on when its last caller has left, for loads that take longer than callers
	// wait. By default it is canceled.
	FinishLoads bool
	// Middleware wraps each load in policies, such as a retry, a breaker, or a bulkhead that bounds how
	// many loads run at once. It must call the wrapped function on its own goroutine, and not after it has
	// returned. To policies ErrNotFound is an answer. A load that one refuses has failed; one that returns
	// another answer, such as resilience.Answer(err), has not: callers get it, and no old value.
	Middleware func(func(context.Context) error) func(context.Context) error

	// Capacity bounds the number of entries in memory or, with Weight, the sum of their weights. Zero means
	// 10,000.
	Capacity int
	// Weight returns the weight of an entry, for example its size in bytes. Less than 1 counts as 1, which is
	// also the weight of an absent key. An entry heavier than Capacity is not kept. Weight is called once for
	// each value, on the goroutine of its load. Nil means that each entry weighs 1.
	Weight func(key K, value V) int

	// Store is the cache behind the memory, which processes share. It serves one Cache.
	Store Store
	// Key converts a key to a string for the Store, different keys to different ones. Nil formats strings
	// and integers as %v does; other types need a Key.
	Key func(key K) string
	// Codec encodes values for the Store. Nil means JSON. A V that JSON does not keep needs a Codec: one
	// with unexported fields or interfaces and, which Validate does not notice, one that embeds a
	// time.Time or another json.Marshaler beside other fields.
	Codec Codec[V]
	// Version is that of V as the Codec encodes it. Programs with different ones may share the Store: each
	// has values of its own, and invalidations reach all.
	Version uint32

	// Clone copies a value for each caller. Nil means that callers share it and must not change it.
	Clone func(V) V
}

// Validate returns an error that names each invalid field, or nil.
func (cfg Config[K, V]) Validate() error {
	f := invalid.Fields{Type: "cacheaside.Config"}
	f.Need(cfg.Load != nil, "Load", "nil", "a function that reads from the store of record")
	f.Need(cfg.TTL >= 0, "TTL", cfg.TTL, "0 (for 5 minutes) or more")
	f.Need(cfg.Jitter >= 0 && cfg.Jitter <= 1 || cfg.Jitter == None, "Jitter", cfg.Jitter,
		"0 (for 0.1), at most 1, or None")
	f.Need(cfg.StaleWhileRevalidate >= 0, "StaleWhileRevalidate", cfg.StaleWhileRevalidate, "0 (for none) or more")
	f.Need(cfg.StaleIfError >= 0, "StaleIfError", cfg.StaleIfError, "0 (for none) or more")
	f.Need(cfg.ErrorPause >= 0 || cfg.ErrorPause == None, "ErrorPause", cfg.ErrorPause, "0 (for 1s), more, or None")
	f.Need(cfg.RefreshAhead >= 0 && cfg.RefreshAhead <= math.MaxFloat64, "RefreshAhead",
		cfg.RefreshAhead, "0 (for off) or a positive number")
	f.Need(cfg.NotFoundTTL >= 0, "NotFoundTTL", cfg.NotFoundTTL, "0 (for none) or more")
	f.Need(cfg.LoadTimeout >= 0, "LoadTimeout", cfg.LoadTimeout, "0 (for 30s) or more")
	f.Need(cfg.SoftTimeout >= 0, "SoftTimeout", cfg.SoftTimeout, "0 (for off) or more")
	f.Need(cfg.SoftTimeout <= 0 || cfg.StaleIfError > 0, "SoftTimeout", cfg.SoftTimeout,
		"0 where StaleIfError is 0: there is no old value to serve")
	f.Need(cfg.ReplicaLag >= 0, "ReplicaLag", cfg.ReplicaLag, "0 (for none) or more")
	f.Need(cfg.Capacity >= 0, "Capacity", cfg.Capacity, "0 (for 10,000) or more")
	if cfg.Store != nil {
		f.Need(cfg.Key != nil || plainKey(reflect.TypeFor[K]()), "Key", "nil",
			fmt.Sprintf("a function for a Store: two values of %v could be written alike", reflect.TypeFor[K]()))
		f.Need(cfg.Codec != nil || survivesJSON(reflect.TypeFor[V](), nil), "Codec", "nil",
			fmt.Sprintf("a Codec for a Store: %v does not survive JSON", reflect.TypeFor[V]()))
	}
	return f.Err()
}

const longest = time.Duration(1 << 61) // ErrorPause: 73 years, and safe to add

// withDefaults replaces zero fields by their defaults. None stays as it is, and is less than 0.
func (cfg Config[K, V]) withDefaults() Config[K, V] {
	cfg.TTL = cmp.Or(cfg.TTL, 5*time.Minute)
	cfg.Jitter = cmp.Or(cfg.Jitter, 0.1)
	cfg.ErrorPause = min(cmp.Or(cfg.ErrorPause, time.Second), longest)
	cfg.LoadTimeout = cmp.Or(cfg.LoadTimeout, 30*time.Second)
	cfg.Capacity = cmp.Or(cfg.Capacity, 10_000)
	if cfg.Key == nil {
		cfg.Key = writeKey[K]
	}
	if cfg.Codec == nil {
		cfg.Codec = jsonCodec[V]{}
	}
	return cfg
}

// weigh sets the weight of e. It is called without a lock, because Weight may panic.
func (cfg *Config[K, V]) weigh(key K, e *entry[V]) {
	if cfg.Weight != nil && !e.absent {
		e.weight = uint32(min(max(cfg.Weight(key, e.value), 1), math.MaxInt32))
	}
}

// plainKey reports whether %v formats different values of t differently.
func plainKey(t reflect.Type) bool {
	k := t.Kind()
	return k == reflect.String || reflect.Int <= k && k <= reflect.Uintptr // between them are the integers
}

// writeKey formats the value itself, since a String method may format two values alike.
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
