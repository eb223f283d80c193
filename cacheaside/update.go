package cacheaside

import (
	"fmt"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Name returns Config.Name.
func (c *Cache[K, V]) Name() string { return c.cfg().Name }

// Config returns the present Config, with its defaults filled in.
func (c *Cache[K, V]) Config() Config[K, V] { return c.setting.Config() }

// Update changes the settings of a Cache that is in use. It calls change with the present
// Config as it was given, in which a zero field means its default, validates the result and
// puts it into effect. Concurrent calls of
// Update happen one after the other. If Update returns an error, or change panics,
// nothing has changed. change must not call the Cache.
//
//	err := users.Update(func(cfg *cacheaside.Config[int, User]) { cfg.TTL = time.Minute })
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
	return c.setting.Update(change, c.admit, c.adopt)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (c *Cache[K, V]) Change(dry bool, f func(cfg any) error) error {
	return c.setting.Change(dry, f, c.admit, c.adopt)
}

func (c *Cache[K, V]) admit(was, next *Config[K, V]) error {
	f := invalid.Fields{Type: "cacheaside.Config"}
	f.Same("Name", was.Name, next.Name)
	f.Same("Store", was.Store, next.Store)
	f.Same("MemoryInOutage", was.MemoryInOutage, next.MemoryInOutage)
	f.Same("Codec", was.Codec, next.Codec)
	f.Same("Version", was.Version, next.Version)
	next.Store, next.Codec = was.Store, was.Codec // what cannot be compared stays, too
	f.Need((next.Capacity < 0) == (was.Capacity < 0), "Capacity", next.Capacity, fmt.Sprintf("negative or not, as %d before: it cannot change", was.Capacity))
	return f.Err()
}

func (c *Cache[K, V]) adopt(cfg *Config[K, V]) {
	c.slots.setLimit(cfg.Loads)
	if c.entries != nil {
		c.entries.SetMaximum(uint64(cfg.Capacity))
	}
}
