package cacheaside

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/panics"
)

// A load is one call to Load, or to LoadMany, for the flights of one Get or GetMany.
type load[K comparable, V any] struct {
	c       *Cache[K, V]
	cfg     *Config[K, V]      // the settings when the load started
	caller  context.Context    // the ctx of the call that started the load
	ctx     context.Context    // the load's own ctx, with the values of caller
	cancel  context.CancelFunc // cancels ctx
	start   time.Duration
	many    bool            // the load calls LoadMany
	flights []*flight[K, V] // flights that have not finished

	began, took time.Duration  // start and duration of the last attempt
	ttl         *time.Duration // set by SetTTL during the last attempt
	value       V              // result of Load
	found       map[K]V        // result of LoadMany
}

// loadKey is the key of a ctx's value that is the innermost load in progress.
type loadKey struct{}

// newLoad returns a load that starts at start. A load may have several callers, and a background refresh has none. So
// the load's ctx has only the values of the caller's ctx: it is not done when the caller's ctx is done, and the load is
// not part of the caller's work. It also does not have the mark of a retrier that retries the caller, because a retrier
// in Middleware must retry the load nevertheless. The Cache is locked. Otherwise timeOut could find an incomplete load.
func (c *Cache[K, V]) newLoad(cfg *Config[K, V], caller context.Context, start time.Duration) *load[K, V] {
	l := &load[K, V]{c: c, cfg: cfg, caller: caller, start: start}
	values := attempt.With(linger.Apart(context.WithoutCancel(caller)), 0)
	deadline := c.base.Add(later(start, cfg.LoadTimeout))
	ctx, cancel := context.WithDeadline(context.WithValue(values, loadKey{}, l), deadline)
	stop := context.AfterFunc(ctx, l.timeOut)
	l.ctx, l.cancel = ctx, func() {
		stop() // otherwise cancel would start timeOut on another goroutine, without a timeout
		cancel()
	}
	return l
}

// SetTTL sets the TTL of the results of a load, including ErrNotFound. ctx must be the ctx that Load or LoadMany has
// received, or be derived from it. Config.Jitter does not apply to ttl. If ttl is zero or negative, the results are
// not cached. If Middleware retries the load, only the SetTTL of the last attempt counts. Call SetTTL on the goroutine
// of the load. With any other ctx, SetTTL has no effect.
func SetTTL(ctx context.Context, ttl time.Duration) {
	if l, ok := ctx.Value(loadKey{}).(interface{ setTTL(time.Duration) }); ok {
		l.setTTL(ttl)
	}
}

func (l *load[K, V]) setTTL(ttl time.Duration) { l.ttl = &ttl }

// launch runs l on its own goroutine. The Cache is locked.
func (c *Cache[K, V]) launch(l *load[K, V]) {
	c.loads[l] = struct{}{}
	lookup := slices.ContainsFunc(l.flights, func(f *flight[K, V]) bool { return f.state == flightLookup })
	c.running.Go(func() {
		growStack(0)
		defer l.cancel()
		defer func() { l.failAll(recover()) }()
		l.run(lookup)
	})
}

// growStack grows the stack of a new goroutine. Otherwise the stack would grow during the load. Copying the stack there
// costs more than all other work of the Cache for a load.
//
//go:noinline
func growStack(i int) byte {
	var room [4 << 10]byte
	return room[i]
}

// run finishes the flights of l: from the Store if that has their values, and otherwise by a call to Load.
func (l *load[K, V]) run(lookup bool) {
	if lookup {
		l.lookUp()
	}
	l.dropAbandoned(true)
	if !l.many && len(l.flights) > 1 { // each Load has its own goroutine
		l.split(l.flights[1:], 1)
	}
	if len(l.flights) == 0 {
		return
	}
	l.began = l.c.now() // needed if a policy in Middleware returns without an attempt
	err := l.call()
	l.took = l.c.now() - l.began
	for _, f := range l.flights {
		l.classify(f, err)
	}
	failed := l.fill()
	l.finish(l.flights)
	for _, f := range failed {
		l.explain(f)
	}
}

