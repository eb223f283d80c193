package lease

import (
	"fmt"
	"time"
)

// A Schedule determines when the runs of [Candidate.Every] are due. The schedules of github.com/robfig/cron implement
// Schedule. All processes should use the same schedule.
type Schedule interface {
	// Next returns the first instant after t, or the zero time if there is none. The argument t is in [time.Local].
	Next(t time.Time) time.Time
}

// Interval returns a schedule whose instants are the multiples of d since the zero time. For example, with
// Interval(time.Hour), a run is due at the start of each hour of UTC. The instants do not depend on the duration of
// runs. Interval panics if d is less than a millisecond.
func Interval(d time.Duration) Schedule {
	if d < time.Millisecond {
		panic(fmt.Sprintf("lease: interval is %v: must be 1ms or more", d))
	}
	return interval(d)
}

type interval time.Duration

// Next implements [Schedule].
func (d interval) Next(t time.Time) time.Time {
	return t.Truncate(time.Duration(d)).Add(time.Duration(d))
}

// Daily returns a schedule with one instant per day, at a time of day in the time zone location. If clocks are set
// forward and skip the time of day, the run is due when the clocks are set forward. If the time of day occurs twice
// because clocks are set back, the run is due the first time. Daily panics if hour is outside 0 to 23, minute is
// outside 0 to 59, or location is nil.
func Daily(hour, minute int, location *time.Location) Schedule {
	switch {
	case hour < 0 || hour > 23 || minute < 0 || minute > 59:
		panic(fmt.Sprintf("lease: time of day is %02d:%02d: must be from 00:00 to 23:59", hour, minute))
	case location == nil:
		panic("lease: location is nil: must be set")
	}
	return daily{hour, minute, location}
}

type daily struct {
	hour, minute int
	location     *time.Location
}

// Next implements [Schedule].
func (s daily) Next(t time.Time) time.Time {
	year, month, day := t.In(s.location).Date()
	for ; ; day++ {
		if at, ok := s.on(year, month, day); ok && at.After(t) {
			return at
		}
	}
}

// on returns the schedule's instant on a day. ok is false if the day does not exist, because clocks were set forward by
// a day.
func (s daily) on(year int, month time.Month, day int) (at time.Time, ok bool) {
	at = time.Date(year, month, day, s.hour, s.minute, 0, 0, s.location)
	want := time.Date(year, month, day, s.hour, s.minute, 0, 0, time.UTC) // the time on the wall clock, as a time in UTC
	start, end := at.ZoneBounds()
	switch shown := wall(at); {
	case shown.Equal(want):
		// The same time may have occurred before start if clocks were set back at start.
		if first := at.Add(wall(start).Sub(wall(start.Add(-1))) - 1); first.Before(start) {
			at = first
		}
		return at, true
	case shown.After(want): // the time does not exist, and time.Date has returned an instant after the gap
		at = start
	default:
		at = end
	}
	day = want.YearDay()
	return at, at.YearDay() == day || at.Add(-1).YearDay() == day
}

// wall returns t's date and time of day in its time zone, as a time in UTC.
func wall(t time.Time) time.Time {
	_, offset := t.Zone()
	return t.UTC().Add(time.Duration(offset) * time.Second)
}
