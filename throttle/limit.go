package throttle

import (
	"cmp"
	"container/list"
	"context"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// A limit decides about calls. It is the common part of a Limiter and a Group. Its lock also guards its meters.
type limit struct {
	observers notify.Observers[Event]

	mu    sync.Mutex
	terms *terms
	stats Stats
}

// terms are a Config in the units of meters. They are immutable.
type terms struct {
	cfg    *Config
	none   bool     // the rate admits nothing
	limit  int      // tokens of a burst; 0 if there are none, Unlimited if nothing limits
	token  int64    // nanoseconds until a token is paid for; 0 if there is no rate
	burst  int64    // nanoseconds until a whole burst is paid for
	quotas []Quota  // without those that are Unlimited
	frames []*frame // of the quotas
}

// A frame finds the starts and ends of a quota's windows.
type frame struct {
	calendar.Window
	span calendar.Span // the period of the calendar that was found last
}

// A meter records what has been spent of one limit. The zero meter is unspent. A Group has one for each key, so
// fields that few meters need are in an extension.
type meter struct {
	full int64     // when the burst is full again, in nanoseconds since epoch
	ext  *meterExt // nil while there are no quotas and no call has waited
}

// A meterExt is the part of a meter that only limits with quotas or waiting calls need.
type meterExt struct {
	windows []window    // one for each quota
	line    list.List   // of *waiter: the waiting calls, first in, first out
	waiting int         // tokens that the waiting calls will take
	timer   *time.Timer // serves the line when the first call is due
}

// A window records what has been spent of a quota.
type window struct {
	frame *frame
	used  int           // tokens
	end   int64         // since epoch or, in a calendar, since 1970, because calendars follow the wall clock
	left  time.Duration // until end, when the window was last advanced
}

// A waiter is a call that waits for its tokens.

type waiter struct {
	ctx      context.Context
	n        int
	place    *list.Element // nil after it was removed from the line
	admitted bool
	ready    chan struct{} // closed when the call is admitted
}

// A hold is what a call has taken, to be given back or corrected.
type hold struct {
	n        int
	windows  []window // from which the tokens were taken
	overflow bool     // the tokens are those of the meter that keys of a Group without room share
}

// epoch is a century before the program started. A synctest bubble starts in the year 2000, and a zero meter must be
// full there as well.
var epoch = time.Now().Add(-100 * 365 * 24 * time.Hour)

// nowNanos returns the nanoseconds since epoch.
func nowNanos() int64 { return int64(time.Since(epoch)) }

// enter admits a call that takes n tokens of m, or those that Cost returns, after a wait of at most MaxWait.
// Otherwise it returns a [*LimitedError].
func (l *limit) enter(ctx context.Context, m *meter, cfg *Config, key func() string, n int) (hold, error) {
	if ctx.Err() != nil {
		return hold{}, ended.Error(ctx)
	}
	if n == byCost {
		n = cfg.cost(ctx)
	}
	l.mu.Lock()
	t, now := l.sync(m)
	why, quota, after := t.refusal(m, n, now)
	if why == "" {
		defer l.mu.Unlock()
		l.stats.Admitted++
		return l.take(m, n, now), nil
	}
	refused := &LimitedError{Name: cfg.Name, Reason: why, Limit: t.limit, Quota: quota, Cost: n, After: after}
	if quota != (Quota{}) {
		refused.Limit = quota.limit()
	}
	if why == OverLimit && after != never {
		refused.Reason = mayWait(ctx, cfg.MaxWait, after)
	}
	if refused.Reason != "" {
		l.stats.refuse(refused.Reason)
		l.mu.Unlock()
		if refused.Reason == DeadlineTooClose {
			refused.Err = context.DeadlineExceeded
		}
		return hold{}, l.notify(ctx, EventRefused, refused, key)
	}

	// The call waits. It takes its tokens from the quotas now, and those of the rate when they are there.
	h := m.takeQuotas(n)
	if m.ext == nil {
		m.ext = &meterExt{}
	}
	w := &waiter{ctx: ctx, n: n, ready: make(chan struct{})}
	w.place = m.ext.line.PushBack(w)
	m.ext.waiting += n
	l.stats.Queued++
	l.serve(m, now)
	l.mu.Unlock()

	start := time.Now()
	var tooLong <-chan time.Time
	if cfg.MaxWait > 0 { // the wait may become longer than expected, because settlements of others charge more
		timer := time.NewTimer(cfg.MaxWait)
		defer timer.Stop()
		tooLong = timer.C
	}
	select {
	case <-w.ready:
	case <-tooLong:
		refused.Reason = WaitTooLong
	case <-ctx.Done():
	}
	refused.Waited = time.Since(start)
	if ctx.Err() != nil {
		refused.Reason, refused.Err = ContextEnded, ended.Error(ctx)
	}

	l.mu.Lock()
	t, now = l.sync(m) // the call may have been admitted just when it stopped waiting
	if w.admitted {
		l.stats.Spent += int64(n)
	}
	if w.admitted && refused.Err == nil {
		l.stats.Admitted++
		l.mu.Unlock()
		notified := false
		defer func() {
			if !notified { // an observer panicked, so the call does not run
				l.settle(m, h, 0)
			}
		}()
		l.notify(ctx, EventWaited, refused, key)
		notified = true
		return h, nil
	}
	// Tokens of the rate that came too late for the call are lost: an interval that has started since they came
	// would otherwise see more tokens than it may.
	l.leave(m, w)
	l.serve(m, now)
	l.charge(m, h, -n)
	_, _, refused.After = t.refusal(m, n, now)
	l.stats.refuse(refused.Reason)
	l.mu.Unlock()
	return hold{}, l.notify(ctx, EventRefused, refused, key)
}

// mayWait returns the reason why a call must not wait for the given time, or "" if it may.
func mayWait(ctx context.Context, maxWait, after time.Duration) Reason {
	switch deadline, limited := ctx.Deadline(); {
	case maxWait == 0:
		return OverLimit
	case maxWait > 0 && after > maxWait, after > maxTime:
		return WaitTooLong
	case limited && after > time.Until(deadline):
		return DeadlineTooClose
	}
	return ""
}

// notify notifies the observers of a call that was refused or has waited. key is called without the lock because it
// may call a method String of the user.
func (l *limit) notify(ctx context.Context, kind EventKind, e *LimitedError, key func() string) *LimitedError {
	if key != nil {
		e.Key = key()
	}
	event := Event{Kind: kind, Name: e.Name, Key: e.Key, Cost: e.Cost, Waited: e.Waited}
	if kind == EventRefused {
		event.Reason, event.Err = e.Reason, e
	}
	l.observers.Tell(ctx, event)
	return e
}

// allow takes n tokens of m if they are there.
func (l *limit) allow(m *meter, n int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := l.sync(m)
	why, _, _ := t.refusal(m, n, now)
	if why != "" {
		l.stats.refuse(why)
		return false
	}
	l.stats.Admitted++
	l.take(m, n, now)
	return true
}

// settle corrects h, whose call used the given tokens. Debt beyond a burst, or beyond the N of a quota, is forgiven.
func (l *limit) settle(m *meter, h hold, used int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := l.sync(m)
	more := max(0, used) - h.n
	charged := l.charge(m, h, more)
	if t.token > 0 {
		debt := max(0, m.full-now)
		n := min(more, int(max(0, 2*t.burst-debt)/t.token))
		m.full = now + debt - min(debt, t.time(-n)) + t.time(n)
		charged = max(charged, n)
	}
	if more > 0 {
		l.stats.Spent += int64(charged)
		l.stats.Forgiven += int64(more - charged)
	} else {
		l.stats.Refunded -= int64(more)
	}
	l.serve(m, now)
}

// charge takes n tokens more of the windows from which h took, or gives back -n. It returns the largest number
// that it took of a window. A window that is over is not corrected. A call that had taken nothing is charged to
// the current windows.
func (l *limit) charge(m *meter, h hold, n int) (charged int) {
	if m.ext == nil {
		return 0
	}
	for i := range m.ext.windows {
		w := &m.ext.windows[i]
		same := func(was window) bool { return was.frame.Window == w.frame.Window && was.end == w.end }
		if h.n == 0 || slices.ContainsFunc(h.windows, same) {
			n := min(n, max(0, 2*l.terms.quotas[i].limit()-w.used))
			w.used = max(0, w.used+n)
			charged = max(charged, n)
		}
	}
	return charged
}

// sync brings m up to date: it starts new windows and admits waiters that are due. l.mu is held.
func (l *limit) sync(m *meter) (t *terms, now int64) {
	t, now = l.terms, nowNanos()
	if m.ext == nil && len(t.frames) > 0 {
		m.ext = &meterExt{windows: t.windows(nil)}
	}
	if m.ext != nil {
		for i := range m.ext.windows {
			m.ext.windows[i].advance(now)
		}
		l.serve(m, now)
	}
	return t, now
}

// windows returns a window for each quota: the old one, if there is one, or a new one.
func (t *terms) windows(old []window) []window {
	windows := make([]window, len(t.frames))
	for i, f := range t.frames {
		for _, w := range old {
			if w.frame.Window == f.Window {
				windows[i] = w
			}
		}
		windows[i].frame = f
	}
	return windows
}

// advance starts a new window if w is over.
func (w *window) advance(now int64) {
	f := w.frame
	if f.Per != "" {
		now = time.Now().UnixNano()
	}
	if w.used <= 0 || w.end <= now {
		w.used, w.end = 0, now+int64(f.Every)
	}
	if f.Per != "" {
		if now < f.span.Begin || now >= f.span.End {
			f.span = f.Find(time.Unix(0, now))
		}
		w.end = f.span.End
	}
	w.left = time.Duration(w.end - now)
}

// refusal returns the reason why m, which is up to date, cannot give n tokens now, the quota if that refuses, and the
// time until m could give them.
func (t *terms) refusal(m *meter, n int, now int64) (why Reason, quota Quota, after time.Duration) {
	if n <= 0 {
		return "", quota, 0
	}
	if t.none {
		return OverLimit, quota, never
	}
	if t.token > 0 && n > t.limit {
		return TooCostly, quota, never
	}
	if wait := t.deficit(m, n, now) - t.burst; wait > 0 {
		why, after = OverLimit, time.Duration(wait)
	}
	last := time.Duration(0)
	for i, q := range t.quotas {
		w := &m.ext.windows[i]
		if q.N == None {
			return OverQuota, q, never
		}
		if n > q.limit() {
			return TooCostly, q, never
		}
		if w.used+n > q.limit() && w.left > last {
			why, quota, last = OverQuota, q, w.left
		}
	}
	return why, quota, max(after, last)
}

// deficit returns the time after which the burst of m is full, once the waiters and a call of n tokens have taken
// theirs.
func (t *terms) deficit(m *meter, n int, now int64) int64 {
	if m.ext != nil {
		n += m.ext.waiting
	}
	return max(0, m.full-now) + t.time(n)
}

// time returns the time after which n tokens are paid for.
func (t *terms) time(n int) int64 { return scale(int64(n), 1, t.token) }

// scale returns n / from x to, rounded up, but no more than a century. It returns 0 without a rate.
func scale(n, from, to int64) int64 {
	const most = int64(3 * maxTime)
	if n <= 0 || from == 0 {
		return 0
	}
	high, low := bits.Mul64(uint64(n), uint64(to))
	low, carry := bits.Add64(low, uint64(from-1), 0)
	if high += carry; high >= uint64(from) {
		return most
	}
	scaled, _ := bits.Div64(high, low, uint64(from))
	return int64(min(scaled, uint64(most)))
}

// take takes n tokens of m.
func (l *limit) take(m *meter, n int, now int64) hold {
	l.stats.Spent += int64(n)
	m.full = max(m.full, now) + l.terms.time(n)
	return m.takeQuotas(n)
}

// takeQuotas takes n tokens of the windows of m.
func (m *meter) takeQuotas(n int) hold {
	if m.ext == nil {
		return hold{n: n}
	}
	for i := range m.ext.windows {
		m.ext.windows[i].used += n
	}
	return hold{n: n, windows: slices.Clone(m.ext.windows)}
}

// leave removes w from the line of m.
func (l *limit) leave(m *meter, w *waiter) {
	if w.place != nil {
		m.ext.line.Remove(w.place)
		m.ext.waiting -= w.n
		w.place = nil
		l.stats.Queued--
	}
}

// serve admits the waiters of m that are due, and sets the timer for the next one. A late timer does not move the
// schedule: all waiters that are due are admitted together. A limit that admits nothing keeps them waiting.
func (l *limit) serve(m *meter, now int64) {
	t, x := l.terms, m.ext
	if x == nil {
		return
	}
	if t.none {
		x.stop()
		return
	}
	for place := x.line.Front(); place != nil; place = x.line.Front() {
		w := place.Value.(*waiter)
		if w.ctx.Err() != nil { // the call takes no tokens
			l.leave(m, w)
			continue
		}
		due := m.full + t.time(w.n) - t.burst
		if wait := time.Duration(due - now); wait > 0 && t.token > 0 {
			if x.timer == nil {
				x.timer = time.AfterFunc(wait, func() {
					l.mu.Lock()
					defer l.mu.Unlock()
					l.sync(m)
				})
			}
			x.timer.Reset(wait)
			return
		}
		m.full = max(m.full, due) + t.time(w.n)
		l.leave(m, w)
		w.admitted = true
		close(w.ready)
	}
	x.stop()
}

// stop stops the timer.
func (x *meterExt) stop() {
	if x.timer != nil {
		x.timer.Stop()
		x.timer = nil
	}
}

// applyConfig makes cfg, which has its defaults, the current configuration. The given meters are all that there
// are; of each, as many tokens are spent as before. l.mu is held.
func (l *limit) applyConfig(cfg *Config, meters ...*meter) {
	was := cmp.Or(l.terms, &terms{})
	l.terms = &terms{cfg: cfg}
	for _, q := range cfg.Quotas {
		if q.N == Unlimited {
			continue
		}
		l.terms.quotas = append(l.terms.quotas, q)
		f := &frame{Window: q.Window.calendar()}
		for _, old := range was.frames {
			if f.Same(old.Window, time.Now()) {
				f.Window = old.Window
			}
		}
		l.terms.frames = append(l.terms.frames, f)
	}
	switch {
	case cfg.admitsNothing():
		l.terms.none = true
	case cfg.Rate > 0:
		l.terms.limit = cfg.Burst
		l.terms.token = tokenTime(cfg.Rate)
		l.terms.burst = l.terms.token * int64(cfg.Burst)
	case len(l.terms.quotas) == 0:
		l.terms.limit = Unlimited
	}
	for _, m := range meters {
		now := nowNanos()
		m.full = now + scale(m.full-now, was.token, l.terms.token)
		if m.ext != nil {
			m.ext.windows = l.terms.windows(m.ext.windows)
		}
		l.sync(m)
	}
}

// tokenTime returns the time of a token in nanoseconds, rounded up so that the rate is never exceeded, unless only a
// rounding error of the rate is the reason.
func tokenTime(rate float64) int64 {
	ns := 1e9 / rate
	if near := math.Round(ns); math.Abs(ns-near) <= ns*1e-15 {
		return int64(near)
	}
	return int64(math.Ceil(ns))
}

// idle reports whether m is in the state in which nothing has been spent.
func (l *limit) idle(m *meter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, now := l.sync(m)
	return m.full <= now && (m.ext == nil || m.ext.line.Len() == 0 &&
		!slices.ContainsFunc(m.ext.windows, func(w window) bool { return w.used > 0 }))
}

// decision returns what is left of m after a call whose admission returned err.
func (l *limit) decision(m *meter, err error) Decision {
	refused, _ := err.(*LimitedError)
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := l.sync(m)
	d := Decision{Limit: t.limit, Remaining: math.MaxInt}
	if t.none {
		d.Remaining = 0
	}
	if t.token > 0 {
		d.Window = time.Duration(math.Round(float64(t.cfg.Burst) / t.cfg.Rate * 1e9))
		d.ResetAfter = time.Duration(t.deficit(m, 0, now))
		d.Remaining = int(max(0, t.burst-int64(d.ResetAfter)) / t.token)
	}
	for i, q := range t.quotas {
		w := m.ext.windows[i]
		left := max(0, q.limit()-w.used)
		if refused == nil && left >= d.Remaining || refused != nil && refused.Quota != q {
			continue
		}
		d = Decision{Quota: q, Limit: q.limit(), Window: q.Window.Every, Remaining: left}
		if q.Window.Per != "" {
			d.Window = time.Duration(w.frame.span.End - w.frame.span.Begin)
		}
		if w.used > 0 {
			d.ResetAfter = w.left
		}
	}
	if refused != nil {
		d.RetryAfter = refused.After
	}
	d.Admitted = err == nil
	return d
}
