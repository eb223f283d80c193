// Package calendar tells the windows of quotas: the days and months of a time zone.
package calendar

import (
	"cmp"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// A Window is what a throttle.Quota says of its windows: all but N.
type Window struct {
	Every time.Duration
	Per   string // "day" or "month"; empty if Every is set
	In    *time.Location
	From  int // the day of the month with which a month begins, 1 to 31; a shorter month has its last day for it
}

// Check records what is wrong with the fields, whose names follow at. It makes texts only if something
// is, since a fleet checks each call.
func (w Window) Check(f *invalid.Fields, at string) {
	long := w.Every == 0 || w.Every >= time.Millisecond && w.Every <= MaxTime
	known := w.Per == "" || w.Per == "day" || w.Per == "month"
	one := (w.Every == 0) != (w.Per == "")
	in := w.Per != "" || w.In == nil
	from := w.From == 0 || w.Per == "month" && w.From >= 1 && w.From <= 31
	if long && known && one && in && from {
		return
	}
	f.Need(long, at+"Every", w.Every, "a millisecond to 36 years")
	f.Need(known, at+"Per", strconv.Quote(w.Per), `"day" or "month"`)
	f.Need(one, at+"Per", strconv.Quote(w.Per), "set where Every is not, and the other way round")
	f.Need(in, at+"In", w.In, "nil where Per is not set")
	f.Need(from, at+"From", w.From, "0, or 1 to 31 where Per is Month")
}

// MaxTime is the longest window.
const MaxTime = 36 * 365 * 24 * time.Hour

// Filled returns w with its defaults filled in.
func (w Window) Filled() Window {
	if w.Per != "" {
		w.In = cmp.Or(w.In, time.UTC)
	}
	if w.Per == "month" {
		w.From = cmp.Or(w.From, 1)
	}
	return w
}

// Same reports whether w and other, which are filled, have the same windows. A time zone that is loaded
// again has another pointer, and is found by its name and by when the periods around t begin.
func (w Window) Same(other Window, t time.Time) bool {
	if w.Per == "" || w.In.String() != other.In.String() {
		return w == other
	}
	same := w
	same.In = other.In
	return same == other && w.Find(t) == other.Find(t)
}

// A Span is a period: from Begin on, until before End. Before is the beginning of the period before,
// and After the end of that which follows. All are in nanoseconds of Unix time.
type Span struct{ Before, Begin, End, After int64 }

// Find returns the day or the month of t, in a w that is filled. Where clocks are set back across
// midnight, a date comes twice. So a period begins at the first moment that has its date or a later
// one, and ends when the next one begins.
func (w Window) Find(t time.Time) Span {
	year, month, day := t.In(w.In).Date()
	begin := func(n int) int64 {
		if w.Per == "day" {
			return startOf(time.Date(year, month, day+n, 0, 0, 0, 0, time.UTC), w.In)
		}
		last := time.Date(year, month+time.Month(n)+1, 0, 0, 0, 0, 0, time.UTC) // of the month
		return startOf(last.AddDate(0, 0, min(w.From, last.Day())-last.Day()), w.In)
	}
	n := -1 // a month that begins with a day may have begun in the month before

	// Also where t has the date of the period before, for the second time.
	for begin(n+1) <= t.UnixNano() {
		n++
	}
	return Span{begin(n - 1), begin(n), begin(n + 1), begin(n + 2)}
}

// startOf returns the first moment in a time zone that has the date of a midnight of UTC or a later
// one. [time.Date] does not say which moment it returns for a midnight that does not exist or comes
// twice.
func startOf(midnight time.Time, in *time.Location) int64 {
	for t := midnight.Add(-26 * time.Hour).In(in); ; { // no zone is that far ahead of UTC
		_, offset := t.Zone()
		start := midnight.Add(-time.Duration(offset) * time.Second)
		if start.Before(t) { // the clocks were set forward across midnight
			start = t
		}
		_, end := t.ZoneBounds()
		if end.IsZero() || start.Before(end) {
			return start.UnixNano()
		}
		t = end
	}
}
