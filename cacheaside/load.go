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

// A flight is one load of a key and the right to keep its result: the result is kept only if
// the Cache still finds this flight under its key when it lands. An invalidation removes it
// from there. The flight then still answers its callers, but later callers do not find it.
type flight[K comparable, V any] struct {
	key     K
	written string        // the key as converted for the Store
	mark    mark          // when it began
	soft    time.Duration // when SoftTimeout has passed, or 0
	done    chan struct{} // closed when the callers have their answer
	offered chan struct{} // closed when old is from the Store; nil without one

	// Guarded by Cache.mu until done.
	load    *load[K, V]
	waiters int
	early   error     // the answer of callers that do not wait for the end of the load
	landed  bool      // it has its result
	old     *entry[V] // may be served while it goes on; after done, in place of its error
	shared  bool      // old is from the Store
	passing bool      // a write is under way: the result is not kept

	// The result, set by the goroutine of the load, which callers read after done.
	entry       *entry[V]
	err         error
	past        bool        // entry is past its TTL
	by          *load[K, V] // the LoadMany that has failed with err
	loaded      bool        // by Load, and not from the Store
	invalidated bool        // the Store reports an invalidation since the load began
	kind        EventKind   // of the event that reports it; "" if none does
	*question               // nil without a Store
}

// answered reports whether the answer of f is certain. The Cache is locked.
func (f *flight[K, V]) answered() bool { return f.landed || f.early != nil }

// A question is what the Store is asked about a flight.
type question struct {
	ask     Request
	lookup  Response
	at      time.Duration // when the Store was asked
	asked   bool          // the Store has answered
	leased  bool          // the flight has the lease, and must fill the Store or give the lease back
	damaged bool          // the value of the Store cannot be read
	failed  bool          // those who wait for the lease are told that the load has failed
	filling Entry
}

// A load is a call to Load, or to LoadMany, for the flights of one Get or GetMany.
type load[K comparable, V any] struct {
	c       *Cache[K, V]
	cfg     *Config[K, V]      // the settings when it began
	caller  context.Context    // of the call that began it
	ctx     context.Context    // of the load: it has the values of caller, and its own end
	cancel  context.CancelFunc // of ctx
	start   time.Duration
	many    bool            // by LoadMany
	flights []*flight[K, V] // those that have not landed

	begun, took time.Duration  // of the last attempt
	ttl         *time.Duration // set by that for its result
	value       V
	found       map[K]V
}

// loadKey is the key of the innermost load among the values of a ctx.
type loadKey struct{}

// newLoad returns a load that begins at start. Its ctx has the values of the caller's ctx, but not its end, its work,
// or the mark of a retrier that retries the caller: a load has other callers, and a refresh has none, so its own
// retrier must retry it. The Cache is locked, so that timeOut finds a complete load.
func (c *Cache[K, V]) newLoad(cfg *Config[K, V], caller context.Context, start time.Duration) *load[K, V] {
	l := &load[K, V]{c: c, cfg: cfg, caller: caller, start: start}
	values := attempt.With(linger.Apart(context.WithoutCancel(caller)), 0)
	deadline := c.base.Add(later(start, cfg.LoadTimeout))
	ctx, cancel := context.WithDeadline(context.WithValue(values, loadKey{}, l), deadline)
	stop := context.AfterFunc(ctx, l.timeOut)
	l.ctx, l.cancel = ctx, func() {
		stop() // otherwise each load would end with a goroutine that only finds no timeout
		cancel()
	}
	return l
}

// SetTTL makes the results of the load that has ctx, ErrNotFound too, fresh for ttl, without
// jitter. Zero or less means that they are not kept. Of attempts the last counts. Call it on the
// goroutine of the load; outside one it has no effect.
func SetTTL(ctx context.Context, ttl time.Duration) {
	if l, ok := ctx.Value(loadKey{}).(interface{ setTTL(time.Duration) }); ok {
		l.setTTL(ttl)
	}
}

