package throttle

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

// A moment is a time by both clocks, in nanoseconds: rates and windows of a fixed length go
// by the one that nobody sets, and windows of a calendar by the other.
type moment struct {
	steady int64 // since the program began
	wall   int64 // since 1970
}

var began = time.Now()

// steady reads the clock that nobody sets.
func steady() int64 { return int64(time.Since(began)) }

// present reads both clocks.
func present() moment {
	now := time.Now()
	return moment{int64(now.Sub(began)), now.UnixNano()}
}

// A window is what has been spent of a quota.
type window struct {
	used int64 // tokens
	end  int64 // on the clock of the quota; 0 before the first token
}

// A quotaTerms is a quota of terms.
type quotaTerms struct {
	Quota
	room     []int            // in tokens, by level
	calendar *bucket.Calendar // nil for a quota that has Every
}

func newQuotaTerms(of []Quota, levels int, reserve []float64) []quotaTerms {
	var quotas []quotaTerms
	for _, q := range of {
		t := quotaTerms{Quota: q}
		if q.Per != "" {
			t.calendar = &bucket.Calendar{Per: string(q.Per), In: q.In}
		}
		for level := range levels {
			t.room = append(t.room, roomOf(q.N, reserve, level))
		}
		quotas = append(quotas, t)
	}
	return quotas
}

// clock returns now on the clock of the quota.
func (q *quotaTerms) clock(now moment) int64 {
	if q.calendar != nil {
		return now.wall
	}
	return now.steady
}

// at returns w as it is now: empty if it has ended. Its end is that of the present
// period or, if nothing has been spent of a window with a fixed length, 0. If the time
// zone or the clock has changed, it keeps its tokens until the end of the present period.
func (q *quotaTerms) at(w window, now moment) window {
	t := q.clock(now)
	if w.end <= t || w.used == 0 {
		w = window{}
	}
	if q.calendar != nil {
		w.end = q.calendar.At(t).End
	}
	return w
}

// spend adds n tokens to w, which is as at returns it.
func (q *quotaTerms) spend(w window, now moment, n int) window {
	if w.end == 0 {
		w.end = now.steady + int64(q.Every)
	}
	w.used += int64(n)
	return w
}

// length returns the length of the present window.
func (q *quotaTerms) length(now moment) time.Duration {
	if q.calendar == nil {
		return q.Every
	}
	s := q.calendar.At(now.wall)
	return time.Duration(s.End - s.Begin)
}

// A bound is what a Decision tells about the window that binds, for limits with quotas.
type bound struct {
	Decision
	why Reason
}

// refuse makes e the error of the call.
func (b *bound) refuse(e *LimitedError) {
	e.Reason, e.Limit, e.Quota, e.After = b.why, b.Limit, b.Quota, b.RetryAfter
}

// takeAll takes n tokens from the rate and from all quotas if they are there in each of
// them. If peek is true it only says whether they are.
func (m *measure) takeAll(windows []window, now moment, n, level int, peek bool) *bound {
	b := &bound{}
	wait := m.wait(n, level) // of the rate
	if wait > 0 {
		b.why = OverLimit
	}
	last, binding := time.Duration(0), -1 // -1 is the rate
	for i := range m.quotas {
		q := &m.quotas[i]
		windows[i] = q.at(windows[i], now)
		if n <= 0 || windows[i].used+int64(n) <= int64(q.room[level]) {
			continue
		}
		b.why = OverQuota
		if left := time.Duration(windows[i].end - q.clock(now)); left > last {
			last, binding = left, i
		}
	}
	ok := b.why == ""
	switch {
	case m.cannot(n, level):
		b.why, last, ok = TooCostly, never, false
		binding = m.costliest(n, level)
	case ok && !peek:
		m.tat = m.pay(m.tat, n)
		for i := range m.quotas {
			windows[i] = m.quotas[i].spend(windows[i], now, n)
		}
	}
	if ok {
		binding = m.tightest(windows, level)
	}
	b.Decision = m.about(binding, windows, now, level)
	b.OK = ok
	if !ok {
		b.RetryAfter = max(wait, last)
	}
	return b
}

// costliest returns the quota that n tokens can never be taken from, or -1 for the burst.
func (t *terms) costliest(n, level int) int {
	return slices.IndexFunc(t.quotas, func(q quotaTerms) bool { return n > q.room[level] })
}

// tightest returns the quota that has the fewest tokens left, or -1 for the rate.
func (m *measure) tightest(windows []window, level int) int {
	least, binding := m.remaining(level), -1
	for i := range m.quotas {
		if left := m.quotas[i].remaining(windows[i], level); left < least || m.rate.IsUnlimited() && binding < 0 {
			least, binding = left, i
		}
	}
	return binding
}

func (q *quotaTerms) remaining(w window, level int) int {
	return int(max(0, int64(q.room[level])-w.used))
}

// about returns a Decision about one quota, or about the rate if quota is -1.
func (m *measure) about(quota int, windows []window, now moment, level int) Decision {
	if quota < 0 {
		return Decision{
			Limit: m.burst, Window: windowOf(m.cfg.Rate, m.burst),
			Remaining: m.remaining(level), ResetAfter: m.until(m.tat),
		}
	}
	q, w := &m.quotas[quota], windows[quota]
	d := Decision{Limit: q.N, Window: q.length(now), Remaining: q.remaining(w, level), Quota: q.Quota}
	if w.used > 0 {
		d.ResetAfter = time.Duration(w.end - q.clock(now))
	}
	return d
}

// spentOf reports whether tokens of a window have been spent that was not over then.
func (t *terms) spentOf(windows []window, then moment) bool {
	for i, w := range windows {
		if w.used > 0 && w.end > t.quotas[i].clock(then) {
			return true
		}
	}
	return false
}

// refund gives n tokens back to the windows, at most as many as were spent in each.
func (t *terms) refund(windows []window, n int) {
	for i := range windows {
		windows[i].used -= min(int64(n), windows[i].used)
	}
}

// inherit returns, for each quota of t, the index of the quota of last whose windows it
// takes over, or -1: the one with the same window.
func (t *terms) inherit(last *terms) []int {
	from := make([]int, len(t.quotas))
	for i := range t.quotas {
		from[i] = slices.IndexFunc(last.quotas, func(q quotaTerms) bool { return q.window() == t.quotas[i].window() })
	}
	return from
}

// pick returns the values of the indices in from, zero for -1.
func pick[T any](values []T, from []int) []T {
	if len(from) == 0 {
		return nil
	}
	picked := make([]T, len(from))
	for i, j := range from {
		if j >= 0 {
			picked[i] = values[j]
		}
	}
	return picked
}

// times returns the length of the windows in microseconds or, of a calendar, the times
// at which the last period, this one and the next begin, and at which that ends.
func (q *quotaTerms) times(now int64) string {
	if q.calendar == nil {
		return strconv.FormatInt(q.Every.Microseconds(), 10)
	}
	this := q.calendar.At(now)
	last, next := q.calendar.Find(time.Unix(0, this.Begin-1)), q.calendar.Find(time.Unix(0, this.End))
	return fmt.Sprintf("%d %d %d %d", last.Begin/1000, this.Begin/1000, this.End/1000, next.End/1000)
}
