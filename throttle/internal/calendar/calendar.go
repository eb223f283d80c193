// Package calendar tells the days and months of a time zone.
package calendar

import "time"

// A Calendar tells the periods of a time zone: days or, with Months, months.
type Calendar struct {
	Months bool
	Day    int // of the month with which a month begins, 1 to 31; a shorter month has its last day for it
	In     *time.Location
}

// A Span is a period: from Begin on, until before End, both in nanoseconds of Unix time.
type Span struct{ Begin, End int64 }

// Find returns the period of t. Where clocks are set back across midnight, a date comes
// twice. So a period begins at the first moment that has its date or a later one, and
// ends when the next one begins.
func (c *Calendar) Find(t time.Time) Span {
	n := -1 // a month that begins with a day may have begun in the month before
	if !c.Months {
		n = 0
	}
	year, month, day := t.In(c.In).Date()
	begin := func(n int) time.Time {
		if !c.Months {
			return startOf(year, month, day+n, c.In)
		}
		last := time.Date(year, month+time.Month(n)+1, 0, 0, 0, 0, 0, time.UTC) // of the month
		return startOf(last.Year(), last.Month(), min(c.Day, last.Day()), c.In)
	}
	for !begin(n + 1).After(t) { // also where t has the date of the period before, for the second time
		n++
	}
	return Span{begin(n).UnixNano(), begin(n + 1).UnixNano()}
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
