package cacheaside

// BreakLease makes flights keep what they loaded whether they were overtaken or not.
func (c *Cache[K, V]) BreakLease() { c.breaks.lease = true }

// BreakOrder makes invalidations tell memory before the Store.
func (c *Cache[K, V]) BreakOrder() { c.breaks.order = true }
