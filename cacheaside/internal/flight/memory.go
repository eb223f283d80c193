package flight

import (
	"sync/atomic"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
)

// Memory is what the tables of a cache have in common: its entries, and what is out of
// date.
type Memory[K comparable, V any] struct {
	Entries Entries[K, V] // nil if nothing is kept in memory
	entry.Versions
	Remembers atomic.Bool // while false, nothing is kept
}

// Entries are those of a cache, such as an otter.Cache.
type Entries[K comparable, V any] interface {
	GetIfPresent(K) (*entry.Entry[V], bool)
	Set(K, *entry.Entry[V]) (*entry.Entry[V], bool)
	Invalidate(K) (*entry.Entry[V], bool)
}

// Peek returns the entry of key, of any age, or nil.
func (m *Memory[K, V]) Peek(key K) *entry.Entry[V] {
	if m.Entries == nil {
		return nil
	}
	e, ok := m.Entries.GetIfPresent(key)
	if !ok || !m.Holds(e.Mark) {
		return nil
	}
	return e
}
