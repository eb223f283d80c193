package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

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
	written string // the key as converted for the Store
	mark    mark   // when it began
	done    chan struct{}

	// Guarded by Cache.mu.
	load     *load[K, V]
	waiters  int
	answered bool          // it has its answer
	old      *entry[V]     // what it is to replace; may be served
	shared   bool          // old is from the Store
	offered  chan struct{} // closed when it gets another old value; nil if nobody asked

	// The answer, after done.
	entry  *entry[V]
	err    error
	stale  bool        // entry is past its TTL
	backup *entry[V]   // may be served in place of err
	failed *load[K, V] // the LoadMany that has failed with err

	// Used by the goroutine of the load.
	result      *entry[V]
	fault       error
	by          *load[K, V] // the LoadMany whose fault it is
	kind        EventKind   // of the event that reports it; "" if none does
	late        bool        // it had an answer before it landed
	overtook    bool
	passing     bool // a write is under way: the result is not kept
	hit         bool // the Store has a fresh value
	past        bool // the result is past its TTL
	invalidated bool // the Store reports an invalidation since the load began
	loaded      bool // by Load, and not from the Store
	*question        // nil without a Store
}

// A question is what the Store is asked about a flight.
type question struct {
	ask     Ask
	lookup  Lookup
	at      time.Duration // when the Store was asked
	asked   bool          // the Store has answered
	leased  bool          // the flight has the lease, and must fill the Store or give the lease back
	damaged bool          // the value of the Store cannot be read
}

// A load is one call of Load, or of LoadMany, for the flights of one Get or GetMany. It is the
// ctx of that call: it has the values of the caller's ctx, and an end of its own. A context of
// package context, which has a timer, is made when somebody asks for Done.
type load[K comparable, V any] struct {
	c        *Cache[K, V]
	cfg      *Config[K, V] // the settings when it began
	caller   context.Context
	began    time.Time
	start    time.Duration // began, since the Cache began
	deadline time.Duration
	many     bool // by LoadMany
	ready    bool // the Store has been asked

	next, prev *load[K, V] // in Cache.loads
	listed     bool
	finished   bool
	flights    []*flight[K, V]
	first      flight[K, V] // the memory of the flight of a Get
	only       [1]*flight[K, V]

	ttl    *time.Duration // set by the load for its result
	value  V
	found  map[K]V
	called time.Duration // when the first attempt began
	took   time.Duration // duration of the last attempt
	spent  time.Duration // of all of them

	mu     sync.Mutex
	err    error           // why it has ended
	values context.Context // those of caller, made when they are asked for
	std    context.Context
	stop   context.CancelFunc
}

// loadKey is the key of the innermost load among the values of a ctx.
type loadKey struct{}

func (l *load[K, V]) Deadline() (time.Time, bool) { return l.began.Add(l.cfg.LoadTimeout), true }

func (l *load[K, V]) Done() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.std != nil:
	case l.err == context.Canceled:
		l.std, l.stop = context.WithCancel(l.apart())
		l.stop()
	default:
		deadline, _ := l.Deadline()
		l.std, l.stop = context.WithDeadline(l.apart(), deadline)
	}
	return l.std.Done()
}

func (l *load[K, V]) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.std != nil {
		return l.std.Err()
	}
	return l.err
}

func (l *load[K, V]) Value(key any) any {
	if key == (loadKey{}) {
		return l
	}
	l.mu.Lock()
	ctx := l.std // which package context knows, so that children of l cost no goroutine
	if ctx == nil {
		ctx = l.apart()
	}
	l.mu.Unlock()
	return ctx.Value(key)
}

// apart returns the values of the caller's ctx, without its end. l.mu is held.
func (l *load[K, V]) apart() context.Context {
	if l.values == nil {
		l.values = linger.Apart(context.WithoutCancel(l.caller))
	}
	return l.values
}

// end ends l, as a ctx. If its time has passed, that of std has too.
func (l *load[K, V]) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
	if l.stop != nil && l.err == context.Canceled {
		l.stop()
	}
}

// SetTTL makes the result of a load fresh for ttl, without jitter, instead of
// Config.TTL. ctx is the ctx of the load. In LoadMany it applies to all results. It also
// applies to ErrNotFound. Zero or less means that the result is not kept. If Middleware
// repeats the load, only the last attempt counts. Outside a load SetTTL has no effect.
// Call it on the goroutine of the load.
func SetTTL(ctx context.Context, ttl time.Duration) {
	if l, ok := ctx.Value(loadKey{}).(interface{ setTTL(time.Duration) }); ok {
		l.setTTL(ttl)
	}
}

