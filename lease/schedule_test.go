package lease_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
)

// table runs Next from several instants. Times of the table are in the location of the schedule.
func table(t *testing.T, s lease.Schedule, zone string, rows [][2]string) {
	t.Helper()
	location, err := time.LoadLocation(zone)
	require.NoError(t, err)
	for _, row := range rows {
		from, err := time.Parse("2006-01-02 15:04:05 -07", row[0])
		require.NoError(t, err)
		got := s.Next(from).In(location)
		require.Equal(t, row[1], got.Format("2006-01-02 15:04:05 -07"), "%s after %s", zone, row[0])
	}
}

func daily(t *testing.T, hour, minute int, zone string) lease.Schedule {
	t.Helper()
	location, err := time.LoadLocation(zone)
	require.NoError(t, err)
	return lease.Daily(hour, minute, location)
}

func TestDailyOverChangesOfClocks(t *testing.T) {
	const berlin, apia, toronto, beirut = "Europe/Berlin", "Pacific/Apia", "America/Toronto", "Asia/Beirut"
	table(t, daily(t, 2, 0, berlin), berlin, [][2]string{
		{"2026-01-05 01:59:59 +01", "2026-01-05 02:00:00 +01"},
		{"2026-01-05 02:00:00 +01", "2026-01-06 02:00:00 +01"},
		{"2026-03-28 12:00:00 +01", "2026-03-29 03:00:00 +02"}, // forward at 2
		{"2026-03-29 03:00:00 +02", "2026-03-30 02:00:00 +02"},
		{"2026-10-24 12:00:00 +02", "2026-10-25 02:00:00 +02"}, // back at 3
		{"2026-10-25 02:00:00 +02", "2026-10-26 02:00:00 +01"},
		{"2026-10-25 02:00:00 +01", "2026-10-26 02:00:00 +01"},
	})
	table(t, daily(t, 2, 30, berlin), berlin, [][2]string{
		{"2026-03-29 01:59:59 +01", "2026-03-29 03:00:00 +02"},
		{"2026-03-29 03:00:00 +02", "2026-03-30 02:30:00 +02"},
		{"2026-10-25 02:29:59 +02", "2026-10-25 02:30:00 +02"},
		{"2026-10-25 02:30:00 +02", "2026-10-26 02:30:00 +01"},
		{"2026-10-25 02:29:59 +01", "2026-10-26 02:30:00 +01"},
	})
	table(t, daily(t, 3, 0, berlin), berlin, [][2]string{
		{"2026-03-29 01:59:59 +01", "2026-03-29 03:00:00 +02"},
		{"2026-10-25 02:59:59 +02", "2026-10-25 03:00:00 +01"},
	})
	table(t, daily(t, 0, 0, beirut), beirut, [][2]string{ // forward at midnight
		{"2026-03-28 12:00:00 +02", "2026-03-29 01:00:00 +03"},
		{"2026-03-29 01:00:00 +03", "2026-03-30 00:00:00 +03"},
	})
	table(t, daily(t, 23, 45, toronto), toronto, [][2]string{ // 23:30 became 00:30 of the next day
		{"1919-03-30 12:00:00 -05", "1919-03-31 00:30:00 -04"},
		{"1919-03-31 00:30:00 -04", "1919-03-31 23:45:00 -04"},
	})
	table(t, daily(t, 10, 0, apia), apia, [][2]string{ // there was no December 30
		{"2011-12-29 09:00:00 -10", "2011-12-29 10:00:00 -10"},
		{"2011-12-29 10:00:00 -10", "2011-12-31 10:00:00 +14"},
	})
}

// An independent definition, minute by minute: on each day, the first minute whose time of day is not before the one
// of the schedule, or the first minute after the day.
func TestDailyOfManyZones(t *testing.T) {
	since, checked := 1995, 0
	if testing.Short() {
		since = 2023
	}
	for _, zone := range []string{
		"UTC", "Europe/Berlin", "America/New_York", "America/Havana", "America/Sao_Paulo", "Asia/Beirut", "Asia/Tehran",
		"Africa/Casablanca", "Australia/Lord_Howe", "Pacific/Apia", "America/Scoresbysund", "Atlantic/Azores",
	} {
		location, err := time.LoadLocation(zone)
		require.NoError(t, err)
		_, change := time.Date(since, 1, 1, 12, 0, 0, 0, location).ZoneBounds()
		for ; !change.IsZero() && change.Year() < 2027; _, change = change.ZoneBounds() {
			hour, minute := rand.IntN(24), rand.IntN(60)
			if rand.IntN(2) == 0 {
				hour = (change.Hour() + 23 + rand.IntN(3)) % 24
			}
			start := change.AddDate(0, 0, -2)
			start = time.Date(start.Year(), start.Month(), start.Day(), 12, 0, 0, 0, location)
			want, got := slowDaily(start, hour, minute), []time.Time(nil)
			s := lease.Daily(hour, minute, location)
			for at := s.Next(start); at.Before(start.Add(96 * time.Hour)); at = s.Next(at) {
				got = append(got, at.In(location))
			}
			require.Equal(t, fmt.Sprint(want), fmt.Sprint(got), "%s from %v at %02d:%02d", zone, start, hour, minute)
			checked++
		}
	}
	require.Greater(t, checked, 20)
}

