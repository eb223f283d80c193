package keyed

// Strays returns the number of keys that stay with the overflow.
func Strays[K comparable, V any](t *Table[K, V]) int { return len(t.strays) }