func (l *load[K, V]) setTTL(ttl time.Duration) { l.ttl = &ttl }

// add adds a flight to l, with one caller: that of a call, or l itself if it is to go on without
// callers. The Cache is locked.
func (l *load[K, V]) add(key K, written string, old *entry[V]) *flight[K, V] {
	f, c := new(flight[K, V]), l.c
	h := c.hashOf(key, written)
	f.key, f.written, f.mark, f.old, f.load = key, written, mark{h, c.version(h)}, old, l
	f.done, f.waiters = make(chan struct{}), 1
	if soft := l.cfg.SoftTimeout; soft > 0 {
		f.soft = later(l.start, soft)
	}
	if c.tier != nil {
		f.offered = make(chan struct{})
		f.question = &question{ask: Request{Key: written, Version: l.cfg.Version, Pause: max(l.cfg.ErrorPause, 0)}}
	}
	l.flights = append(l.flights, f)
	if same := key; key == same {
		c.flights[key] = f
	} else { // a key with NaN does not equal itself, and would never be found
		f.passing = true
	}
	return f
}

// retain keeps the flights of l for which keep returns true. The Cache is locked.
func (l *load[K, V]) retain(keep func(*flight[K, V]) bool) {
	var flights []*flight[K, V]
	for _, f := range l.flights {
		if keep(f) {
			flights = append(flights, f)
		}
	}
	l.flights = flights
	if len(flights) == 0 {
		delete(l.c.loads, l)
	}
}

// launch starts l. With lookup, it queries the Store first. The Cache is locked.
func (c *Cache[K, V]) launch(l *load[K, V], lookup bool) {
	c.loads[l] = struct{}{}
	c.running.Go(func() { l.fly(lookup) })
}

// timeOut answers the callers of l if LoadTimeout has passed, even if Load ignores its ctx.
func (l *load[K, V]) timeOut() {
	c, err := l.c, &TimeoutError{Name: l.cfg.Name, Operation: "load", After: l.cfg.LoadTimeout}
	var late []*flight[K, V]
	c.mu.Lock()
	if c.closed || l.ctx.Err() != context.DeadlineExceeded { // otherwise l was canceled
		c.mu.Unlock()
		return
	}
	c.running.Add(1) // Close has not begun to wait
	defer c.running.Done()
	now := c.now()
	for _, f := range l.flights {
		if !f.answered() {
			c.stats.TimedOut++
			c.postpone(f, now)
			c.abandon(f, err)
			late = append(late, f)
		}
	}
	c.mu.Unlock()
	for _, f := range late {
		c.report(l.ctx, EventLoadFailed, &f.key, err, now-l.start)
	}
}

// current returns the flight of key that a call may join, or nil. The Cache is locked.
func (c *Cache[K, V]) current(key K) *flight[K, V] {
	f := c.flights[key]
	if f != nil && !c.holds(f.mark) {
		delete(c.flights, key)
		return nil
	}
	return f
}

// peek returns the entry of key, of any age, or nil.
func (c *Cache[K, V]) peek(key K) *entry[V] {
	if e, ok := c.entries.GetIfPresent(key); ok && c.holds(e.mark) {
		return e
	}
	return nil
}

// spare returns the old value that may be served in place of what f loads, and whether it is from
// the Store. The Cache is locked.
func (c *Cache[K, V]) spare(f *flight[K, V], now time.Duration) (e *entry[V], shared bool) {
	if c.current(f.key) == f && f.old.fallback(now) {
		return f.old, f.shared
	}
	if e := c.peek(f.key); e.fallback(now) {
		return e, false
	}
	return nil, false
}

