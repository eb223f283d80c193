package cacheaside

import (
	"errors"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/flight"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/panics"
)

// land ends t. It keeps the result if t still is the flight of its key, answers the
// callers, and reports the load.
func (c *Cache[K, V]) land(t *task[K, V], e *entry.Entry[V], err error) {
	t.result.Entry, t.result.Err = e, err
	switch {
	case !isFailure(err):
	case behavior.IsAnswered(err):
		t.result.Outcome = flight.Answered
	default:
		t.result.Outcome = flight.Failed
	}
	t.shard.mu.Lock()
	verdict, late := t.shard.Land(&t.Flight, t.result, c.now())
	t.shard.mu.Unlock()

	defer func() { // even if OnEvent panics
		t.End()
		if !late {
			close(t.Done)
		}
	}()
	switch {
	case t.result.Source == flight.Shared: // the other flight reports it
	case t.result.Outcome == flight.Succeeded:
		c.succeeded(t, verdict, late)
	case !late || errors.As(err, new(*panics.Error)):
		c.failed(t, err)
	}
}

// succeeded counts and reports a load of t that returned a value or ErrNotFound. If it
// landed late, its timeout or cancellation has been counted.
func (c *Cache[K, V]) succeeded(t *task[K, V], verdict flight.Verdict, late bool) {
	count, kind := &c.counts.loaded, EventLoaded
	if t.result.Source == flight.Absent {
		count, kind = &c.counts.notFound, EventNotFound
	}
	if t.result.Source != flight.Stored {
		if !late {
			count.Add(1)
		}
		c.tellLoad(t, kind, t.took, nil)
	}
	if verdict == flight.Overtaken {
		c.counts.overtaken.Add(1)
		c.tell(t.ctx, EventOvertaken, t.Key, nil)
	}
}

// failed counts and reports a load of t that returned an error other than ErrNotFound.
func (c *Cache[K, V]) failed(t *task[K, V], err error) {
	count, kind := &c.counts.failed, EventLoadFailed
	switch behavior.Read(err).Kind {
	case behavior.Refused:
		count, kind = &c.counts.refused, EventLoadRefused
	case behavior.Answered:
		count, kind = &c.counts.answered, EventLoadAnswered
	default:
		if _, panicked := errors.AsType[*panics.Error](err); panicked {
			count = &c.counts.panicked
		} else if _, late := errors.AsType[*TimeoutError](err); late {
			count = &c.counts.timedOut
		}
	}
	count.Add(1)
	took := t.took
	if took == 0 {
		took = c.now() - t.Began
	}
	c.tellLoad(t, kind, took, err)
}

func (c *Cache[K, V]) tellLoad(t *task[K, V], kind EventKind, took time.Duration, err error) {
	if c.observed() {
		c.event(t.ctx, Event{Kind: kind, Name: t.cfg.Name, Key: t.Key, Err: err, Took: took})
	}
}