func (l *load[K, V]) setTTL(ttl time.Duration) { l.ttl = &ttl }

// newLoad returns a load that begins now, without flights.
func (c *Cache[K, V]) newLoad(ctx context.Context, now time.Time) *load[K, V] {
	cfg, start := c.cfg(), now.Sub(c.base)
	return &load[K, V]{
		c: c, cfg: cfg, caller: ctx,
		began: now, start: start, deadline: later(start, cfg.LoadTimeout),
	}
}

// add adds a flight to l, with one caller: that of a call, or l itself if it is to go on without
// callers. The Cache is locked.
func (l *load[K, V]) add(f *flight[K, V], key K, written string, old *entry[V]) {
	f.key, f.written, f.mark, f.old, f.load = key, written, l.c.versions.mark(written), old, l
	f.done, f.waiters = make(chan struct{}), 1
	if l.c.tier != nil {
		f.question = &question{ask: Ask{Key: written, Version: l.cfg.Version, Pause: max(l.cfg.ErrorPause, 0)}}
	}
	l.flights = append(l.flights, f)
	if same := key; key == same {
		l.c.flights[key] = f
	} else { // a key with NaN does not equal itself, and would never be found
		f.passing = true
	}
}

// begin starts l. The Cache is locked.
func (c *Cache[K, V]) begin(l *load[K, V]) {
	c.loads.insert(l)
	if c.fires == 0 || l.deadline < c.fires {
		c.arm(l.deadline)
	}
	c.stats.Loading++
	c.running.Add(1)
	go l.fly()
}

// arm has overdue called at a time. The Cache is locked.
func (c *Cache[K, V]) arm(at time.Duration) {
	c.fires = at
	if c.timer == nil {
		c.timer = time.AfterFunc(at-c.now(), c.overdue)
	} else {
		c.timer.Reset(at - c.now())
	}
}

// overdue answers the callers of loads whose LoadTimeout has passed, even if Load ignores its
// ctx.
func (c *Cache[K, V]) overdue() {
	var late []func()
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.running.Add(1) // Close has not begun to wait
	defer c.running.Done()
	now := c.now()
	for l := c.loads.first; l != nil && l.deadline <= now; l = c.loads.first {
		c.loads.remove(l)
		err := &TimeoutError{Name: l.cfg.Name, What: "load", After: l.cfg.LoadTimeout}
		for _, f := range l.flights {
			if !f.answered {
				c.postpone(f, now)
				c.abandon(f, err)
				late = append(late, func() { c.reportLoad(l, f, EventLoadFailed, err, now-l.start) })
			}
		}
		l.end(context.DeadlineExceeded)
	}
	c.stats.TimedOut += int64(len(late))
	c.fires = 0
	if c.loads.first != nil {
		c.arm(c.loads.first.deadline)
	}
	c.mu.Unlock()
	for _, report := range late {
		report()
	}
}

// current returns the flight of key that a call may join, or nil. The Cache is locked.
func (c *Cache[K, V]) current(key K) *flight[K, V] {
	f := c.flights[key]
	if f != nil && !c.versions.holds(f.mark) {
		delete(c.flights, key)
		return nil
	}
	return f
}

// peek returns the entry of key, of any age, or nil.
func (c *Cache[K, V]) peek(key K) *entry[V] {
	if e, ok := c.entries.GetIfPresent(key); ok && c.versions.holds(e.mark) {
		return e
	}
	return nil
}

// answer gives f its answer, and makes sure that no call joins it. Its caller closes done. The
// Cache is locked.
func (c *Cache[K, V]) answer(f *flight[K, V], e *entry[V], err error, now time.Duration) {
	f.answered, f.entry, f.err = true, e, err
	current := c.current(f.key) == f
	if current {
		delete(c.flights, f.key)
	}
	if !isFailure(err) || behavior.IsAnswered(err) || errors.Is(err, ErrClosed) {
		return
	}
	if current && f.old.fallback(now) {
		f.backup = f.old
	} else if e := c.peek(f.key); e.fallback(now) {
		f.backup, f.shared = e, false
	}
}

