package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync/atomic"
)

// tags record when each tag was last invalidated. Invalidations are numbered. A value
// records the last number when its load began, and is out of date when one of its tags
// has a higher number. An invalidation therefore costs the same however many values have
// the tag, and reaches loads that have not set their tags yet.
type tags struct {
	last  atomic.Uint64 // number of the last invalidation
	marks atomic.Pointer[[tagMarks]atomic.Uint64]
}

// tagMarks is a power of two. Tags with the same mark are invalidated together.
const tagMarks = 1 << 14

// A tagging is the tags of one value.
type tagging struct {
	marks []uint32
	since uint64 // number of the last invalidation when the load began
}

// tagging returns the tags of a load's result, or nil if it has none. since is the
// number of the last invalidation when the load began.
func (c *Cache[K, V]) tagging(names []string, since uint64) *tagging {
	if len(names) == 0 || c.shared != nil {
		return nil
	}
	t := &tagging{since: since, marks: make([]uint32, len(names))}
	for i, name := range names {
		t.marks[i] = c.markOf(name)
	}
	slices.Sort(t.marks)
	t.marks = slices.Compact(t.marks)
	return t
}

func (c *Cache[K, V]) markOf(tag string) uint32 {
	return uint32(maphash.String(c.seed, tag) % tagMarks)
}

// holds reports whether no tag of a value has been invalidated since its load began.
func (t *tags) holds(of *tagging) bool {
	if of == nil {
		return true
	}
	marks := t.marks.Load()
	if marks == nil {
		return true
	}
	for _, m := range of.marks {
		if marks[m].Load() > of.since {
			return false
		}
	}
	return true
}

// SetTags gives the result of a load tags for InvalidateTags. ctx is the ctx of the
// load. In LoadMany it applies to all results. It also applies to a remembered
// ErrNotFound. Further calls add tags. Outside a load, and with a Store, SetTags has no
// effect. Call it on the goroutine of the load.
func SetTags(ctx context.Context, tags ...string) {
	if l := loadOf(ctx); l != nil {
		l.terms.tags = append(l.terms.tags, tags...)
	}
}

// InvalidateTags is Invalidate for every key whose load set one of the tags; see
// [SetTags]. It makes the same promise: a Get that begins after it has returned does not
// get a value with one of the tags that was read earlier, neither from memory nor from a
// load under way. Its cost does not depend on the number of values. Their memory is
// freed when they are replaced or evicted. An
// invalidation occasionally reaches values of another tag, since each tag shares its
// state with one in 16 384.
//
// A Store does not know tags: with one, InvalidateTags invalidates nothing and returns
// an error that wraps [errors.ErrUnsupported].
func (c *Cache[K, V]) InvalidateTags(_ context.Context, tags ...string) error {
	if c.closed.Load() {
		return ErrClosed
	}
	if c.shared != nil {
		return fmt.Errorf("%sInvalidateTags with a Store: %w", prefix(c.cfg().Name), errors.ErrUnsupported)
	}
	if c.tags.marks.Load() == nil {
		c.tags.marks.CompareAndSwap(nil, new([tagMarks]atomic.Uint64))
	}
	marks := c.tags.marks.Load()
	for _, tag := range tags {
		raise(&marks[c.markOf(tag)], c.tags.last.Add(1))
	}
	return nil
}

// raise makes n at least to.
func raise(n *atomic.Uint64, to uint64) {
	for {
		was := n.Load()
		if was >= to || n.CompareAndSwap(was, to) {
			return
		}
	}
}

// missedTags reports whether the answer of f, e or err, may be older than an
// invalidation of tags that preceded a call. asked is the number of the last
// invalidation at that call. The tags of a load are unknown when the caller joins it.
// The load of a key that does not exist may never set them.
func (c *Cache[K, V]) missedTags(f *flight[K, V], e *entry[V], err error, asked uint64) bool {
	if asked <= f.tagged {
		return false
	}
	if err != nil {
		return !isFailure(err)
	}
	return !c.tags.holds(e.tags)
}
