package cacheaside

// Tracked returns the number of keys in use besides those in memory.
func (c *Cache[K, V]) Tracked() (n int) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		n += s.Len()
		s.mu.Unlock()
	}
	return n
}
