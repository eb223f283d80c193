package cacheaside

import (
	"errors"
	"fmt"
	"reflect"
	"unsafe"

	"github.com/go-resilience/resilience/internal/settings"
)

// Name returns Config.Name.
func (c *Cache[K, V]) Name() string { return c.cfg().Name }

// Config returns the present Config, with its defaults filled in.
func (c *Cache[K, V]) Config() Config[K, V] { return *c.cfg() }

// Update changes the settings of a Cache that is in use. It calls change with the
// present Config, validates the result and puts it into effect. Concurrent calls of
// Update happen one after the other. If Update returns an error, or change panics,
// nothing has changed. change must not call the Cache.
//
//	err := users.Update(func(cfg *cacheaside.Config[int, User]) { cfg.TTL = time.Minute })
//
// A field that change leaves alone stays as it was given to New.
//
// Entries, counters, and invalidations that the Store must still be told of are kept:
//
//   - Entries keep their times. New values of TTL, Jitter, NotFoundTTL, Stale and
//     StaleOnError apply to loads that begin later.
//   - A lower Capacity evicts entries; a higher one keeps those that are there. Cost
//     applies to later loads.
//   - Loads under way, and their callers, keep the settings with which the load began:
//     LoadTimeout, SoftTimeout, ErrorPause, Finish, Inline and Middleware.
//   - Loads takes effect immediately. More loads than a lower bound allows run until they return;
//     until then no further load begins. Loads that wait for a higher bound begin.
//   - Ahead, Clone, OnEvent, and ErrorPause for shards of the Store, apply to what
//     happens later.
//
// Update cannot change Name, Load, LoadMany, Store, MemoryInOutage, Key and Codec, and
// cannot make Capacity negative or no longer negative. It returns an error that names
// the field.
func (c *Cache[K, V]) Update(change func(*Config[K, V])) error {
	c.updating.Lock()
	defer c.updating.Unlock()
	var fixed error
	next := settings.Change(c.given, c.Config(), func(cfg *Config[K, V]) {
		change(cfg)
		fixed = cfg.keepFixed(c.cfg())
	})
	if fixed != nil {
		return fixed
	}
	if err := next.Validate(); err != nil {
		return err
	}
	filled := next.withDefaults()
	c.given = next
	c.settings.Store(&filled)
	c.slots.setLimit(filled.Loads)
	if c.entries != nil {
		c.entries.SetMaximum(uint64(filled.Capacity))
		c.entries.CleanUp()
	}
	return nil
}

// keepFixed restores the fields of cfg that Update cannot change, and returns an error
// that names those that differed.
func (cfg *Config[K, V]) keepFixed(was *Config[K, V]) error {
	var errs []error
	need := func(same bool, field string) {
		if !same {
			errs = append(errs, fmt.Errorf("%scacheaside.Config.%s cannot change while the Cache is in use", prefix(was.Name), field))
		}
	}
	need(cfg.Name == was.Name, "Name")
	need(sameFunc(cfg.Load, was.Load), "Load")
	need(sameFunc(cfg.LoadMany, was.LoadMany), "LoadMany")
	need(same(cfg.Store, was.Store), "Store")
	need(cfg.MemoryInOutage == was.MemoryInOutage, "MemoryInOutage")
	need(sameFunc(cfg.Key, was.Key), "Key")
	need(same(cfg.Codec, was.Codec), "Codec")
	if (cfg.Capacity < 0) != (was.Capacity < 0) {
		errs = append(errs, fmt.Errorf("%scacheaside.Config.Capacity is %d: it cannot change between negative and not negative while the Cache is in use",
			prefix(was.Name), cfg.Capacity))
	}
	cfg.Name, cfg.Load, cfg.LoadMany, cfg.Store = was.Name, was.Load, was.LoadMany, was.Store
	cfg.MemoryInOutage, cfg.Key, cfg.Codec = was.MemoryInOutage, was.Key, was.Codec
	return errors.Join(errs...)
}

// sameFunc reports whether a and b are the same function value. Go cannot compare
// functions. Their representation is one pointer, which differs between two closures
// even if they come from the same function literal.
func sameFunc[F any](a, b F) bool {
	return *(*unsafe.Pointer)(unsafe.Pointer(&a)) == *(*unsafe.Pointer)(unsafe.Pointer(&b))
}

// same reports whether a and b are equal, as far as their type can be compared.
func same(a, b any) bool {
	x, y := reflect.ValueOf(a), reflect.ValueOf(b)
	if !x.IsValid() || !y.IsValid() || x.Type() != y.Type() || !x.Comparable() || !y.Comparable() {
		return x.IsValid() == y.IsValid() && (!x.IsValid() || x.Type() == y.Type())
	}
	return x.Equal(y)
}