// timeOut abandons the flights of l if LoadTimeout has elapsed: their callers get a TimeoutError, even if Load ignores
// its ctx.
func (l *load[K, V]) timeOut() {
	c, err := l.c, &TimeoutError{Name: l.cfg.Name, Operation: "load", After: l.cfg.LoadTimeout}
	var late []*flight[K, V]
	c.mu.Lock()
	if c.closed || l.ctx.Err() != context.DeadlineExceeded { // otherwise l was canceled
		c.mu.Unlock()
		return
	}
	c.running.Add(1) // allowed, because Close does not wait yet
	defer c.running.Done()
	now := c.now()
	for _, f := range l.flights {
		if !f.answered() {
			c.stats.TimedOut++
			c.postponeRefresh(f, now)
			c.abandon(f, err)
			late = append(late, f)
		}
	}
	c.mu.Unlock()
	for _, f := range late {
		c.notifySafely(l.ctx, EventLoadFailed, &f.key, err, now-l.start)
	}
}

// failAll finishes the remaining flights of l with an error, after a function of the application has panicked with
// value. A nil value means that the function has called runtime.Goexit.
func (l *load[K, V]) failAll(value any) {
	if len(l.flights) == 0 {
		return
	}
	text := prefix(l.cfg.Name) + "load called runtime.Goexit"
	if value != nil {
		text = fmt.Sprintf("%sload panicked: %v", prefix(l.cfg.Name), value)
	}
	err := panics.New(text, value, debug.Stack())
	for _, f := range l.flights {
		f.result = result[K, V]{err: err, source: SourceLoaded}
	}
	l.release(l.flights, true)
	l.finish(l.flights)
}

// remove removes from l the flights for which gone returns true. The Cache is locked.
func (l *load[K, V]) remove(gone func(*flight[K, V]) bool) {
	var flights []*flight[K, V] // a new slice, because callers range over the old one
	for _, f := range l.flights {
		if !gone(f) {
			flights = append(flights, f)
		}
	}
	l.flights = flights
	if len(flights) == 0 {
		delete(l.c.loads, l)
	}
}

// dropAbandoned removes the abandoned flights from l, because Load need not run for them, and releases their leases.
// loads reports whether this process now loads the other flights. Then their state changes from flightLookup to
// flightLoading or flightFenced.
func (l *load[K, V]) dropAbandoned(loads bool) {
	var abandoned []*flight[K, V]
	l.c.mu.Lock()
	l.remove(func(f *flight[K, V]) bool {
		switch {
		case f.state == flightAbandoned:
			abandoned = append(abandoned, f)
			return true
		case loads && f.lookup.response.State == Fenced:
			f.state = flightFenced
		case loads:
			f.state = flightLoading
		}
		return false
	})
	l.c.mu.Unlock()
	l.release(abandoned, false)
}

// split moves some flights of l to new loads, with at most size flights each.
func (l *load[K, V]) split(some []*flight[K, V], size int) {
	c := l.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for flights := range slices.Chunk(some, size) {
		next, waited := c.newLoad(l.cfg, l.caller, l.start), false
		next.many, next.flights = l.many, flights
		for _, f := range flights {
			f.load = next
			waited = waited || !f.answered()
		}
		if !waited {
			next.cancel()
		}
		c.launch(next)
	}
	l.remove(func(f *flight[K, V]) bool { return f.load != l })
}

// call calls Load or LoadMany, wrapped in Middleware.
func (l *load[K, V]) call() (err error) {
	if l.cfg.Middleware == nil {
		err = l.attempt(l.ctx)
	} else {
		succeeded := false
		err = l.cfg.Middleware(func(ctx context.Context) error {
			err := l.attempt(ctx)
			succeeded = err == nil
			if isNotFound(err) && !behavior.IsAnswered(err) {
				err = answered{err} // err matches ErrNotFound by an Is method, which policies do not call
			}
			return err
		})(l.ctx)
		if err == nil && !succeeded {
			err = errors.New(prefix(l.cfg.Name) + "Middleware returned nil without a value from Load")
		}
	}
	if isFailure(err) && errors.Is(l.ctx.Err(), context.DeadlineExceeded) {
		err = &TimeoutError{Name: l.cfg.Name, Operation: "load", After: l.cfg.LoadTimeout, Err: err}
	}
	return err
}

func (l *load[K, V]) attempt(ctx context.Context) (err error) {
	if l.ctx.Err() != nil {
		return ended.Error(l.ctx) // l.began remains the start of an earlier attempt
	}
	l.began, l.ttl = l.c.now(), nil
	if !l.many {
		l.value, err = l.cfg.Load(ctx, l.flights[0].key)
		return err
	}
	keys := make([]K, len(l.flights))
	for i, f := range l.flights {
		keys[i] = f.key
	}
	l.found, err = l.cfg.LoadMany(ctx, keys)
	if failed := failures(err); len(failed) > 0 && errors.Is(err, ErrNotFound) {
		err = errors.Join(failed...) // otherwise keys that have failed would count as absent
	}
	return err
}

