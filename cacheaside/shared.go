package cacheaside

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// The first and the longest pause between two queries of the Store while another process loads a key.
const (
	pollFirst = 5 * time.Millisecond
	pollMost  = 100 * time.Millisecond
)

// A step is the next action of a flight in flightLookup after a response of the Store.
type step int

const (
	stepLoad  step = iota // end the lookup: this process loads the key
	stepServe             // finish with the entry of the response
	stepFail              // finish with an error
	stepPoll              // another process loads the key: query the Store again after a pause
	stepTake              // there is no usable entry: query the Store again without a pause, for the lease
)

// nextStep returns the step after a response of the Store. s is the State of the response, or "" if there was no
// response. e is the entry of the response, or nil if the response has no entry that can be read. waited reports
// whether the flight has waited for a load of another process.
func nextStep[V any](s State, e *entry[V], waited bool, now time.Duration) step {
	f := e.freshness(now)
	switch {
	case s == "", s == Leased, s == Fenced:
		return stepLoad
	case s == Hit && f == fresh, s == Busy && f == stale, s == Failed && e.usable(now):
		return stepServe
	case s == Busy:
		return stepPoll
	case s == Failed && waited:
		return stepFail
	case s == Hit, s == Failed:
		return stepTake
	}
	return stepFail
}

// lookUp queries the Store about the flights of l, and finishes the flights for which it has a result. This process
// must load the flights that remain in l.
func (l *load[K, V]) lookUp() {
	c, began := l.c, l.c.now()
	for {
		asked := l.query()
		var finished, again []*flight[K, V]
		idle, pause := true, pollMost
		for _, f := range l.flights {
			r := &f.lookup.response
			e, now := l.read(f, asked), c.now()
			switch nextStep(r.State, e, f.lookup.request.WaitToken != "", now) {
			case stepLoad:
				c.offerStale(f, e)
			case stepServe:
				f.result = result[K, V]{entry: e, source: SourceFresh}
				if r.State != Hit {
					e.pause = now + l.cfg.ErrorPause
					if r.State == Busy {
						e.pause = now + min(r.Wait, pollMost)
					}
					f.result.source = SourceStale
				}
				finished = append(finished, f)
			case stepFail:
				f.result.err = fmt.Errorf("%s%v: %w", prefix(l.cfg.Name), f.key, errRemoteLoadFailed)
				if r.State != Failed {
					f.result.err = fmt.Errorf("%sStore returned the unknown State %q", prefix(l.cfg.Name), r.State)
				}
				finished = append(finished, f)
			case stepPoll:
				c.offerStale(f, e)
				f.lookup.request.Refresh, f.lookup.unreadable = false, false // the next response has another value
				f.lookup.request.WaitToken = cmp.Or(f.lookup.request.WaitToken, r.WaitToken)
				pause = min(pause, max(r.Wait, time.Millisecond))
				again = append(again, f)
			case stepTake:
				f.lookup.request.Refresh, f.lookup.request.Pause, f.lookup.unreadable = true, 0, e == nil
				again, idle = append(again, f), false
			}
		}
		l.finish(finished)
		if len(again) == 0 {
			return
		}
		if len(again) < len(l.flights) { // the other flights load now, and do not wait
			l.split(again, len(again))
			return
		}
		if idle {
			// The pauses grow with the duration of the load. So polling adds only about an eighth to the wait.
			pause = min(max((c.now()-began)/8, pollFirst), pause)
			select {
			case <-time.After(pause/2 + c.chance(pause)):
			case <-l.ctx.Done():
				return
			}
		}
		l.dropAbandoned(false)
	}
}

// query queries the Store about the flights of l, and returns the time when it started. It waits for the responses even
// if l is canceled. Otherwise this process might hold a lease without knowing it, and other processes would wait for
// the lease.
func (l *load[K, V]) query() (at time.Duration) {
	t, at := l.c.tier, l.c.now() // read before trusts: at must precede any invalidation that trusts does not see
	each(t, l.flights, (*flight[K, V]).name, func(shard uint8, some []*flight[K, V]) {
		var requests []Request
		var asked []*flight[K, V]
		for _, f := range some {
			f.lookup.response = Response{}
			if t.trusts(f.storeKey) {
				f.lookup.request.Token = cmp.Or(f.lookup.request.Token, newToken())
				requests, asked = append(requests, f.lookup.request), append(asked, f)
			}
		}
		if len(requests) == 0 {
			return
		}
		_ = t.try(l.ctx, shard, false, func(ctx context.Context) error {
			responses, err := t.store.Acquire(ctx, requests...)
			if err == nil && len(responses) != len(requests) {
				err = fmt.Errorf("Store returned %d responses for %d keys", len(responses), len(requests))
			}
			if err == nil {
				for i, f := range asked {
					f.lookup.response = responses[i]
				}
			}
			return err
		})
	})
	return at
}

// read decodes the value in the response about f. asked is the time of the query. read returns nil if there is no
// value, or if the value cannot be decoded.
func (l *load[K, V]) read(f *flight[K, V], asked time.Duration) *entry[V] {
	r := &f.lookup.response
	if r.Value == nil || f.lookup.unreadable {
		return nil
	}
	e, err := l.cfg.open(r.Value)
	if err != nil {
		l.c.notifySafely(context.WithoutCancel(l.ctx), EventCodecFailed, &f.key, err, 0)
		return nil
	}
	l.cfg.weigh(f.key, e)
	l.cfg.setTimes(e, asked, r.Fresh) // not from now: the response may have taken a while
	if e.lagged {
		e.endBy(e.fresh) // ReplicaLag may end then, so the value must not be served stale
	}
	return e
}

// A storedFlight is a flight with its encoded value for the Store.
type storedFlight[K comparable, V any] struct {
	*flight[K, V]
	data []byte
}