// answer makes the answer of f certain, and makes sure that no call joins it. Its caller closes
// done. The Cache is locked.
func (c *Cache[K, V]) answer(f *flight[K, V], err error, now time.Duration) {
	if isFailure(err) && !behavior.IsAnswered(err) {
		f.old, f.shared = c.spare(f, now) // none once Close has ended all entries
	} else {
		f.old = nil
	}
	if c.current(f.key) == f {
		delete(c.flights, f.key)
	}
}

// abandon answers f with err although its load runs on. With its last flight the load is canceled. The Cache is
// locked.
func (c *Cache[K, V]) abandon(f *flight[K, V], err error) {
	f.early = err
	c.answer(f, err, c.now())
	close(f.done)
	if !slices.ContainsFunc(f.load.flights, func(f *flight[K, V]) bool { return !f.answered() }) {
		f.load.cancel()
	}
}

// leave is called by a caller of f that stops waiting. The last one ends the load. The Cache is
// locked.
func (c *Cache[K, V]) leave(f *flight[K, V]) {
	f.waiters--
	goesOn := f.load.cfg.FinishLoads && !f.passing && c.current(f.key) == f
	if f.waiters == 0 && !f.answered() && !goesOn {
		c.stats.Canceled++
		c.abandon(f, context.Canceled)
	}
}

// postpone delays the next refresh of the old value of f, whose load has failed. The Cache is
// locked.
func (c *Cache[K, V]) postpone(f *flight[K, V], now time.Duration) {
	pause := f.load.cfg.ErrorPause
	e := cmp.Or(c.peek(f.key), f.old) // it may have been evicted
	if pause > 0 && e != nil && c.remembers && c.current(f.key) == f {
		x := *e
		x.pause, x.mark = now+pause, f.mark
		c.entries.Set(f.key, &x)
	}
}

// fly runs l, on a goroutine of its own.
func (l *load[K, V]) fly(lookup bool) {
	growStack(0)
	defer l.cancel()
	defer func() { l.crash(recover()) }()
	l.run(lookup)
}

// growStack grows the stack of a goroutine while it is empty. Otherwise it is grown deep within
// memory, where the copy costs more than all else that a load does.
//
//go:noinline
func growStack(i int) byte {
	var room [4 << 10]byte
	return room[i]
}

// run answers the flights of l: from the Store, if that has their values, otherwise by a load.
func (l *load[K, V]) run(lookup bool) {
	shared := l.c.tier != nil
	if shared && lookup {
		l.consult()
	}
	if !l.many && len(l.flights) > 1 { // without LoadMany, each by itself
		l.split(l.flights[1:], true)
	}
	if l.many || l.ctx.Err() != nil {
		l.drop()
	}
	if len(l.flights) == 0 {
		return
	}
	for _, f := range l.flights {
		f.loaded = true
	}
	l.begun = l.c.now() // a policy may answer without an attempt
	err := l.call()
	l.took = l.c.now() - l.begun
	for _, f := range l.flights {
		l.judge(f, err)
	}
	var failed []failedFill[K, V]
	if shared {
		failed = l.fill()
	}
	l.land(l.flights)
	for _, f := range failed {
		l.settle(f)
	}
}

// crash answers the flights that are left with the panic of a function of the application, or its call of
// runtime.Goexit.
func (l *load[K, V]) crash(value any) {
	if len(l.flights) == 0 {
		return
	}
	text := prefix(l.cfg.Name) + "load called runtime.Goexit"
	if value != nil {
		text = fmt.Sprintf("%sload panicked: %v", prefix(l.cfg.Name), value)
	}
	err := panics.New(text, value, debug.Stack())
	for _, f := range l.flights {
		f.entry, f.err, f.loaded = nil, err, true
	}
	l.release(l.flights, true)
	l.land(l.flights)
}

// drop drops the flights that have an answer, because nobody waits for them any more, and gives
// their leases back.
func (l *load[K, V]) drop() {
	var left []*flight[K, V]
	l.c.mu.Lock()
	l.retain(func(f *flight[K, V]) bool {
		if f.answered() {
			left = append(left, f)
		}
		return !f.answered()
	})
	l.c.mu.Unlock()
	l.release(left, false)
}

