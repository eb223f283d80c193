package bucket

import (
	"sync/atomic"
	"time"
)

// A Calendar tells the periods of a time zone.
type Calendar struct {
	Per  string // "day", "week", "month" or "year"
	In   *time.Location
	last atomic.Pointer[Span] // that was asked for
}

// A Span is a period: from Begin on, until before End, both in nanoseconds of Unix time.
type Span struct{ Begin, End int64 }

// At returns the period of a time.
func (c *Calendar) At(unixNano int64) Span {
	if s := c.last.Load(); s != nil && s.Begin <= unixNano && unixNano < s.End {
		return *s
	}
	s := c.Find(time.Unix(0, unixNano))
	c.last.Store(&s)
	return s
}

// Find returns the period of t. Where clocks are set back across midnight, a date comes
// twice. So a period begins at the first moment that has its date or a later one, and
// ends when the next one begins.
func (c *Calendar) Find(t time.Time) Span {
	year, month, day := t.In(c.In).Date()
	switch c.Per {
	case "week":
		weekday := time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Weekday()
		day -= (int(weekday) + 6) % 7
	case "month":
		day = 1
	case "year":
		month, day = time.January, 1
	}
	step := func(n int) time.Time {
		switch c.Per {
		case "week":
			return startOf(year, month, day+7*n, c.In)
		case "month":
			return startOf(year, month+time.Month(n), day, c.In)
		case "year":
			return startOf(year+n, month, day, c.In)
		}
		return startOf(year, month, day+n, c.In)
	}
	n := 1
	for !step(n).After(t) { // t has the date of the period before, for the second time
		n++
	}
	return Span{step(n - 1).UnixNano(), step(n).UnixNano()}
}

// startOf returns the first moment in a time zone that has a date or a later one.
// [time.Date] does not say which moment it returns for a midnight that does not exist or
// comes twice.
func startOf(year int, month time.Month, day int, in *time.Location) time.Time {
	midnight := time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
	for t := midnight.Add(-26 * time.Hour).In(in); ; { // no zone is that far ahead of UTC
		_, offset := t.Zone()
		start := midnight.Add(-time.Duration(offset) * time.Second)
		if start.Before(t) { // the clocks were set forward across midnight
			start = t
		}
		_, end := t.ZoneBounds()
		if end.IsZero() || start.Before(end) {
			return start
		}
		t = end
	}
}
