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

// None switches Config.Jitter or Config.ErrorPause off. None is negative, so test both fields for None before
// calculating with them.
const None = -1 << 31

// Config configures a [Cache]. A field that is zero has the default given in its comment. A negative value is an
// error, except for [None] in a field that accepts it.
type Config[K comparable, V any] struct {
	// Name identifies the Cache in errors, events and metrics.
	Name string

	// Load reads the value of key from the source. If the key does not exist, Load returns an error that matches
	// [ErrNotFound]. Required.
	//
	// Load runs on its own goroutine. The ctx of Load has the values of the ctx of the call that started the load. The ctx
	// of Load is done when LoadTimeout has elapsed, when the last caller has canceled (see FinishLoads), or when the Cache
	// is closed. Load may call Get for other keys, and may pass its ctx to Get. Loads of different keys run concurrently.
	Load func(ctx context.Context, key K) (V, error)
	// LoadMany reads several values for GetMany. If LoadMany returns nil or [ErrNotFound] as its error, a key that is
	// missing from the map does not exist. If LoadMany returns any other error, the missing keys have failed with that
	// error. An error that joins ErrNotFound with a failure is a failure. Nil means that GetMany calls Load for each key,
	// in parallel.
	LoadMany func(ctx context.Context, keys []K) (map[K]V, error)

	// TTL is the time for which a value is fresh, counted from the start of its load. Load can override TTL with [SetTTL].
	// Zero means 5 minutes.
	TTL time.Duration
	// Jitter is the largest fraction by which a TTL is shortened at random. With jitter, values that were loaded together
	// do not expire together. Jitter also applies to NotFoundTTL. Jitter must not exceed 1. Zero means 0.1; [None] means
	// no jitter.
	Jitter float64
	// StaleWhileRevalidate is the time for which a value may still be served after its TTL while a refresh runs in the
	// background. Callers do not wait for the refresh. Zero means that no stale value is served during a refresh.
	StaleWhileRevalidate time.Duration
	// StaleIfError is the time for which a value may still be served after its TTL if its load fails. A caller gets the
	// stale value when the load has failed, or when SoftTimeout has elapsed. If the caller's ctx is done earlier, the
	// caller does not get the stale value. Zero means that no stale value is served after a failed load.
	StaleIfError time.Duration
	// ErrorPause is the pause between a failed load and the next load of a key that has a stale value. During the pause,
	// the stale value is served. The pause applies to all processes that share the Store, unless a policy refused the load
	// or the load was canceled. If there is no stale value after a failed load, the next call starts a load immediately.
	//
	// ErrorPause is also the pause in the calls to a shard of the [Store] after a call to that shard has failed. After the
	// first call to a Store that hangs has failed, at most two callers wait for the Store during each ErrorPause. Zero
	// means 1 second; [None] means no pause.
	ErrorPause time.Duration
	// RefreshAhead enables the XFetch algorithm, which refreshes values in the background before their TTL ends. XFetch
	// chooses values at random. The probability of a refresh grows toward the end of a value's TTL, and is higher if the
	// value's load took long. RefreshAhead is XFetch's parameter beta, whose default in the paper is 1. A higher number
	// makes refreshes start earlier. Each process refreshes the value in its memory, even if another process has just
	// refreshed the value in the Store. So n processes may load a value n times in each TTL. Zero means that no value is
	// refreshed before its TTL ends.
	RefreshAhead float64
	// NotFoundTTL is the time for which ErrNotFound is cached. Load can override NotFoundTTL with [SetTTL], even if
	// NotFoundTTL is zero. Zero means that ErrNotFound is not cached.
	NotFoundTTL time.Duration
	// ReplicaLag is the time after a change for which Load may still read an outdated value, for example from a
	// replica. If a value is loaded less than ReplicaLag after a change of its key, the value is served only until
	// ReplicaLag has elapsed. If another process made the change, ReplicaLag starts when this process is notified of
	// the change. A process that was not notified of a change may load an outdated value and put it into the Store. The
	// outdated value then stays in the Store for its whole TTL, and even the process that made the change may read it
	// there. Zero means that Load always reads the latest value.
	ReplicaLag time.Duration

	// LoadTimeout limits the duration of each load, including the retries of Middleware and the wait for the Store or for
	// a load of another process. After LoadTimeout, callers get a [*TimeoutError], even if Load ignores its ctx. Zero
	// means 30 seconds.
	LoadTimeout time.Duration
	// SoftTimeout limits the time that callers wait for a load. It applies only if there is a stale value, so it requires
	// StaleIfError. SoftTimeout is counted from the start of the load. After SoftTimeout, the load's callers get the stale
	// value, and the load continues. If only the Store has a stale value, callers wait at least until the Store has
	// responded. Zero means no limit.
	SoftTimeout time.Duration
	// FinishLoads lets a load continue after its last caller has canceled. Set FinishLoads if loads take longer than
	// callers wait. By default, a load is canceled when its last caller cancels. Even with FinishLoads, a load is then
	// canceled if its result will not be cached, for example because its key was invalidated.
	FinishLoads bool
	// Middleware wraps each load in policies, such as a retrier, a breaker, or a bulkhead that limits concurrent loads.
	// The function that Middleware returns must call the wrapped function synchronously, not on another goroutine.
	//
	// Policies treat ErrNotFound as an answer of the source, not as a failure. If a policy refuses a load, callers may get
	// a stale value, as after a failed load. If Load returns an answer other than ErrNotFound, such as
	// resilience.Answer(err), callers get that error even if there is a stale value.
	Middleware func(func(context.Context) error) func(context.Context) error

	// Capacity limits the number of entries in memory or, with Weight, the sum of their weights. An entry stays in memory
	// after its TTL, until its key is loaded again or the entry is evicted. Zero means 10,000. If Weight is set, Capacity
	// is required.
	Capacity int
	// Weight returns the weight of an entry, for example its size in bytes. A weight below 1 counts as 1. An entry that
	// caches ErrNotFound always has weight 1. An entry whose weight exceeds Capacity is not cached in memory. Weight is
	// called for each value that is loaded or read from the Store, on the goroutine of the load. Nil means that each entry
	// weighs 1.
	Weight func(key K, value V) int

	// Store is a second-level cache that several processes share. A Get that finds no fresh value in memory queries the
	// Store. Each Cache in a process must have its own instance of the Store. Nil means that values are cached in memory
	// only.
	Store Store
	// Key converts a key to a string for the Store. Different keys must have different strings. Nil means that strings are
	// used unchanged and integers are formatted in decimal, even if K has a method String. For a K of any other kind, Key
	// is required.
	Key func(key K) string
	// Codec encodes values for the Store. Nil means JSON. If JSON cannot restore a V, a Codec is required. JSON cannot
	// restore a V that contains unexported fields or interfaces. It also cannot restore a V that contains a type with
	// the method MarshalJSON or MarshalText, but without the matching Unmarshal method.
	//
	// In some other cases, JSON does not restore a V either, but Validate does not detect these cases:
	//
	//   - V contains a field with the tag json:"-".
	//   - V contains two fields with one JSON name.
	//   - V contains an embedded time.Time, or another embedded json.Marshaler, next to other fields.
	//   - V contains a string that is not UTF-8.
	//
	// If JSON does not restore a V, other processes get a different value.
	Codec Codec[V]
	// Version identifies the encoding of V. Increase Version when the encoding changes. Programs with different Versions
	// may share a Store: each Version has its own values, and invalidations apply to all Versions.
	Version uint32

	// Clone copies a value for each caller. Nil means that callers share values and must not modify them.
	Clone func(V) V
}

