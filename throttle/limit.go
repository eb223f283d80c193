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

// A limit admits or refuses calls. Limiter and Group embed it. The lock of a limit also guards the limit's meters.
type limit struct {
	observers notify.Observers[Event]

	mu    sync.Mutex
	terms *terms
	stats Stats
}

// terms are a Config in the units in which meters count. They are immutable.
type terms struct {
	cfg    *Config
	none   bool     // the rate admits nothing
	rated  bool     // calls take tokens from the rate
	limit  int      // the burst in tokens; 0 if the rate is none or there are only quotas; Unlimited if there is no limit
	token  int64    // nanoseconds in which the rate, or the last rate if there is none now, yields one token; or 0
	burst  int64    // nanoseconds in which that rate yields a whole burst
	quotas []Quota  // the quotas that are not Unlimited, or were not Unlimited before
	frames []*frame // the frame of each of quotas
}

// A frame finds the starts and ends of a quota's windows.
type frame struct {
	calendar.Window
	span calendar.Span // the calendar period that was found last
}

// A meter records how many tokens of a limit are spent. A zero meter has spent no tokens. A Group has a meter for
// each key. To save memory, the fields that few meters need are in the extension ext.
type meter struct {
	full int64     // the time at which the burst is full again, in nanoseconds since epoch
	ext  *meterExt // nil while the limit has no quotas and no call has waited
}

// A meterExt is the part of a meter that is needed only for quotas and waiting calls.
type meterExt struct {
	windows []window    // a window for each quota
	line    list.List   // the waiting calls, as *waiter, in the order of their arrival
	waiting int         // the number of tokens that the waiting calls will take
	timer   *time.Timer // serves the line when its first call is due
}

// A window records how many tokens of a quota are spent. The end of a calendar window is counted from 1970, because
// calendars follow the wall clock.
type window struct {
	frame *frame
	used  int           // the tokens spent in this window
	end   int64         // the end of the window in nanoseconds, since epoch or, for a calendar, since 1970
	left  time.Duration // the time until end, computed when advance was last called
}

// A waiter is a call that waits for its tokens.
type waiter struct {
	ctx      context.Context
	n        int
	place    *list.Element // nil after the waiter was removed from the line
	admitted bool
	rated    bool          // the call was admitted with tokens of the rate
	ready    chan struct{} // closed when the call is admitted
}

// A hold records the tokens that a call has taken. The tokens can be refunded or corrected later.
type hold struct {
	n        int      // the number of tokens
	rated    bool     // the tokens were also taken from the rate
	windows  []window // the windows from which the tokens were taken
	overflow bool     // the tokens come from the shared meter of a Group, because the key found no room
}

// epoch is a century before the program started. In a synctest bubble, the time starts in the year 2000. epoch is
// earlier than 2000, so a zero meter also has a full burst in a bubble.
var epoch = time.Now().Add(-100 * 365 * 24 * time.Hour)

// nowNanos returns the number of nanoseconds since epoch.
func nowNanos() int64 { return int64(time.Since(epoch)) }

