package cacheaside

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-resilience/resilience/internal/ended"
)

// GetMany returns the values of keys, by the rules of [Cache.Get]. If the Config has a LoadMany, GetMany loads the
// missing values in one call to LoadMany. It needs more calls if another process had the lease of some keys and did not
// store their values. The map has no value for a key that does not exist, and no value for a key whose load has failed.
// The error joins the errors of the failed loads. If ctx is done before all values are found, the map has the values
// found so far, and the error wraps context.Cause(ctx).
func (c *Cache[K, V]) GetMany(ctx context.Context, keys []K) (map[K]V, error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	cfg, now, hits := c.cfg(), c.now(), 0
	values := make(map[K]V, len(keys))
	add := func(key K, e *entry[V]) {
		if v, err := cfg.userValue(e); err == nil {
			values[key] = v
		}
	}
	var missing []request[K, V]
	for _, key := range keys {
		e := c.peek(key)
		isFresh := e.freshness(now) == fresh
		if early := isFresh && e.refreshEarly(cfg.RefreshAhead, now); !isFresh || early {
			missing = append(missing, request[K, V]{key: key, refreshEarly: early})
			continue
		}
		hits++
		add(key, e)
	}
	c.hits.RecordHits(hits)
	if missing == nil {
		return values, nil
	}
	if !c.enter(ctx, missing, now, true) {
		return values, ErrClosed
	}
	var errs []error
	var failures []failure[K, V]
	for i := range missing {
		r := &missing[i]
		e, err := c.serve(ctx, r)
		switch n := len(failures); {
		case err == nil:
			add(r.key, e)
		case r.left:
			errs = []error{err}
		case !isFailure(err):
		case n > 0 && r.flight.answer.by != nil && failures[n-1].by == r.flight.answer.by:
			failures[n-1].keys = append(failures[n-1].keys, r.key)
		default:
			failures = append(failures, failure[K, V]{r.flight.answer.by, []K{r.key}, err})
		}
	}
	for _, f := range failures {
		what := fmt.Sprint(f.keys[0])
		if f.by != nil {
			what = summarize(f.keys)
		}
		errs = append(errs, fmt.Errorf("%s%s: %w", prefix(cfg.Name), what, f.err))
	}
	return values, errors.Join(errs...)
}

// A failure is an error that is reported once: for one key, or for consecutive keys that failed in the same call to
// LoadMany.
type failure[K comparable, V any] struct {
	by   *load[K, V] // nil for one key
	keys []K
	err  error
}