// Validate returns an error that names each invalid field, or nil.
func (cfg Config[K, V]) Validate() error {
	f := invalid.Fields{Type: "cacheaside.Config"}
	f.Need(cfg.Load != nil, "Load", "nil", "a function that reads from the source")
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
	f.Need(cfg.Weight == nil || cfg.Capacity != 0, "Capacity", cfg.Capacity, "more with Weight: the sum of the weights")
	if cfg.Store != nil {
		f.Need(cfg.Key != nil || plainKey(reflect.TypeFor[K]()), "Key", "nil",
			fmt.Sprintf("a function for a Store: two values of %v could be written alike", reflect.TypeFor[K]()))
		f.Need(cfg.Codec != nil || survivesJSON(reflect.TypeFor[V](), nil), "Codec", "nil",
			fmt.Sprintf("a Codec for a Store: %v does not survive JSON", reflect.TypeFor[V]()))
	}
	return f.Err()
}

const longest = time.Duration(1 << 61) // the longest ErrorPause: 73 years, which can be added without overflow

// withDefaults replaces zero fields by their defaults. It does not replace None, which is negative.
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

// weigh sets the weight of e. The Cache must not be locked, because Weight may panic.
func (cfg *Config[K, V]) weigh(key K, e *entry[V]) {
	if cfg.Weight != nil && !e.absent {
		e.weight = uint32(min(max(cfg.Weight(key, e.value), 1), math.MaxInt32))
	}
}

// plainKey reports whether %v formats different values of t differently.
func plainKey(t reflect.Type) bool {
	k := t.Kind()
	return k == reflect.String || reflect.Int <= k && k <= reflect.Uintptr // all integer kinds
}

// writeKey is the default of Config.Key. It does not call a String method of K, because such a method may return the
// same text for two different keys.
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
