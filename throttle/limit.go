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

// A limit decides about calls: what a Limiter and a Group have in common. Its lock guards its
// meters too.
type limit struct {
	observers notify.Observers[Event]

	mu    sync.Mutex
	terms *terms
	stats Stats
}

// terms are what a Config says, in the units of meters. They do not change.
type terms struct {
	cfg    *Config
	token  int64    // nanoseconds; 0: there is no rate
	burst  int64    // nanoseconds, of all tokens
	frames []*frame // of the quotas
}

// A frame says when the windows of a quota begin and end.
type frame struct {
	calendar.Window
	span calendar.Span // of a day or a month: the last that was asked for
}

// A meter is what has been spent of one limit. The zero meter is unspent. Since a Group has one for
// each key, it is small: what few meters need is apart.
type meter struct {
	full int64 // when the burst is full again, in nanoseconds since began
	more *more // nil: no quotas, and no call has ever waited
}

type more struct {
	windows []window  // of the quotas
	line    list.List // of *waiter: the calls that wait, first in, first out
	waiting int       // tokens that they are to take
	timer   *time.Timer
}

// A window is what has been spent of a quota.
type window struct {
	frame *frame
	used  int           // tokens
	end   int64         // since began or, of a calendar, since 1970: only this goes by the clock that can be set
	left  time.Duration // until its end, when it was brought up to date
}

type waiter struct {
	ctx      context.Context
	n        int
	place    *list.Element // nil when it has left the line
	admitted bool
	ready    chan struct{} // closed when it is admitted
}

// A hold is what a call has taken, to be given back or corrected.
type hold struct {
	n        int
	windows  []window // as they were
	overflow bool     // it has taken from what keys of a Group without room share
}

// began is a century before the program began: in a synctest bubble it is the year 2000, and
// a meter of which nothing has been spent must be full there, too.
var began = time.Now().Add(-100 * 365 * 24 * time.Hour)

func present() int64 { return int64(time.Since(began)) }

// enter admits a call that takes n tokens of m, or what its Cost says, if need be after a wait of as
// long as the MaxWait of cfg, or refuses it.
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
	refused := &LimitedError{Name: cfg.Name, Reason: why, Limit: t.cfg.Burst, Quota: quota, Cost: n, After: after}
	if quota.N > 0 {
		refused.Limit = quota.N
	}
	if why == OverLimit {
		refused.Reason = mayWait(ctx, cfg.MaxWait, after)
	}
	if refused.Reason != "" {
		l.stats.refuse(refused.Reason)
		l.mu.Unlock()
		if refused.Reason == DeadlineTooClose {
			refused.Err = context.DeadlineExceeded
		}
		return hold{}, l.tell(ctx, EventRefused, refused, key)
	}

	// The call waits. It takes its tokens from the quotas now, and from the rate when its turn
	// comes.
	h := m.takeQuotas(n)
	if m.more == nil {
		m.more = &more{}
	}
	w := &waiter{ctx: ctx, n: n, ready: make(chan struct{})}
	w.place = m.more.line.PushBack(w)
	m.more.waiting += n
	l.stats.Queued++
	l.serve(m, now)
	l.mu.Unlock()

	start := time.Now()
	var tooLong <-chan time.Time
	if cfg.MaxWait > 0 { // its turn may come later than it seems now: others go into debt
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
	t, now = l.sync(m) // its turn may have come with the end of its patience
	if w.admitted {
		l.stats.Spent += int64(n)
	}
	if w.admitted && refused.Err == nil {
		l.stats.Admitted++
		l.mu.Unlock()
		told := false
		defer func() {
			if !told { // an observer has panicked: the call is not made
				l.settle(m, h, 0)
			}
		}()
		l.tell(ctx, EventWaited, refused, key)
		told = true
		return h, nil
	}
	// Tokens of the rate that came too late for it are lost: given back now, they would be one
	// more than an interval may see that has begun since they came.
	l.leave(m, w)
	l.serve(m, now)
	l.charge(m, h, -n)
	_, _, refused.After = t.refusal(m, n, now)
	l.stats.refuse(refused.Reason)
	l.mu.Unlock()
	return hold{}, l.tell(ctx, EventRefused, refused, key)
}

// mayWait returns why a call must not wait for as long as after, or "".
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

