package cacheaside

import "time"

// SetChance replaces the source of the pauses by chance between two questions to the Store.
func (c *Cache[K, V]) SetChance(f func(below time.Duration) time.Duration) { c.chance = f }

// Tracked returns the number of keys in use besides those in memory.
func (c *Cache[K, V]) Tracked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.loads) + len(c.flights)
}
