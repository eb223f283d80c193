package cacheaside

import "time"

// SetChance replaces the random part of the pauses between two queries of the Store.
func (c *Cache[K, V]) SetChance(f func(below time.Duration) time.Duration) { c.chance = f }

// Tracked returns the number of flights and loads that the Cache still refers to.
func (c *Cache[K, V]) Tracked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.loads) + len(c.flights)
}
