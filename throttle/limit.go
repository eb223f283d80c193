package throttle

import (
	"cmp"
	"container/list"
	"context"
	"iter"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// A limit decides about calls: what a Limiter and a Group have in common. Its lock guards
// its meters too.
type limit struct {
	observers notify.Observers[Event]

	mu      sync.Mutex
	terms   []*terms       // all that there were, since a meter may follow an older one; the last are the present ones
	lines   map[*line]bool // that have waiting calls
	queued  int            // calls that wait
	did     Totals         // without Refused and Refusals
	refused [len(reasons)]int64
}

// terms are what a Config says, in the units of meters.
type terms struct {
	cfg       *Config
	since     int64             // on the steady clock
	token     int64             // nanoseconds; 0: there is no rate
	burst     int64             // nanoseconds, of all tokens
	calendars []calendar.Window // of the quotas
	spans     []calendar.Span   // of days and months: the last that were asked for
}

func newTerms(cfg *Config) *terms {
	t := &terms{cfg: cfg, since: present().steady, spans: make([]calendar.Span, len(cfg.Quotas))}
	if cfg.Rate != 0 {
		t.token = tokenTime(cfg.Rate)
		t.burst = t.token * int64(cfg.Burst)
	}
	for _, q := range cfg.Quotas {
		t.calendars = append(t.calendars, q.window())
	}
	return t
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

// A meter is what has been spent of one limit. The zero meter is unspent.
type meter struct {
	full int64 // when the burst is full again, on the steady clock
	more *more // nil if nothing is known but full, under the first terms
}

// more is what few meters have.
type more struct {
	terms   int      // the number of those that full and windows follow
	windows []window // of the quotas
	line    *line    // nil if no call waits
}

// A window is what has been spent of a quota.
type window struct {
	used int64 // tokens
	end  int64 // on the clock of the quota; 0 before the first token
}

// A line holds the calls that wait for the tokens of a meter, first in, first out. A late
// timer does not move the schedule: all waiters that are due are admitted together.
type line struct {
	meter   *meter
	waiters list.List // of *waiter
	tokens  int64     // that all waiters are to take
	timer   *time.Timer
}

type waiter struct {
	ctx      context.Context
	n        int64
	left     bool // the line
	admitted bool
	ready    chan struct{} // closed when it is admitted
}

// A moment is a time by both clocks, in nanoseconds: rates and windows of a fixed length go
// by the one that nobody sets, and windows of a calendar by the other.
type moment struct {
	steady int64 // since a century before the program began
	wall   int64 // since 1970
}

// began is a century before the program began: in a synctest bubble it is the year 2000, and
// a meter of which nothing has been spent must be full there, too.
var began = time.Now().Add(-100 * 365 * 24 * time.Hour)

func present() moment {
	now := time.Now()
	return moment{int64(now.Sub(began)), now.UnixNano()}
}

// A hold is what a call has taken, to be given back or corrected.
type hold struct {
	n    int
	ends []int64 // of the windows of the quotas
	at   int     // the number of the terms
}

// enter admits a call that takes n tokens of m, if need be after a wait of as long as the
// MaxWait of cfg, or refuses it.
func (l *limit) enter(ctx context.Context, m *meter, cfg *Config, key func() string, n int) (h hold, refused *LimitedError) {
	l.mu.Lock()
	t, now := l.sync(m)
	why, quota, after := t.refusal(m, int64(n), now)
	if why == "" {
		h = l.take(m, t, n, now)
		l.did.Admitted++
		l.mu.Unlock()
		return h, nil
	}
	refused = &LimitedError{Name: cfg.Name, Reason: why, Limit: t.cfg.Burst, Cost: n, After: after}
	if quota >= 0 {
		refused.Quota, refused.Limit = t.cfg.Quotas[quota], t.cfg.Quotas[quota].N
	}
	if why == OverLimit {
		refused.Reason = mayWait(ctx, cfg.MaxWait, after)
	}
	if refused.Reason != "" {
		l.refused[slices.Index(reasons[:], refused.Reason)]++
		l.mu.Unlock()
		if refused.Reason == DeadlineTooClose {
			refused.Err = context.DeadlineExceeded
		}
		return hold{}, l.tell(ctx, refused, key)
	}

	// The call waits. It takes its tokens from the quotas now, and from the rate when its turn
	// comes.
	w := &waiter{ctx: ctx, n: int64(n), ready: make(chan struct{})}
	h = l.spendQuotas(m, t, n, now)
	place := l.join(m, w)
	l.serve(m, t, now)
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
	if w.admitted && refused.Err == nil {
		l.did.Admitted++
		l.did.Spent += int64(n)
		l.did.Waited++
		l.did.WaitTime += refused.Waited
		l.mu.Unlock()
		if l.observers.Any() {
			e := Event{Kind: EventWaited, Name: cfg.Name, Cost: n, Waited: refused.Waited}
			if key != nil {
				e.Key = key()
			}
			l.observers.Tell(ctx, e)
		}
		return h, nil
	}
	// Tokens of the rate that came too late for it are lost: given back now, they would be one
	// more than an interval may see that has begun since they came.
	if w.admitted {
		l.did.Spent += int64(n)
	} else if !w.left {
		l.leave(m, w, place)
		l.serve(m, t, now)
	}
	l.refundQuotas(m, h, n)
	_, _, refused.After = t.refusal(m, int64(n), now)
	l.refused[slices.Index(reasons[:], refused.Reason)]++
	l.mu.Unlock()
	return hold{}, l.tell(ctx, refused, key)
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

// tell tells the observers of a refused call. key is called without the lock, since the key
// may have a method String.
func (l *limit) tell(ctx context.Context, e *LimitedError, key func() string) *LimitedError {
	if key != nil {
		e.Key = key()
	}
	if l.observers.Any() {
		l.observers.Tell(ctx, Event{
			Kind: EventRefused, Name: e.Name, Key: e.Key, Cost: e.Cost, Waited: e.Waited, Reason: e.Reason, Err: e,
		})
	}
	return e
}

// allow takes n tokens of m if they are there.
func (l *limit) allow(m *meter, n int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := l.sync(m)
	why, _, _ := t.refusal(m, int64(n), now)
	if why != "" {
		l.refused[slices.Index(reasons[:], why)]++
		return false
	}
	l.take(m, t, n, now)
	l.did.Admitted++
	return true
}

// settle corrects what h has taken of m: used tokens in all. Tokens of a window that is over
// are nobody's.
func (l *limit) settle(m *meter, h hold, used int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, now := l.sync(m)
	more := max(0, used) - h.n
	if more <= 0 {
		l.did.Refunded -= int64(more)
		l.giveBack(m, t, h, -more, now)
		l.serve(m, t, now)
		return
	}
	charged := 0 // the most of any
	if t.token > 0 {
		debt := max(m.full-now.steady, 0)
		charged = min(more, int(max(0, 2*t.burst-debt)/t.token))
		m.full = now.steady + debt + int64(charged)*t.token
	}
	for i, w := range l.windowsOf(m, h) {
		n := min(more, max(0, 2*t.cfg.Quotas[i].N-int(w.used)))
		w.used += int64(n)
		charged = max(charged, n)
	}
	l.did.Spent += int64(charged)
	l.did.Forgiven += int64(more - charged)
	l.serve(m, t, now)
}

// sync brings m up to date: under the present terms, with the windows of now, and with the
// waiters that are due admitted. l.mu is held.
func (l *limit) sync(m *meter) (*terms, moment) {
	t, now := l.terms[len(l.terms)-1], present()
	at := 0
	if m.more != nil {
		at = m.more.terms
	}
	if m.more == nil && (at < len(l.terms)-1 || len(t.cfg.Quotas) > 0) {
		m.more = &more{windows: make([]window, len(l.terms[0].cfg.Quotas))}
	}
	for at++; at < len(l.terms); at++ {
		m.follow(l.terms[at-1], l.terms[at], at)
	}
	if m.more != nil {
		m.more.advance(t, now)
		l.serve(m, t, now)
	}
	return t, now
}

// follow has m, which follows was, follow t, whose number is at: as many tokens are missing as
// were when t came, and a window keeps what was spent of it.
func (m *meter) follow(was, t *terms, at int) {
	if debt := m.full - t.since; debt > 0 {
		m.full = t.since + scale(debt, was.token, t.token)
	}
	windows := make([]window, len(t.cfg.Quotas))
	for i, j := range t.same(was) {
		windows[i] = m.more.windows[j]
	}
	m.more.windows, m.more.terms = windows, at
}

// same yields each quota of t that has the window of one of other, and that.
func (t *terms) same(other *terms) iter.Seq2[int, int] {
	return func(yield func(int, int) bool) {
		for i, w := range t.calendars {
			if j := slices.Index(other.calendars, w); j >= 0 && !yield(i, j) {
				return
			}
		}
	}
}

// scale returns debt / from x to, rounded up: as much of a token of the time to as debt is of
// one of the time from.
func scale(debt, from, to int64) int64 {
	if from == 0 || to == 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(debt), uint64(to))
	if hi >= uint64(from) {
		return int64(2 * maxTime)
	}
	q, rest := bits.Div64(hi, lo, uint64(from))
	if rest > 0 {
		q++
	}
	return int64(min(q, uint64(2*maxTime)))
}

// advance empties the windows that are over.
func (m *more) advance(t *terms, now moment) {
	for i := range m.windows {
		w, clock := &m.windows[i], t.clock(i, now)
		if w.end <= clock || w.used <= 0 {
			*w = window{}
		}
		if c := t.calendars[i]; c.Per != "" {
			if s := &t.spans[i]; clock < s.Begin || clock >= s.End {
				*s = c.Find(time.Unix(0, clock))
			}
			w.end = t.spans[i].End
		}
	}
}

// clock returns now on the clock of a quota.
func (t *terms) clock(quota int, now moment) int64 {
	if t.calendars[quota].Per != "" {
		return now.wall
	}
	return now.steady
}

// refusal returns why n tokens of m, which is up to date, are not there now, of which quota
// or -1, and the time until they could be.
func (t *terms) refusal(m *meter, n int64, now moment) (why Reason, quota int, after time.Duration) {
	if n <= 0 {
		return "", -1, 0
	}
	if t.token > 0 && n > int64(t.cfg.Burst) {
		return TooCostly, -1, never
	}
	for i, q := range t.cfg.Quotas {
		if n > int64(q.N) {
			return TooCostly, i, never
		}
	}
	quota = -1
	if wait := t.missing(m, n, now) - t.burst; wait > 0 {
		why, after = OverLimit, time.Duration(wait)
	}
	last := time.Duration(0)
	for i, q := range t.cfg.Quotas {
		w := m.more.windows[i]
		if left := time.Duration(w.end - t.clock(i, now)); w.used+n > int64(q.N) && left > last {
			why, quota, last = OverQuota, i, left
		}
	}
	return why, quota, max(after, last)
}

// missing returns the time of the tokens that are missing in the burst of m, with those that
// waiters are to take, and n more.
func (t *terms) missing(m *meter, n int64, now moment) int64 {
	if m.more != nil && m.more.line != nil {
		n += m.more.line.tokens
	}
	return max(0, m.full-now.steady) + t.time(n)
}

// time returns the time of n tokens, or that of a century: more than it may ever be.
func (t *terms) time(n int64) int64 {
	if over, ns := bits.Mul64(uint64(n), uint64(t.token)); over == 0 && ns < uint64(3*maxTime) {
		return int64(ns)
	}
	return int64(3 * maxTime)
}

// take takes n tokens of m.
func (l *limit) take(m *meter, t *terms, n int, now moment) hold {
	if n <= 0 {
		return hold{at: len(l.terms) - 1}
	}
	l.did.Spent += int64(n)
	m.full = max(m.full, now.steady) + t.time(int64(n))
	return l.spendQuotas(m, t, n, now)
}

// spendQuotas takes n tokens of the windows of m.
func (l *limit) spendQuotas(m *meter, t *terms, n int, now moment) hold {
	h := hold{n: n, at: len(l.terms) - 1}
	for i, q := range t.cfg.Quotas {
		w := &m.more.windows[i]
		if w.end == 0 {
			w.end = now.steady + int64(q.Every)
		}
		w.used += int64(n)
		h.ends = append(h.ends, w.end)
	}
	return h
}

// giveBack gives n tokens of h back to m.
func (l *limit) giveBack(m *meter, t *terms, h hold, n int, now moment) {
	m.full -= min(t.time(int64(n)), max(0, m.full-now.steady))
	l.refundQuotas(m, h, n)
}

// refundQuotas gives n tokens of h back to the windows of m.
func (l *limit) refundQuotas(m *meter, h hold, n int) {
	for _, w := range l.windowsOf(m, h) {
		w.used -= min(int64(n), w.used)
	}
}

// windowsOf returns the windows of m, by the quotas of the present terms, from which h has
// taken and that are not over.
func (l *limit) windowsOf(m *meter, h hold) map[int]*window {
	if len(h.ends) == 0 {
		return nil
	}
	found := map[int]*window{}
	for i, j := range l.terms[len(l.terms)-1].same(l.terms[h.at]) {
		if w := &m.more.windows[i]; w.end == h.ends[j] {
			found[i] = w
		}
	}
	return found
}

// join puts w at the end of the line of m.
func (l *limit) join(m *meter, w *waiter) *list.Element {
	if m.more == nil {
		m.more = &more{terms: len(l.terms) - 1}
	}
	if m.more.line == nil {
		m.more.line = &line{meter: m}
		if l.lines == nil {
			l.lines = map[*line]bool{}
		}
		l.lines[m.more.line] = true
	}
	l.queued++
	m.more.line.tokens += w.n
	return m.more.line.waiters.PushBack(w)
}

// leave takes w out of the line of m.
func (l *limit) leave(m *meter, w *waiter, place *list.Element) {
	w.left = true
	l.queued--
	m.more.line.tokens -= w.n
	m.more.line.waiters.Remove(place)
}

// serve admits those of the line of m whose tokens are there, and sets the timer for the next
// one.
func (l *limit) serve(m *meter, t *terms, now moment) {
	if m.more == nil || m.more.line == nil {
		return
	}
	line := m.more.line
	for place := line.waiters.Front(); place != nil; place = line.waiters.Front() {
		w := place.Value.(*waiter)
		if w.ctx.Err() != nil { // it takes no token with it
			l.leave(m, w, place)
			continue
		}
		due := m.full + t.time(w.n) - t.burst
		if wait := due - now.steady; wait > 0 && t.token > 0 {
			if line.timer == nil {
				line.timer = time.AfterFunc(time.Duration(wait), func() { l.wake(m) })
			}
			line.timer.Reset(time.Duration(wait))
			return
		}
		m.full = max(m.full, due) + t.time(w.n)
		l.leave(m, w, place)
		w.admitted = true
		close(w.ready)
	}
	if line.timer != nil {
		line.timer.Stop()
	}
	delete(l.lines, line)
	m.more.line = nil
}

// wake admits those who are due.
func (l *limit) wake(m *meter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sync(m)
}

// use makes cfg, which has its defaults, the present Config.
func (l *limit) use(cfg *Config) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.terms = append(l.terms, newTerms(cfg))
	for line := range l.lines {
		l.sync(line.meter)
	}
}

// idle reports whether m is as if nothing had been spent of it.
func (l *limit) idle(m *meter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, now := l.sync(m)
	return m.full <= now.steady && (m.more == nil || m.more.line == nil &&
		!slices.ContainsFunc(m.more.windows, func(w window) bool { return w.used > 0 }))
}

// decision returns what is left of m, for a call that was refused or, if refused is nil,
// admitted.
func (l *limit) decision(m *meter, refused *LimitedError) Decision {
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
		left := max(0, q.N-int(w.used))
		if binds := refused == nil && left < d.Remaining || refused != nil && refused.Quota.window() == t.calendars[i]; !binds {
			continue
		}
		d = Decision{Quota: q, Limit: q.N, Window: q.Every, Remaining: left}
		if t.calendars[i].Per != "" {
			d.Window = time.Duration(t.spans[i].End - t.spans[i].Begin)
		}
		if w.used > 0 {
			d.ResetAfter = time.Duration(w.end - t.clock(i, now))
		}
	}
	d.OK = refused == nil
	if refused != nil {
		d.RetryAfter = refused.After
	}
	return d
}

// totals returns what l has counted. l.mu is held.
func (l *limit) totals() Totals {
	s := l.did
	for i, n := range l.refused {
		if n == 0 {
			continue
		}
		if s.Refusals == nil {
			s.Refusals = map[Reason]int64{}
		}
		s.Refusals[reasons[i]] = n
		s.Refused += n
	}
	return s
}

// PerMinute returns the [Config] Rate of n tokens a minute.
func PerMinute(n float64) float64 { return n / 60 }

// burstOf returns burst, or the default for rate if it is zero.
func burstOf(rate float64, burst int) int { return cmp.Or(burst, int(math.Ceil(rate))) }
