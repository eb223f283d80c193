package calendar_test

import (
	"archive/zip"
	"go/build"
	"path/filepath"
	"strings"
	"testing"
	"time"
	_ "time/tzdata" // for a machine without zones

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// zones returns all time zones of the tz database.
func zones(t *testing.T) (all []*time.Location) {
	files, err := zip.OpenReader(filepath.Join(build.Default.GOROOT, "lib", "time", "zoneinfo.zip"))
	require.NoError(t, err)
	defer files.Close()
	for _, f := range files.File {
		if !strings.HasSuffix(f.Name, "/") {
			in, err := time.LoadLocation(f.Name)
			require.NoError(t, err)
			all = append(all, in)
		}
	}
	require.Greater(t, len(all), 400)
	return all
}

// date returns the date of a moment, as a number that grows.
func date(ns int64, in *time.Location) int {
	y, m, d := time.Unix(0, ns).In(in).Date()
	return 10_000*y + 100*int(m) + d
}

// changes calls f with the moments before and after each change of the clocks between two times.
func changes(from, to int64, in *time.Location, f func(ns int64)) {
	for at := time.Unix(0, from).In(in); ; {
		_, end := at.ZoneBounds()
		if end.IsZero() || end.UnixNano() >= to {
			return
		}
		f(end.UnixNano() - 1)
		f(end.UnixNano())
		at = end
	}
}

// In the year of the last change of its clocks, and some days around it, the days of each zone follow
// each other without a gap, and each begins at the first moment that has its date or a later one. A
// month begins with such a day: the one of which it begins or, in a shorter month, the last.
func TestDaysAndMonthsOfEveryZone(t *testing.T) {
	for _, in := range zones(t) {
		changed, _ := time.Date(2026, 12, 31, 0, 0, 0, 0, in).ZoneBounds()
		if changed.IsZero() {
			changed = time.Date(2026, 1, 1, 0, 0, 0, 0, in)
		}
		is := func(ok bool, s calendar.Span) {
			if !ok {
				require.FailNow(t, "wrong", "%v: %v to %v", in, time.Unix(0, s.Begin).In(in), time.Unix(0, s.End).In(in))
			}
		}
		day := calendar.Window{Per: "day", In: in}
		end := time.Date(changed.Year()+1, 1, 3, 0, 0, 0, 0, time.UTC).UnixNano()
		for s := day.Find(time.Date(changed.Year()-1, 12, 29, 0, 0, 0, 0, time.UTC)); s.Begin < end; {
			of := date(s.Begin, in)
			is(date(s.Begin-1, in) < of && date(s.End-1, in) <= of && date(s.End, in) > of, s)
			changes(s.Begin-int64(27*time.Hour), s.Begin, in, func(ns int64) { is(date(ns, in) < of, s) })
			changes(s.Begin, s.End, in, func(ns int64) { is(date(ns, in) <= of && day.Find(time.Unix(0, ns)) == s, s) })
			next := day.Find(time.Unix(0, s.End))
			is(day.Find(time.Unix(0, s.End-1)) == s && next.Begin == s.End, s)
			s = next
		}
		for _, from := range []int{1, 15, 31} {
			month := calendar.Window{Per: "month", In: in, From: from}
			for s := month.Find(changed); s.Begin < end; {
				of := date(s.Begin, in)
				want := beginning(of, 0, from)
				if want > of { // the day of which it would have begun was left out
					want = beginning(of, -1, from)
				}
				is(date(s.Begin-1, in) < want && day.Find(time.Unix(0, s.Begin)).Begin == s.Begin, s)
				next := month.Find(time.Unix(0, s.End))
				is(month.Find(time.Unix(0, s.End-1)) == s && next.Begin == s.End, s)
				is(s.After == next.End && next.Before == s.Begin, s)
				s = next
			}
		}
	}
}

// beginning returns the date on which the month begins that is n after that of a date.
func beginning(of, n, from int) int {
	last := time.Date(of/10_000, time.Month(of/100%100+n)+1, 0, 0, 0, 0, 0, time.UTC)
	return 10_000*last.Year() + 100*int(last.Month()) + min(from, last.Day())
}

// TestPeriodsThatStartLater checks weeks, and days and months with At, in every zone: periods follow each other without
// a gap, and each starts at the first moment whose civil time is that of its start or later.
func TestPeriodsThatStartLater(t *testing.T) {
	const hour = time.Hour
	for _, in := range zones(t) {
		changed, _ := time.Date(2026, 12, 31, 0, 0, 0, 0, in).ZoneBounds()
		if changed.IsZero() || changed.Year() < 1950 {
			changed = time.Date(2026, 1, 1, 0, 0, 0, 0, in)
		}
		first := time.Date(changed.Year()-1, 12, 1, 0, 0, 0, 0, time.UTC)
		for first.Weekday() != time.Monday {
			first = first.AddDate(0, 0, 1)
		}
		for _, w := range []calendar.Window{
			{Per: "week"}, {Per: "week", At: 54 * hour}, {Per: "week", At: 7*24*hour - 1},
			{Per: "day", At: 13*hour + 40*time.Minute}, {Per: "day", At: 2*hour + 30*time.Minute}, {Per: "day", At: 24*hour - 1},
			{Per: "month", At: 27 * 24 * hour}, {Per: "month", From: 31, At: 28*24*hour - 1}, {Per: "month", From: 15,
				At: 3 * hour},
		} {
			w.In = in
			w = w.Filled()
			civil := first // of the start of a period, without At
			next := func() {
				switch w.Per {
				case "day":
					civil = civil.AddDate(0, 0, 1)
				case "week":
					civil = civil.AddDate(0, 0, 7)
				default:
					last := time.Date(civil.Year(), civil.Month()+2, 0, 0, 0, 0, 0, time.UTC)
					civil = last.AddDate(0, 0, min(w.From, last.Day())-last.Day())
				}
			}
			if w.Per == "month" {
				civil = time.Date(first.Year(), 11, 1, 0, 0, 0, 0, time.UTC)
				next()
			}
			at := func(ns int64) time.Time { // the civil time of a moment, as a time of UTC
				local := time.Unix(0, ns).In(in)
				_, offset := local.Zone()
				return time.Unix(0, ns).UTC().Add(time.Duration(offset) * time.Second)
			}
			s := w.Find(civil.Add(w.At).Add(26 * hour)) // its offset is not known: it may be the next one
			for at(s.Begin).After(civil.Add(w.At).Add(26 * hour)) {
				s = w.Find(time.Unix(0, s.Begin-1))
			}
			for !at(s.Begin).Before(civil.Add(w.At).Add(36*hour)) || at(s.End).Before(civil.Add(w.At)) {
				next()
			}
			for civil.Add(w.At).Before(at(s.Begin).Add(-3 * hour)) {
				next()
			}
			for range 60 {
				want := civil.Add(w.At)
				if at(s.Begin).Before(want) || !at(s.Begin-1).Before(want) {
					require.FailNow(t, "wrong start", "%v %+v: %v, want %v", in, w, at(s.Begin), want)
				}
				following := w.Find(time.Unix(0, s.End))
				if w.Find(time.Unix(0, s.Begin)) != s || w.Find(time.Unix(0, s.End-1)) != s ||
					following.Begin != s.End || s.After != following.End || following.Before != s.Begin {
					require.FailNow(t, "a gap", "%v %+v: %v", in, w, at(s.Begin))
				}
				s = following
				next()
			}
		}
	}
}