// split gives some flights of l to other loads: each its own if the Store has been asked for them, and
// otherwise one, or many keys would be asked for again one by one.
func (l *load[K, V]) split(some []*flight[K, V], asked bool) {
	c, size := l.c, 1
	c.mu.Lock()
	defer c.mu.Unlock()
	if !asked {
		size = max(1, len(some))
	}
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
		c.launch(next, !asked)
	}
	l.retain(func(f *flight[K, V]) bool { return f.load == l })
}

// call runs Load or LoadMany with Middleware around it.
func (l *load[K, V]) call() (err error) {
	if l.cfg.Middleware == nil {
		err = l.attempt(l.ctx)
	} else {
		succeeded := false
		err = l.cfg.Middleware(func(ctx context.Context) error {
			err := l.attempt(ctx)
			succeeded = err == nil
			if isNotFound(err) && !behavior.IsAnswered(err) {
				err = answered{err} // matches by an Is method, which policies do not see
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
		return ended.Error(l.ctx) // what was found before keeps its times
	}
	l.begun, l.ttl = l.c.now(), nil
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

// judge sets the result of f by a call that returned err: for a key that does not exist an error,
// and an entry if that is remembered.
func (l *load[K, V]) judge(f *flight[K, V], err error) {
	value := l.value
	if l.many {
		var ok bool
		value, ok = l.found[f.key]
		switch {
		case ok: // even if the other keys failed
			err = nil
		case err == nil:
			err = ErrNotFound
		default:
			f.by = l
		}
	}
	f.err = err
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
		l.cfg.begin(e, l.begun, ttl)
	} else if e.absent {
		return
	}
	l.cfg.weigh(f.key, e)
	f.entry = e
	if l.cfg.ReplicaLag > 0 {
		l.c.mu.Lock()
		if ends := later(l.c.last(f.mark.hash), l.cfg.ReplicaLag); ends > l.begun {
			e.lagged = true
			e.until(ends)
		}
		l.c.mu.Unlock()
	}
}

// land ends flights of l, which have their results: it keeps what may be kept, reports the loads,
// and answers the callers.
func (l *load[K, V]) land(flights []*flight[K, V]) {
	c, now := l.c, l.c.now()
	c.mu.Lock()
	for _, f := range flights {
		f.landed = true
		switch e, current := f.entry, c.current(f.key) == f; {
		case isFailure(f.err):
			if !behavior.IsAnswered(f.err) {
				c.postpone(f, now)
			}
		case f.passing, f.early != nil:
		case !current || f.invalidated:
			c.stats.Overtaken++
		case e != nil && now < e.keep && c.remembers:
			e.mark = f.mark
			c.entries.Set(f.key, e)
		default: // not found, or not kept
			c.entries.Invalidate(f.key)
		}
		if f.loaded {
			c.count(f)
		}
		if f.early == nil {
			c.answer(f, f.err, now)
		}
	}
	l.retain(func(f *flight[K, V]) bool { return !f.landed })
	c.mu.Unlock()
	defer func() { // even if a hook ends the goroutine
		for _, f := range flights {
			if f.early == nil {
				close(f.done)
			}
		}
	}()
	for _, f := range flights {
		if f.kind != "" {
			err := f.err
			if f.kind == EventNotFound {
				err = nil
			}
			c.report(l.ctx, f.kind, &f.key, err, cmp.Or(l.took, now-l.start))
		}
	}
}

// count counts the load of f, and says which event reports it. That of a load which had been
// canceled or had timed out has been counted, and only its panic is told then. The Cache is
// locked.
func (c *Cache[K, V]) count(f *flight[K, V]) {
	kind, n, panicked := EventLoaded, &c.stats.Loaded, false
	switch err := f.err; {
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
	if f.early == nil || panicked {
		f.kind = kind
		*n++
	}
}