// abandon answers f with err although its load runs on. The Cache is locked.
func (c *Cache[K, V]) abandon(f *flight[K, V], err error) {
	c.answer(f, nil, err, c.now())
	close(f.done)
}

// leave is called by a caller of f that stops waiting. The last one ends the load. The Cache is
// locked.
func (c *Cache[K, V]) leave(f *flight[K, V]) {
	l := f.load
	f.waiters--
	if f.waiters > 0 || f.answered || l.cfg.Finish && !f.passing && c.current(f.key) == f {
		return
	}
	c.stats.Canceled++
	c.abandon(f, context.Canceled)
	for _, f := range l.flights {
		if !f.answered {
			return
		}
	}
	l.end(context.Canceled)
}

// offer gives the callers of f an old value of the Store: immediately if it may be served during
// a refresh, otherwise if the load fails. With keep, it is kept in memory until then.
func (c *Cache[K, V]) offer(f *flight[K, V], e *entry[V], keep bool) {
	if e == nil || e.absent {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.answered {
		return
	}
	if keep && c.current(f.key) == f && c.remembers.Load() && c.peek(f.key) == nil {
		e.mark = f.mark
		c.entries.Set(f.key, e)
	}
	f.old, f.shared = e, true
	if f.offered != nil {
		close(f.offered)
		f.offered = nil
	}
}

// postpone delays the next refresh of the old value of f, whose load has failed. The Cache is
// locked.
func (c *Cache[K, V]) postpone(f *flight[K, V], now time.Duration) {
	pause := f.load.cfg.ErrorPause
	if pause <= 0 || c.current(f.key) != f {
		return
	}
	e := c.peek(f.key)
	if e == nil && f.old.fallback(now) && c.remembers.Load() { // evicted meanwhile
		e = f.old
	}
	if e != nil {
		x := *e
		x.pause, x.mark = now+pause, f.mark
		c.entries.Set(f.key, &x)
	}
}

// fly runs l, on a goroutine of its own.
func (l *load[K, V]) fly() {
	growStack(0)
	c, returned := l.c, false
	defer c.running.Done()
	defer func() {
		if !returned { // also if it called runtime.Goexit
			l.crash(recover())
		}
		if !l.finished {
			c.mu.Lock()
			c.finish(l)
			c.mu.Unlock()
		}
		l.end(context.Canceled)
	}()
	l.run()
	returned = true
}

// growStack grows the stack of a goroutine while it is empty. Otherwise it is grown deep within
// memory, where the copy costs more than all else that a load does.
//
//go:noinline
func growStack(i int) byte {
	var room [4 << 10]byte
	return room[i]
}

// finish notes that l has ended, once. The Cache is locked.
func (c *Cache[K, V]) finish(l *load[K, V]) {
	if !l.finished {
		l.finished = true
		c.stats.Loading--
		c.loads.remove(l)
	}
}

// run answers the flights of l: from the Store, if that has their values, otherwise by a load.
func (l *load[K, V]) run() {
	flights := l.flights
	if l.c.tier != nil && !l.ready {
		flights = l.consult(flights)
	}
	if !l.many && len(flights) > 1 { // without LoadMany, each by itself
		l.split(flights[1:], true)
		flights = flights[:1]
	}
	if l.c.tier != nil || l.many || l.Err() != nil {
		if flights = l.wanted(flights); len(flights) == 0 {
			return
		}
	}
	begun, err := l.call(flights)
	now := l.c.now()
	l.took, l.spent = now-begun, now-l.called
	for _, f := range flights {
		f.loaded = true
		f.result, f.fault = l.resultOf(f, begun, err)
	}
	if l.c.tier != nil {
		l.fill(flights)
		now = l.c.now()
	}
	l.c.land(l, flights, now, true)
}

// crash answers the flights of l with the panic of a function of the application.
func (l *load[K, V]) crash(value any) {
	text := prefix(l.cfg.Name) + "load called runtime.Goexit"
	if value != nil {
		text = fmt.Sprintf("%sload panicked: %v", prefix(l.cfg.Name), value)
	}
	err := panics.New(text, value, debug.Stack())
	for _, f := range l.flights {
		f.result, f.fault, f.loaded = nil, err, true
		l.release(f, true)
	}
	now := l.c.now()
	if l.called > 0 {
		l.spent = now - l.called
	}
	l.c.land(l, l.flights, now, true)
}

// wanted returns the flights that still have callers. It gives back the leases of the others.
func (l *load[K, V]) wanted(flights []*flight[K, V]) (wanted []*flight[K, V]) {
	var left []*flight[K, V]
	l.c.mu.Lock()
	for _, f := range flights {
		if f.answered {
			left = append(left, f)
		}
	}
	l.c.mu.Unlock()
	if left == nil {
		return flights
	}
	for _, f := range flights {
		if slices.Contains(left, f) {
			l.release(f, false)
		} else {
			wanted = append(wanted, f)
		}
	}
	return wanted
}

// split gives each of some flights of l a load of its own. ready says that the Store has been
// asked for it.
func (l *load[K, V]) split(some []*flight[K, V], ready bool) {
	c := l.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range some {
		own := &load[K, V]{
			c: c, cfg: l.cfg, caller: l.caller, began: l.began, start: l.start, deadline: l.deadline, ready: ready,
			flights: []*flight[K, V]{f},
		}
		f.load = own
		if f.answered { // nobody waits for it any more
			own.err = context.Canceled
		}
		c.begin(own)
	}
	var rest []*flight[K, V]
	for _, f := range l.flights {
		if f.load == l {
			rest = append(rest, f)
		}
	}
	l.flights = rest
}

// call runs Load or LoadMany with Middleware around it. It returns when the last attempt began,
// whose value is used.
func (l *load[K, V]) call(flights []*flight[K, V]) (begun time.Duration, err error) {
	begun = l.start
	if l.c.tier != nil {
		begun = l.c.now()
	}
	l.called = begun
	if l.cfg.Middleware == nil {
		err = l.attempt(l, flights)
	} else {
		succeeded := false
		err = l.cfg.Middleware(func(ctx context.Context) error {
			begun, l.ttl = l.c.now(), nil
			err := l.attempt(ctx, flights)
			succeeded = err == nil
			if isNotFound(err) && !behavior.IsAnswered(err) {
				err = answered{err} // matches by an Is method, which policies do not see
			}
			return err
		})(l)
		if err == nil && !succeeded {
			err = errors.New(prefix(l.cfg.Name) + "Middleware returned nil without a value from Load")
		}
	}
	if isFailure(err) && errors.Is(l.Err(), context.DeadlineExceeded) {
		err = &TimeoutError{Name: l.cfg.Name, What: "load", After: l.cfg.LoadTimeout, Err: err}
	}
	return begun, err
}

func (l *load[K, V]) attempt(ctx context.Context, flights []*flight[K, V]) (err error) {
	if !l.many {
		l.value, err = l.cfg.Load(ctx, flights[0].key)
		return err
	}
	if err := l.Err(); err != nil {
		return ended.Error(l)
	}
	keys := make([]K, len(flights))
	for i, f := range flights {
		keys[i] = f.key
	}
	l.found, err = l.cfg.LoadMany(ctx, keys)
	return err
}

// resultOf returns the entry and the error of f by a call that began at begun and returned err.
// For a key that does not exist it returns an error, and an entry if that is remembered.
func (l *load[K, V]) resultOf(f *flight[K, V], begun time.Duration, err error) (*entry[V], error) {
	value := l.value
	if l.many {
		var ok bool
		value, ok = l.found[f.key]
		switch {
		case ok: // even if the other keys failed
			err = nil
		case err == nil:
			err = ErrNotFound
		}
	}
	if isFailure(err) {
		if l.many {
			f.by = l
		}
		return nil, err
	}
	if err != nil {
		var none V
		value = none
	}
	e := l.cfg.newEntry(f.key, value, err != nil, l.ttl, begun, l.took)
	if e != nil && l.cfg.Lag > 0 {
		l.c.mu.Lock()
		if ends := l.c.lags.ends(l.c.lagKey(f.key)); ends > begun {
			e.until(ends)
		}
		l.c.mu.Unlock()
	}
	return e, err
}

// lagKey returns the key by which a change is known: other processes name it as written.
func (c *Cache[K, V]) lagKey(key K) any {
	if c.tier != nil {
		return c.cfg().Key(key)
	}
	return key
}

// land ends flights of l, which have their results: it keeps what may be kept, reports the loads,
// and answers the callers. last says that l has no others.
func (c *Cache[K, V]) land(l *load[K, V], flights []*flight[K, V], now time.Duration, last bool) {
	c.mu.Lock()
	c.stats.LoadTime += l.spent
	l.spent = 0
	for _, f := range flights {
		f.late = f.answered
		e := f.result
		switch current := c.current(f.key) == f; {
		case isFailure(f.fault):
			if !behavior.IsAnswered(f.fault) {
				c.postpone(f, now)
			}
		case f.passing, f.late:
		case !current || f.invalidated:
			f.overtook = true
			c.stats.Overtaken++
		case e != nil && now < e.keep && c.remembers.Load():
			e.mark = f.mark
			c.entries.Set(f.key, e)
		default: // not found, or not kept
			c.entries.Invalidate(f.key)
		}
		c.count(f)
		if !f.late {
			f.stale, f.failed = f.past, f.by
			c.answer(f, e, f.fault, now)
		}
	}
	if last {
		c.finish(l)
	}
	c.mu.Unlock()
	defer func() { // even if a hook ends the goroutine
		for _, f := range flights {
			if !f.late {
				close(f.done)
			}
		}
	}()
	if !c.observed() {
		return
	}
	for _, f := range flights {
		if f.kind != "" {
			took := l.took
			if took == 0 {
				took = now - l.start
			}
			c.reportLoad(l, f, f.kind, f.fault, took)
		}
		if f.overtook {
			c.reportOf(l, f, EventOvertaken, nil)
		}
	}
}

// reportOf reports an event of a flight.
func (c *Cache[K, V]) reportOf(l *load[K, V], f *flight[K, V], kind EventKind, err error) {
	if c.observed() {
		c.report(context.WithoutCancel(l), Event{Kind: kind, Name: l.cfg.Name, Key: f.key, Err: err})
	}
}

func (c *Cache[K, V]) reportLoad(l *load[K, V], f *flight[K, V], kind EventKind, err error, took time.Duration) {
	if isNotFound(err) {
		err = nil
	}
	if c.observed() {
		c.report(l, Event{Kind: kind, Name: l.cfg.Name, Key: f.key, Err: err, Took: took})
	}
}

// count counts the load of f, and says which event reports it. That of a load which had been
// canceled or had timed out has been counted, and only its panic is told then. The Cache is
// locked.
func (c *Cache[K, V]) count(f *flight[K, V]) {
	if f.hit {
		c.stats.StoreHits++
	}
	kind, n := EventLoaded, &c.stats.Loaded
	switch err := f.fault; {
	case !f.loaded:
		return
	case isNotFound(err):
		kind, n = EventNotFound, &c.stats.NotFound
	case err != nil:
		kind, n = EventLoadFailed, &c.stats.Failed
		_, panicked := errors.AsType[*panics.Error](err)
		_, late := errors.AsType[*TimeoutError](err)
		switch read := behavior.Read(err).Kind; {
		case read == behavior.Refused:
			kind, n = EventLoadRefused, &c.stats.Refused
		case read == behavior.Answered:
			kind, n = EventLoadAnswered, &c.stats.Answered
		case panicked:
			n = &c.stats.Panicked
		case late:
			n = &c.stats.TimedOut
		}
		if f.late && !panicked {
			return
		}
	}
	f.kind = kind
	if !f.late || n == &c.stats.Panicked {
		*n++
	}
}

// A loadList has loads in the order of their deadlines, which mostly is that of their beginnings.
type loadList[K comparable, V any] struct{ first, last *load[K, V] }

func (list *loadList[K, V]) insert(l *load[K, V]) {
	l.listed = true
	l.prev = list.last
	for l.prev != nil && l.prev.deadline > l.deadline {
		l.prev = l.prev.prev
	}
	if l.prev == nil {
		l.next, list.first = list.first, l
	} else {
		l.next, l.prev.next = l.prev.next, l
	}
	if l.next == nil {
		list.last = l
	} else {
		l.next.prev = l
	}
}

func (list *loadList[K, V]) remove(l *load[K, V]) {
	if !l.listed {
		return
	}
	l.listed = false
	if l.prev == nil {
		list.first = l.next
	} else {
		l.prev.next = l.next
	}
	if l.next == nil {
		list.last = l.prev
	} else {
		l.next.prev = l.prev
	}
}