// slowDaily returns the instants of Daily in the 96 hours after start, which is a noon.
func slowDaily(start time.Time, hour, minute int) (want []time.Time) {
	due, day := hour < 12, start.YearDay()
	for at := start; at.Before(start.Add(96 * time.Hour)); at = at.Add(time.Minute) {
		if at.YearDay() != day && day != at.YearDay()+1 { // not back across midnight
			if !due {
				want = append(want, at)
			}
			due, day = false, at.YearDay()
		}
		if !due && at.YearDay() == day && at.Hour()*60+at.Minute() >= hour*60+minute {
			due = true
			want = append(want, at)
		}
	}
	if len(want) > 0 && want[0].Equal(start) {
		return want[1:]
	}
	return want
}

func TestIntervalIsAligned(t *testing.T) {
	table(t, lease.Interval(time.Hour), "UTC", [][2]string{
		{"2026-01-05 01:59:59 +00", "2026-01-05 02:00:00 +00"},
		{"2026-01-05 02:00:00 +00", "2026-01-05 03:00:00 +00"},
		{"2026-01-05 02:00:01 +05", "2026-01-04 22:00:00 +00"},
	})
	table(t, lease.Interval(7*time.Minute), "UTC", [][2]string{
		{"0001-01-01 00:00:00 +00", "0001-01-01 00:07:00 +00"},
	})
}

func TestSchedulesThatCannotBe(t *testing.T) {
	require.PanicsWithValue(t, "lease: interval is 0s: must be 1ms or more", func() { lease.Interval(0) })
	require.Panics(t, func() { lease.Interval(time.Microsecond) })
	require.Panics(t, func() { lease.Interval(-time.Hour) })
	require.NotPanics(t, func() { lease.Interval(time.Millisecond) })
	require.PanicsWithValue(t, "lease: location is nil: must be set", func() { lease.Daily(2, 0, nil) })
	for _, clock := range [][2]int{{24, 0}, {-1, 0}, {0, 60}, {0, -1}} {
		require.Panics(t, func() { lease.Daily(clock[0], clock[1], time.UTC) })
	}
}

// next is a Schedule from a function, as robfig/cron's @every is.
type next func(time.Time) time.Time

func (f next) Next(t time.Time) time.Time { return f(t) }

func TestDueRun(t *testing.T) {
	at := func(d time.Duration) time.Time { return time.UnixMilli(1_000_000_000_000).Add(d) }
	hours := lease.Interval(time.Hour)
	base := hours.Next(at(0)).Sub(at(0)) // of the first full hour
	never := next(func(time.Time) time.Time { return time.Time{} })
	fine := next(func(t time.Time) time.Time { return t.Truncate(100 * time.Microsecond).Add(100 * time.Microsecond) })
	for _, test := range []struct {
		name      string
		s         lease.Schedule
		last, now time.Duration
		run, next time.Duration // run 0: none
	}{
		{"before the first", hours, 0, base - 1, 0, base},
		{"when it is due", hours, 0, base, base, base + time.Hour},
		{"a little late", hours, 0, base + time.Second, base, base + time.Hour},
		{"after one", hours, base, base + time.Second, 0, base + time.Hour},
		{"two have passed", hours, 0, base + time.Hour, base + time.Hour, base + 2*time.Hour},
		{"years have passed", hours, 0, base + 9999*time.Hour + 1, base + 9999*time.Hour, base + 10_000*time.Hour},
		{"the last is ahead", hours, base + time.Hour, base, 0, base + 2*time.Hour},
		{"less than a millisecond", fine, 0, time.Millisecond / 2, 0, time.Millisecond},
		{"some of a millisecond", fine, 0, 3 * time.Millisecond, 3 * time.Millisecond, 4 * time.Millisecond},
		{"never", never, 0, time.Hour, 0, 1 << 61},
	} {
		run, next, err := lease.DueRun(test.s, at(test.last), at(test.now))
		require.NoError(t, err, test.name)
		require.Equal(t, test.run == 0, run.IsZero(), test.name)
		if test.run != 0 {
			require.True(t, at(test.run).Equal(run), "%s: %v, not %v", test.name, run, at(test.run))
		}
		require.True(t, at(test.next).Equal(next), "%s: %v, not %v", test.name, next, at(test.next))
	}
	for _, wrong := range []time.Duration{0, -1, -time.Hour} {
		_, _, err := lease.DueRun(next(func(t time.Time) time.Time { return t.Add(wrong) }), at(0), at(1))
		require.ErrorContains(t, err, "Schedule's Next must return a later instant")
	}
	starts := next(func(t time.Time) time.Time { // at any instant but the first
		if t.Equal(at(0)) {
			return t
		}
		return t.Add(time.Hour)
	})
	_, _, err := lease.DueRun(starts, at(0), at(24*time.Hour))
	require.ErrorContains(t, err, "must return a later instant")
	halts := next(func(t time.Time) time.Time { // at any instant but the first
		if t.Equal(at(0)) {
			return at(time.Hour)
		}
		return t
	})
	for _, late := range []time.Duration{time.Hour, 3 * time.Hour} {
		_, _, err := lease.DueRun(halts, at(0), at(late))
		require.ErrorContains(t, err, "must return a later instant")
	}
	// A schedule of milliseconds that catches up with a year calls Next some times, not 31 billion times.
	calls := 0
	_, _, err = lease.DueRun(next(func(t time.Time) time.Time { calls++; return t.Add(time.Millisecond) }),
		at(0), at(365*24*time.Hour))
	require.NoError(t, err)
	require.Less(t, calls, 2000)
}
