package cacheaside

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// GetOptions say how one Get is to differ from the others. The zero value makes no
// difference.
type GetOptions struct {
	// SkipMemory makes the call ask the Store or, without one, begin a load, as if
	// nothing were in memory: it gets what no load has read that began before the
	// call, and no old value if that fails. The result replaces what is in memory. A
	// load under way is overtaken: it answers its callers, and is not kept. Each such
	// call makes a load of its own; it is not for every call. With a Store the call
	// also sees what other processes have invalidated, at once.
	SkipMemory bool
	// Stale is for how long after its TTL this call takes a value from memory, at
	// once, while it is being refreshed in the background, if that is longer than
	// Config.Stale. A value that was invalidated is never served. 0 or less: as Config
	// has it.
	Stale time.Duration
}

// GetWith is Get with options for this call.
func (c *Cache[K, V]) GetWith(ctx context.Context, key K, o GetOptions) (V, error) {
	var zero V
	if ctx.Err() != nil {
		return zero, ended.Error(ctx)
	}
	e, err := c.resolve(ctx, key, false, o)
	if err != nil {
		return zero, err
	}
	return c.give(e)
}