// fill ends the leases of the flights. If a flight has a result that may be shared, fill stores the result, and
// otherwise it releases the lease. If the load failed, the release reports this to other processes. It does not report
// a load that a policy refused, that was canceled, or whose error is an answer. fill returns the calls to Store.Fill
// that failed.
func (l *load[K, V]) fill() (failures []failedFill[K, V]) {
	c, t := l.c, l.c.tier
	if t == nil {
		return nil
	}
	var full []storedFlight[K, V]
	var empty, failed []*flight[K, V]
	var outdated []string
	for _, f := range l.flights {
		e, err, now := f.result.entry, f.result.err, c.now()
		switch {
		case !f.lookup.leased():
		case isFailure(err) && (behavior.IsAnswered(err) || behavior.IsRefused(err) || l.ctx.Err() == context.Canceled):
			empty = append(empty, f)
		case isFailure(err):
			failed = append(failed, f)
		case f.lookup.response.Value != nil && e.freshness(now) == unusable:
			outdated = append(outdated, f.storeKey) // no process may continue to serve the stale value
		case e.freshness(now) == unusable || l.cfg.ReplicaLag > 0 && !c.isCurrent(f):
			empty = append(empty, f)
		default:
			data, err := l.cfg.seal(e)
			if err != nil {
				c.notifySafely(context.WithoutCancel(l.ctx), EventCodecFailed, &f.key, err, 0)
				empty = append(empty, f)
				continue
			}
			full = append(full, storedFlight[K, V]{f, data})
		}
	}
	pending := t.propagate(l.ctx, outdated, "", t.store.Invalidate) // shards in parallel, because callers wait
	for _, f := range l.flights {
		if err := pending[f.storeKey]; err != nil {
			c.notifySafely(context.WithoutCancel(l.ctx), EventNotPropagated, &f.key, err, 0)
		}
	}
	l.release(empty, false)
	l.release(failed, true)
	var mu sync.Mutex
	each(t, full, storedFlight[K, V].name, func(shard uint8, some []storedFlight[K, V]) {
		if !t.admit(shard, false) {
			return
		}
		began := c.now()
		unchanged, err := l.store(some)
		if err != nil {
			mu.Lock()
			failures = append(failures, failedFill[K, V]{shard, some, began, err})
			mu.Unlock()
			return
		}
		t.record(l.ctx, shard, began, nil)
		c.mu.Lock()
		defer c.mu.Unlock()
		for i, f := range some {
			if !unchanged[i] {
				c.detach(f.flight)
			}
		}
	})
	return failures
}

// store calls Fill with the values of flights of one shard. It waits for the result even if l is canceled.
func (l *load[K, V]) store(flights []storedFlight[K, V]) ([]bool, error) {
	entries := make([]Entry, len(flights))
	for i, f := range flights {
		e, now := f.result.entry, l.c.now()
		entries[i] = Entry{
			Key: f.storeKey, Version: l.cfg.Version, Grant: f.lookup.response.Grant,
			Value: f.data, Fresh: e.fresh - now, Keep: e.keep - now,
		}
	}
	unchanged, err := l.c.tier.store.Fill(context.WithoutCancel(l.ctx), entries...)
	if err == nil && len(unchanged) != len(entries) {
		err = fmt.Errorf("Store returned %d results for %d values", len(unchanged), len(entries))
	}
	return unchanged, err
}

// A failedFill is a call to Store.Fill that failed. Its flights belong to one shard.
type failedFill[K comparable, V any] struct {
	shard   uint8
	flights []storedFlight[K, V]
	began   time.Duration
	err     error
}

// explain finds out whether a call to Store.Fill failed because the Store is down, or because the Store rejected a
// value. It runs after the callers have their values. First, explain releases the lease of the largest value. If the
// release fails, explain records an outage of the Store. Otherwise the Store works and has rejected a value, probably
// the largest. Then explain stores the other values one by one. If the Store rejects one of these values, explain
// releases the value's lease. Then no process waits for the lease.
func (l *load[K, V]) explain(failed failedFill[K, V]) {
	t, err := l.c.tier, failed.err
	slices.SortStableFunc(failed.flights, func(a, b storedFlight[K, V]) int { return len(b.data) - len(a.data) })
	for i, f := range failed.flights {
		began := failed.began
		if i > 0 {
			began = l.c.now()
			// ReplicaLag allows only a current flight to store its value. This flight has finished, so it is unknown whether the
			// key was invalidated since.
			if l.cfg.ReplicaLag <= 0 {
				if _, err = l.store(failed.flights[i : i+1]); err == nil {
					continue
				}
			}
		}
		if e := t.store.Release(context.WithoutCancel(l.ctx), f.lookup.request, false); e != nil {
			t.record(l.ctx, failed.shard, began, err)
			return
		}
		t.record(l.ctx, failed.shard, began, nil)
		if i == 0 || l.cfg.ReplicaLag <= 0 {
			l.c.notifySafely(context.WithoutCancel(l.ctx), EventCodecFailed, &f.key, err, 0)
		}
	}
}

// release releases the leases of those flights that have a lease. It calls different shards in parallel. A lease that
// cannot be released expires. If failed is true, the Store reports to the processes that wait for one of these loads
// that it has failed.
func (l *load[K, V]) release(flights []*flight[K, V], failed bool) {
	t := l.c.tier
	if t == nil {
		return
	}
	each(t, flights, (*flight[K, V]).name, func(shard uint8, some []*flight[K, V]) {
		for _, f := range some {
			if f.lookup.leased() {
				_ = t.try(l.ctx, shard, false, func(ctx context.Context) error {
					return t.store.Release(ctx, f.lookup.request, failed)
				})
			}
		}
	})
}
