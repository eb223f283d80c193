package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync/atomic"
)

// tags know when each tag was last invalidated. Invalidations are numbered. A value
// remembers the number that was reached when its load began, and is out of date when
// one of its tags has a higher one. So an invalidation costs the same however many
// values have the tag, and it reaches loads that have not said their tags yet.
type tags struct {
	last  atomic.Uint64 // the number of the last invalidation
	marks atomic.Pointer[[tagMarks]atomic.Uint64]
}

// tagMarks is a power of two. Tags that share a mark are invalidated together.
const tagMarks = 1 << 14

// A tagging is the tags of a value.
type tagging struct {
	marks []uint32
	since uint64 // the number of the last invalidation when its load began
}

// tagging makes the tags of what a load returned that began after an invalidation, or
// nil if it has none.
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

// holds reports that none of the tags of a value was invalidated since its load began.
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

// SetTags gives tags to what the load that ctx was given to returns, for
// InvalidateTags; for LoadMany, to all of it. They also apply to ErrNotFound, where
// that is remembered. Tags add up when SetTags is called again. Outside a load, and
// with a Store, it has no effect. Call it from the goroutine of the load.
func SetTags(ctx context.Context, tags ...string) {
	if l := loadOf(ctx); l != nil {
		l.terms.tags = append(l.terms.tags, tags...)
	}
}

// InvalidateTags is Invalidate for every key whose load has set one of the tags; see
// [SetTags]. It makes the same promise: a Get that begins after it has returned does
// not get a value with one of the tags that was read before, from memory or from a load
// that was under way. Its cost does not depend on how many values have the tag, and the
// memory of these is freed when they are replaced or evicted. Values that Prime has put
// into memory have no tags. Once in a while the values of another tag are invalidated
// along: a tag shares its fate with one in 16 384.
//
// A Store knows no tags: with one, InvalidateTags invalidates nothing and returns an
// error that wraps [errors.ErrUnsupported].
func (c *Cache[K, V]) InvalidateTags(_ context.Context, tags ...string) error {
	if c.closed.Load() {
		return ErrClosed
	}
	if c.shared != nil {
		return fmt.Errorf("%sInvalidateTags with a Store: %w", prefix(c.cfg.Name), errors.ErrUnsupported)
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

// raise makes n at least what it is told.
func raise(n *atomic.Uint64, to uint64) {
	for {
		was := n.Load()
		if was >= to || n.CompareAndSwap(was, to) {
			return
		}
	}
}

// missedTags reports whether the answer of f, e or err, may be older than an
// invalidation of tags before a caller asked, when their number was asked. What f
// loads has tags that were not known when the caller joined it. A key that does not
// exist may not know its tags at all.
func (c *Cache[K, V]) missedTags(f *flight[K, V], e *entry[V], err error, asked uint64) bool {
	if asked <= f.tagged {
		return false
	}
	if err != nil {
		return !isFailure(err)
	}
	return !c.tags.holds(e.tags)
}