// tell tells the observers of a call that was refused or has waited. key is called without the
// lock, since the key may have a method String.
func (l *limit) tell(ctx context.Context, kind EventKind, e *LimitedError, key func() string) *LimitedError {
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

// settle corrects what h has taken of m: used tokens in all. What is owed beyond one burst, or one
// N of a quota, is forgiven.
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

// charge takes n tokens more of the windows from which h has taken, or gives back -n, and returns
// the most that it has taken of any. Tokens of a window that is over are nobody's. A call that had
// taken nothing takes from the present windows.
func (l *limit) charge(m *meter, h hold, n int) (charged int) {
	if m.more == nil {
		return 0
	}
	for i := range m.more.windows {
		w := &m.more.windows[i]
		same := func(was window) bool { return was.frame.Window == w.frame.Window && was.end == w.end }
		if h.n == 0 || slices.ContainsFunc(h.windows, same) {
			n := min(n, max(0, 2*l.terms.cfg.Quotas[i].N-w.used))
			w.used = max(0, w.used+n)
			charged = max(charged, n)
		}
	}
	return charged
}

// sync brings m up to date: with the windows of now, and with the waiters that are due admitted.
// l.mu is held.
func (l *limit) sync(m *meter) (t *terms, now int64) {
	t, now = l.terms, present()
	if m.more == nil && len(t.frames) > 0 {
		m.more = &more{windows: t.windows(nil)}
	}
	if m.more != nil {
		for i := range m.more.windows {
			m.more.windows[i].advance(now)
		}
		l.serve(m, now)
	}
	return t, now
}

// windows returns a window for each quota: of the old ones that which is there, or a new one.
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

// advance begins a new window if w is over.
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

// refusal returns why n tokens of m, which is up to date, are not there now, of which quota
// if it is one, and the time until they could be.
func (t *terms) refusal(m *meter, n int, now int64) (why Reason, quota Quota, after time.Duration) {
	if n <= 0 {
		return "", quota, 0
	}
	if t.token > 0 && n > t.cfg.Burst {
		return TooCostly, quota, never
	}
	if wait := t.missing(m, n, now) - t.burst; wait > 0 {
		why, after = OverLimit, time.Duration(wait)
	}
	last := time.Duration(0)
	for i, q := range t.cfg.Quotas {
		w := &m.more.windows[i]
		if n > q.N {
			return TooCostly, q, never
		}
		if w.used+n > q.N && w.left > last {
			why, quota, last = OverQuota, q, w.left
		}
	}
	return why, quota, max(after, last)
}

// missing returns the time of the tokens that are missing in the burst of m, with those that
// waiters are to take, and n more.
func (t *terms) missing(m *meter, n int, now int64) int64 {
	if m.more != nil {
		n += m.more.waiting
	}
	return max(0, m.full-now) + t.time(n)
}

// time returns the time of n tokens.
func (t *terms) time(n int) int64 { return scale(int64(n), 1, t.token) }

// scale returns n / from x to, rounded up, or that of a century: more than it may ever be. It is 0
// without a rate.
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
	if m.more == nil {
		return hold{n: n}
	}
	for i := range m.more.windows {
		m.more.windows[i].used += n
	}
	return hold{n: n, windows: slices.Clone(m.more.windows)}
}

// leave takes w out of the line of m.
func (l *limit) leave(m *meter, w *waiter) {
	if w.place != nil {
		m.more.line.Remove(w.place)
		m.more.waiting -= w.n
		w.place = nil
		l.stats.Queued--
	}
}

// serve admits those of the line of m whose tokens are there, and sets the timer for the next
// one. A late timer does not move the schedule: all that are due are admitted together.
func (l *limit) serve(m *meter, now int64) {
	t, x := l.terms, m.more
	if x == nil {
		return
	}
	for place := x.line.Front(); place != nil; place = x.line.Front() {
		w := place.Value.(*waiter)
		if w.ctx.Err() != nil { // it takes no token with it
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
	if x.timer != nil {
		x.timer.Stop()
		x.timer = nil
	}
}

// follow makes cfg, which has its defaults, the present Config: of each of meters, which are all that
// there are, as many tokens are missing as before. l.mu is held.
func (l *limit) follow(cfg *Config, meters ...*meter) {
	was := cmp.Or(l.terms, &terms{})
	l.terms = &terms{cfg: cfg}
	if cfg.Rate != 0 {
		l.terms.token = tokenTime(cfg.Rate)
		l.terms.burst = l.terms.token * int64(cfg.Burst)
	}
	for _, q := range cfg.Quotas {
		f := &frame{Window: q.window()}
		for _, old := range was.frames {
			if f.Same(old.Window, time.Now()) {
				f.Window = old.Window
			}
		}
		l.terms.frames = append(l.terms.frames, f)
	}
	for _, m := range meters {
		now := present()
		m.full = now + scale(m.full-now, was.token, l.terms.token)
		if m.more != nil {
			m.more.windows = l.terms.windows(m.more.windows)
		}
		l.sync(m)
	}
}

// tokenTime returns the time of a token in nanoseconds, rounded up, so that the rate is
// never higher; but not for the sake of a rounding error of the rate.
func tokenTime(rate float64) int64 {
	ns := 1e9 / rate
	if near := math.Round(ns); math.Abs(ns-near) <= ns*1e-15 {
		return int64(near)
	}
	return int64(math.Ceil(ns))
}

// idle reports whether m is as if nothing had been spent of it.
func (l *limit) idle(m *meter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, now := l.sync(m)
	return m.full <= now && (m.more == nil || m.more.line.Len() == 0 &&
		!slices.ContainsFunc(m.more.windows, func(w window) bool { return w.used > 0 }))
}

// decision returns what is left of m for a call that ended its admission with err.
func (l *limit) decision(m *meter, err error) Decision {
	refused, _ := err.(*LimitedError)
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := l.sync(m)
	d := Decision{Limit: t.cfg.Burst, Remaining: math.MaxInt}
	if t.token > 0 {
		d.Window = time.Duration(math.Round(float64(t.cfg.Burst) / t.cfg.Rate * 1e9))
		d.ResetAfter = time.Duration(t.missing(m, 0, now))
		d.Remaining = int(max(0, t.burst-int64(d.ResetAfter)) / t.token)
	}
	for i, q := range t.cfg.Quotas {
		w := m.more.windows[i]
		left := max(0, q.N-w.used)
		if refused == nil && left >= d.Remaining || refused != nil && refused.Quota != q {
			continue
		}
		d = Decision{Quota: q, Limit: q.N, Window: q.Every, Remaining: left}
		if q.Per != "" {
			d.Window = time.Duration(w.frame.span.End - w.frame.span.Begin)
		}
		if w.used > 0 {
			d.ResetAfter = w.left
		}
	}
	if refused != nil {
		d.RetryAfter = refused.After
	}
	d.OK = err == nil
	return d
}
