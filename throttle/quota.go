package throttle

import (
	"fmt"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// A Quota allows N tokens in each window of time: in each day of a calendar, or in each
// hour that begins with the first token after the last one has ended. Unlike a rate it
// gives nothing back in the middle of a window: a client that has spent it all waits for
// the next one.
type Quota struct {
	// N is how many tokens a window allows: 1 to 1e15.
	N int

	// Every is the length of a window that begins with the first token spent after the
	// last one has ended: a millisecond to 36 years. So N tokens at the end of one window
	// and N at the beginning of the next are the most that any time as long as Every can
	// see. Set Every or Per.
	Every time.Duration

	// Per is the period of the calendar that is a window: [Day] or [Month]. It begins and
	// ends at the same time for all keys.
	Per Period

	// In is the time zone of Per's calendar. Nil means UTC. A day in which the clocks
	// change has 23 or 25 hours.
	In *time.Location

	// From is the day of the month with which a [Month] begins, 1 to 31. Zero means 1. In a
	// month that has no such day, it is the last one. [Period.From] takes it from a date.
	From int
}

// A Period is a period of the calendar.
type Period string

// The periods. Each begins at midnight.
const (
	Day   Period = "day"
	Month Period = "month"
)

// From returns the windows of p in the time zone of date, such as the months that a
// customer pays for: those of [Month] begin with the day of date. N is not set.
func (p Period) From(date time.Time) Quota {
	q := Quota{Per: p, In: date.Location()}
	if p == Month {
		q.From = date.Day()
	}
	return q
}

const (
	maxQuotas = 8
	maxQuota  = 1_000_000_000_000_000
	maxTime   = calendar.MaxTime
)

func checkQuotas(f *invalid.Fields, quotas []Quota) {
	f.Need(len(quotas) <= maxQuotas, "Quotas", fmt.Sprintf("%d long", len(quotas)),
		fmt.Sprintf("at most %d long", maxQuotas))
	for i, q := range quotas {
		at := fmt.Sprintf("Quotas[%d].", i)
		f.Need(q.N >= 1 && int64(q.N) <= maxQuota, at+"N", q.N, "1 to 1e15")
		q.window().Check(f, at)
		for _, other := range quotas[:i] {
			f.Need(q.window() != other.window(), fmt.Sprintf("Quotas[%d]", i), q, "of another window than those before it")
		}
	}
}

// window returns what tells the quotas of a limit apart, with its defaults filled in.
func (q Quota) window() calendar.Window {
	return calendar.Window{Every: q.Every, Per: string(q.Per), In: q.In, From: q.From}.Filled()
}

// String returns such as "1000 per day in Europe/Berlin", "1000 per month from 31" or
// "50 per 1h0m0s".
func (q Quota) String() string {
	text := strconv.Itoa(q.N) + " per " + string(q.Per)
	if q.Per == "" {
		return text + q.Every.String()
	}
	if q.From > 1 {
		text += " from " + strconv.Itoa(q.From)
	}
	if q.In != nil && q.In != time.UTC {
		text += " in " + q.In.String()
	}
	return text
}