// enter admits a call that takes n tokens of m. If n is byCost, the call takes the number of tokens that Cost
// returns. enter waits for the tokens, at most for MaxWait. If the call is refused, enter returns a [*LimitedError].
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

	// The call waits for the tokens of the rate. It takes the tokens of its quotas now.
	h := l.takeQuotas(m, n)
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
	if cfg.MaxWait > 0 { // Settle may charge tokens for other calls, so the wait may become longer than expected
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
	t, now = l.sync(m) // serve may have admitted the call just when the call stopped waiting
	if w.admitted {
		l.stats.Spent += int64(n)
	}
	if w.admitted && refused.Err == nil {
		h.rated = w.rated
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
	// Tokens of the rate that came too late for the call are lost. If they were refunded, more tokens than the bound could
	// be admitted in an interval that has started since then.
	l.leave(m, w)
	l.serve(m, now)
	l.charge(m, h, -n)
	_, _, refused.After = t.refusal(m, n, now)
	l.stats.refuse(refused.Reason)
	l.mu.Unlock()
	return hold{}, l.notify(ctx, EventRefused, refused, key)
}

// mayWait returns the reason why a call must not wait for the time after, or "" if the call may wait.
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

// notify notifies the observers of a call that was refused or has waited. The caller must not hold l.mu, because key
// may call a String method of the user.
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

// allow takes n tokens of m if m has them, and reports whether it took them.
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

// settle corrects h to the number of tokens that its call used. Debt beyond a burst, or beyond the N of a quota, is
// forgiven.
func (l *limit) settle(m *meter, h hold, used int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := l.sync(m)
	more := max(0, used) - h.n
	charged := l.charge(m, h, more)
	if h.rated {
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

// charge takes n more tokens from the windows from which h took its tokens. If n is negative, charge refunds -n
// tokens. charge returns the largest number of tokens that it took from a window. It does not correct a window that
// has ended. If h has taken no tokens, charge takes the tokens from the current windows.
func (l *limit) charge(m *meter, h hold, n int) (charged int) {
	if m.ext == nil {
		return 0
	}
	for i := range m.ext.windows {
		w, limit := &m.ext.windows[i], l.terms.quotas[i].limit()
		same := func(was window) bool { return was.frame.Window == w.frame.Window && was.end == w.end }
		if h.n == 0 && limit != Unlimited || slices.ContainsFunc(h.windows, same) {
			n := n
			if limit != Unlimited {
				n = min(n, max(0, 2*limit-w.used))
			}
			w.used = max(0, w.used+n)
			charged = max(charged, n)
		}
	}
	return charged
}

// sync updates m: it starts new windows and admits the waiters that are due. The caller holds l.mu.
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

// windows returns a window for each quota. If old has the window of a quota, windows returns that window; otherwise,
// the window is new.
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

// advance starts a new window if w has ended or no tokens of w are spent.
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

// refusal returns the reason why m cannot give n tokens now, or "" if m can give them. quota is the quota that
// refuses the tokens, or zero. after is the time until m could give the tokens. The caller has called sync for m.
func (t *terms) refusal(m *meter, n int, now int64) (why Reason, quota Quota, after time.Duration) {
	if n <= 0 {
		return "", quota, 0
	}
	if t.none {
		return OverLimit, quota, never
	}
	if t.rated && n > t.limit {
		return TooCostly, quota, never
	}
	if wait := t.deficit(m, n, now) - t.burst; t.rated && wait > 0 {
		why, after = OverLimit, time.Duration(wait)
	}
	last := time.Duration(0)
	for i, q := range t.quotas {
		w := &m.ext.windows[i]
		if q.N == None {
			return OverQuota, q, never
		}
		if q.N == Unlimited {
			continue
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

// deficit returns the time until the burst of m would be full if the waiters and a call for n tokens took their tokens
// now.
func (t *terms) deficit(m *meter, n int, now int64) int64 {
	if m.ext != nil {
		n += m.ext.waiting
	}
	return max(0, m.full-now) + t.time(n)
}

// time returns the time in which the rate yields n tokens.
func (t *terms) time(n int) int64 { return scale(int64(n), 1, t.token) }

// scale returns n * to / from, rounded up, but at most 3 * maxTime. It returns 0 if n is not positive. It also
// returns 0 if from or to is 0, because there is no rate.
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
	if l.terms.rated {
		m.full = max(m.full, now) + l.terms.time(n)
	}
	h := l.takeQuotas(m, n)
	h.rated = l.terms.rated
	return h
}

// takeQuotas takes n tokens of the windows of m whose quotas are not Unlimited.
func (l *limit) takeQuotas(m *meter, n int) hold {
	h := hold{n: n}
	if m.ext == nil {
		return h
	}
	h.windows = make([]window, 0, len(m.ext.windows))
	for i := range m.ext.windows {
		if w := &m.ext.windows[i]; l.terms.quotas[i].N != Unlimited {
			w.used += n
			h.windows = append(h.windows, *w)
		}
	}
	return h
}

// leave removes w from the line of m if w is still in the line.
func (l *limit) leave(m *meter, w *waiter) {
	if w.place != nil {
		m.ext.line.Remove(w.place)
		m.ext.waiting -= w.n
		w.place = nil
		l.stats.Queued--
	}
}

// serve admits the waiters of m that are due, and sets the timer for the next waiter. If the timer is late, serve
// admits all waiters that have become due, so the next waiters are not delayed. If the limit admits nothing, the
// waiters continue to wait.
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
		if w.ctx.Err() != nil { // a call whose ctx is done takes no tokens
			l.leave(m, w)
			continue
		}
		due := m.full + t.time(w.n) - t.burst
		if wait := time.Duration(due - now); t.rated && wait > 0 {
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
		if t.rated {
			m.full = max(m.full, due) + t.time(w.n)
		}
		l.leave(m, w)
		w.rated = t.rated
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

// applyConfig makes cfg the current configuration. cfg has its defaults filled in. meters must be all meters of l.
// The number of tokens that are spent stays the same for each meter, even while Rate, Burst or N is None or Unlimited.
// The caller holds l.mu.
func (l *limit) applyConfig(cfg *Config, meters ...*meter) {
	was := cmp.Or(l.terms, &terms{})
	l.terms = &terms{cfg: cfg, token: was.token, burst: was.burst}
	for _, q := range cfg.Quotas {
		f, known := &frame{Window: q.Window.calendar()}, false
		for _, old := range was.frames {
			if f.Same(old.Window, time.Now()) {
				f.Window, known = old.Window, true
			}
		}
		if q.N == Unlimited && !known {
			continue
		}
		l.terms.quotas = append(l.terms.quotas, q)
		l.terms.frames = append(l.terms.frames, f)
	}
	switch {
	case cfg.admitsNothing():
		l.terms.none = true
	case cfg.Rate > 0:
		l.terms.rated = true
		l.terms.limit = cfg.Burst
		l.terms.token = tokenTime(cfg.Rate)
		l.terms.burst = l.terms.token * int64(cfg.Burst)
	default: // a quota that limits replaces it in each Decision
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

// tokenTime returns the time of a token in nanoseconds. The time is rounded up. Thus the rate is never exceeded. If the
// time differs from an integer only by the rounding error of the rate, tokenTime returns that integer.
func tokenTime(rate float64) int64 {
	ns := 1e9 / rate
	if near := math.Round(ns); math.Abs(ns-near) <= ns*1e-15 {
		return int64(near)
	}
	return int64(math.Ceil(ns))
}

// idle reports whether no tokens of m are spent and no call waits.
func (l *limit) idle(m *meter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, now := l.sync(m)
	return m.full <= now && (m.ext == nil || m.ext.line.Len() == 0 &&
		!slices.ContainsFunc(m.ext.windows, func(w window) bool { return w.used > 0 }))
}

// decision returns the state of m after a call. err is the error that the admission of the call returned.
func (l *limit) decision(m *meter, err error) Decision {
	refused, _ := err.(*LimitedError)
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := l.sync(m)
	d := Decision{Limit: t.limit, Remaining: math.MaxInt}
	if t.none {
		d.Remaining = 0
	}
	if t.rated {
		d.Window = time.Duration(math.Round(float64(t.cfg.Burst) / t.cfg.Rate * 1e9))
		d.ResetAfter = time.Duration(t.deficit(m, 0, now))
		d.Remaining = int(max(0, t.burst-int64(d.ResetAfter)) / t.token)
	}
	for i, q := range t.quotas {
		w := m.ext.windows[i]
		left := max(0, q.limit()-w.used)
		if q.N == Unlimited {
			continue
		}
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
