package cacheaside

import (
	"errors"
	"fmt"
	"reflect"

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
//     LoadTimeout, SoftTimeout, ErrorPause, Finish and Middleware.
//   - Loads takes effect immediately. More loads than a lower bound allows run until they return;
//     until then no further load begins. Loads that wait for a higher bound begin.
//   - Ahead, Clone, OnEvent, and ErrorPause for shards of the Store, apply to what
//     happens later, and so do Load, LoadMany and Key. A new Key must write each key as
//     the one before did.
//
// Update cannot change Name, Store, MemoryInOutage, Codec and Version, and cannot make
// Capacity negative or no longer negative. It returns an error that names the field.
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
	need(same(cfg.Store, was.Store), "Store")
	need(cfg.MemoryInOutage == was.MemoryInOutage, "MemoryInOutage")
	need(same(cfg.Codec, was.Codec), "Codec")
	need(cfg.Version == was.Version, "Version")
	if (cfg.Capacity < 0) != (was.Capacity < 0) {
		errs = append(errs, fmt.Errorf("%scacheaside.Config.Capacity is %d: it cannot change between negative and not negative while the Cache is in use",
			prefix(was.Name), cfg.Capacity))
	}
	cfg.Name, cfg.Store, cfg.MemoryInOutage = was.Name, was.Store, was.MemoryInOutage
	cfg.Codec, cfg.Version = was.Codec, was.Version
	return errors.Join(errs...)
}

// same reports whether a and b are equal, as far as their type can be compared.
func same(a, b any) bool {
	return reflect.TypeOf(a) == reflect.TypeOf(b) &&
		(!reflect.ValueOf(a).Comparable() || !reflect.ValueOf(b).Comparable() || a == b)
}
