// Package calendar finds the windows of quotas: days, weeks and months in a time zone.
package calendar

import (
	"cmp"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// A Window has the fields of a throttle.Window.
type Window struct {
	Every time.Duration
	Per   string // "day", "week" or "month"; empty if Every is set
	In    *time.Location
	From  int           // the day on which a month starts, 1 to 31; a shorter month starts on its last day
	At    time.Duration // start of a period, as the time since midnight of its first day that clocks in In show
}

// longestAt contains the length of the shortest period of each kind. At must be less than this length.
var longestAt = map[string]time.Duration{"day": day, "week": 7 * day, "month": 28 * day}

const day = 24 * time.Hour

// MaxTime is the longest window.
const MaxTime = 36 * 365 * 24 * time.Hour

// Check records the invalid fields of w. at is the prefix of their names. Check builds texts only if a field is
// invalid, because package fleet calls Check for each call.
func (w Window) Check(f *invalid.Fields, at string) {
	long := w.Every == 0 || w.Every >= time.Millisecond && w.Every <= MaxTime
	known := w.Per == "" || longestAt[w.Per] > 0
	one := (w.Every == 0) != (w.Per == "")
	in := w.Per != "" || w.In == nil
	from := w.From == 0 || w.Per == "month" && w.From >= 1 && w.From <= 31
	early := w.At == 0 || w.At > 0 && w.At < longestAt[w.Per]
	if long && known && one && in && from && early {
		return
	}
	f.Need(long, at+"Every", w.Every, "a millisecond to 36 years")
	f.Need(known, at+"Per", strconv.Quote(w.Per), `"day", "week" or "month"`)
	f.Need(one, at+"Per", strconv.Quote(w.Per), "set where Every is not, and the other way round")
	f.Need(in, at+"In", w.In, "nil where Per is not set")
	f.Need(from, at+"From", w.From, "0, or 1 to 31 where Per is Month")
	f.Need(early, at+"At", w.At, "0, or less than a day, a week or 28 days, as Per is Day, Week or Month")
}

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

// Same reports whether w and other have the same windows. Both must be filled. The same time zone may have two
// pointers, if it was loaded twice. Therefore Same compares zones by their names and by the starts of the periods
// around t.
func (w Window) Same(other Window, t time.Time) bool {
	if w.Per == "" || w.In.String() != other.In.String() {
		return w == other
	}
	same := w
	same.In = other.In
	return same == other && w.Find(t) == other.Find(t)
}

// A Span is a period. The period contains Begin, but not End. Before is the start of the previous period, and After
// is the end of the next period. All times are in nanoseconds of Unix time.
type Span struct{ Before, Begin, End, After int64 }

// Find returns the period that contains t. w must be filled. If clocks are set back, the civil time at which a period
// starts may occur twice. Therefore a period starts at the first moment at which clocks show this civil time or a
// later time. It ends when the next period starts.
func (w Window) Find(t time.Time) Span {
	n := 0
	for w.start(t, n) > t.UnixNano() {
		n--
	}
	for w.start(t, n+1) <= t.UnixNano() {
		n++
	}
	return Span{w.start(t, n-1), w.start(t, n), w.start(t, n+1), w.start(t, n+2)}
}

// start returns the start of the period that is n periods after the period of t's date. n may be negative. The period
// of t's date may start later than t.
func (w Window) start(t time.Time, n int) int64 {
	local := t.In(w.In)
	year, month, day := local.Date()
	civil := time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
	switch w.Per {
	case "day":
		civil = civil.AddDate(0, 0, n)
	case "week":
		sinceMonday := (int(civil.Weekday()) + 6) % 7
		civil = civil.AddDate(0, 0, 7*n-sinceMonday)
	default:
		last := time.Date(year, month+time.Month(n)+1, 0, 0, 0, 0, 0, time.UTC) // the last day of the month
		civil = last.AddDate(0, 0, min(w.From, last.Day())-last.Day())
	}
	return firstAt(civil.Add(w.At), w.In)
}

// firstAt returns the first moment at which clocks in a time zone show civil or a later time. civil is the civil
// time, as a time in UTC. firstAt does not use [time.Date], which does not specify its result for a civil time that
// does not exist or that occurs twice.
func firstAt(civil time.Time, in *time.Location) int64 {
	for t := civil.Add(-26 * time.Hour).In(in); ; { // no zone is 26 hours ahead of UTC
		_, offset := t.Zone()
		start := civil.Add(-time.Duration(offset) * time.Second)
		if start.Before(t) { // the clocks were set forward over start
			start = t
		}
		_, end := t.ZoneBounds()
		if end.IsZero() || start.Before(end) {
			return start.UnixNano()
		}
		t = end
	}
}