// classify sets the result of f after Load or LoadMany has returned err. For a key that does not exist, the result has
// ErrNotFound and, if that is to be cached, also an entry.
func (l *load[K, V]) classify(f *flight[K, V], err error) {
	value := l.value
	f.result = result[K, V]{source: SourceLoaded}
	if l.many {
		var ok bool
		value, ok = l.found[f.key]
		switch {
		case ok: // the key was loaded, even if other keys failed
			err = nil
		case err == nil:
			err = ErrNotFound
		}
	}
	f.result.err = err
	if isFailure(err) {
		return
	}
	e := &entry[V]{value: value, took: l.took}
	ttl := l.cfg.TTL
	if err != nil {
		*e = entry[V]{absent: true, took: l.took}
		ttl = l.cfg.NotFoundTTL
	}
	ttl -= time.Duration(rand.Float64() * max(l.cfg.Jitter, 0) * float64(ttl))
	if l.ttl != nil {
		ttl = *l.ttl
	}
	if ttl > 0 {
		l.cfg.setTimes(e, l.began, ttl)
	} else if e.absent {
		return
	}
	l.cfg.weigh(f.key, e)
	f.result.entry = e
	if l.cfg.ReplicaLag > 0 {
		l.c.mu.Lock()
		if ends := later(l.c.lastChange(f.mark.hash), l.cfg.ReplicaLag); ends > l.began {
			e.lagged = true
			e.endBy(ends)
		}
		l.c.mu.Unlock()
	}
}

// finish ends flights of l whose results have been set. It caches the results, counts and reports the loads, and
// answers the callers.
func (l *load[K, V]) finish(flights []*flight[K, V]) {
	c, now := l.c, l.c.now()
	waited, kinds := make([]bool, len(flights)), make([]EventKind, len(flights))
	c.mu.Lock()
	for i, f := range flights {
		r, isCurrent := f.result, c.current(f.key) == f
		switch {
		case isFailure(r.err):
			if !behavior.IsAnswered(r.err) {
				c.postponeRefresh(f, now)
			}
		case f.answered(), f.state == flightFenced, !equalsItself(f.key):
		case !isCurrent:
			c.stats.Overtaken++
		case r.entry != nil && now < r.entry.keep && c.memoryEnabled:
			r.entry.mark = f.mark
			c.entries.Set(f.key, r.entry)
		default: // the key does not exist, or its value is not cached
			c.entries.Invalidate(f.key)
		}
		waited[i] = !f.answered()
		if r.source == SourceLoaded {
			kinds[i] = c.count(r.err, waited[i])
		}
		if waited[i] {
			c.settle(f, flightFinished, r, now)
		}
		f.state = flightFinished
	}
	l.remove(func(f *flight[K, V]) bool { return f.state == flightFinished })
	c.mu.Unlock()
	defer func() { // even if an observer calls runtime.Goexit
		for i, f := range flights {
			if waited[i] {
				close(f.done)
			}
		}
	}()
	for i, f := range flights {
		if kinds[i] != "" {
			err := f.result.err
			if kinds[i] == EventNotFound {
				err = nil
			}
			c.notifySafely(l.ctx, kinds[i], &f.key, err, cmp.Or(l.took, now-l.start))
		}
	}
}

// count counts a load that returned err, and returns the kind of the event that reports it. waited reports whether the
// load was not abandoned before. An abandoned load has already been counted, so count returns "" for it. But if it
// panicked, count counts it again and returns the event for the panic. The Cache is locked.
func (c *Cache[K, V]) count(err error, waited bool) EventKind {
	kind, n, panicked := EventLoaded, &c.stats.Loaded, false
	switch {
	case isNotFound(err):
		kind, n = EventNotFound, &c.stats.NotFound
	case err != nil:
		kind, n = EventLoadFailed, &c.stats.Failed
		_, panicked = errors.AsType[*panics.Error](err)
		_, timedOut := errors.AsType[*TimeoutError](err)
		switch read := behavior.Read(err).Kind; {
		case read == behavior.Refused:
			kind, n = EventLoadRefused, &c.stats.Refused
		case read == behavior.Answered:
			kind, n = EventLoadAnswered, &c.stats.Answered
		case panicked:
			n = &c.stats.Panicked
		case timedOut:
			n = &c.stats.TimedOut
		}
	}
	if !waited && !panicked {
		return ""
	}
	*n++
	return kind
}
