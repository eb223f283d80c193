package throttle

import (
	"sync/atomic"
	"time"
)

// A calendar tells the periods of a time zone.
type calendar struct {
	per  Period
	in   *time.Location
	last atomic.Pointer[span] // that was asked for
}

// A span is a period: from begin on, until before end, both in nanoseconds of Unix time.
type span struct{ begin, end int64 }

// at returns the period of a time.
func (c *calendar) at(unixNano int64) span {
	if s := c.last.Load(); s != nil && s.begin <= unixNano && unixNano < s.end {
		return *s
	}
	s := c.find(time.Unix(0, unixNano))
	c.last.Store(&s)
	return s
}

// find returns the period of t. Where clocks are set back across midnight, a date comes
// twice. So a period begins at the first moment that has its date or a later one, and
// ends when the next one begins.
func (c *calendar) find(t time.Time) span {
	year, month, day := t.In(c.in).Date()
	switch c.per {
	case Week:
		weekday := time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Weekday()
		day -= (int(weekday) + 6) % 7
	case Month:
		day = 1
	case Year:
		month, day = time.January, 1
	}
	step := func(n int) time.Time {
		switch c.per {
		case Week:
			return startOf(year, month, day+7*n, c.in)
		case Month:
			return startOf(year, month+time.Month(n), day, c.in)
		case Year:
			return startOf(year+n, month, day, c.in)
		}
		return startOf(year, month, day+n, c.in)
	}
	n := 1
	for !step(n).After(t) { // t has the date of the period before, for the second time
		n++
	}
	return span{step(n - 1).UnixNano(), step(n).UnixNano()}
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
