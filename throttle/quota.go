package throttle

import (
	"cmp"
	"fmt"
	"slices"
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
	maxTime   = 36 * 365 * 24 * time.Hour
)

func checkQuotas(f *invalid.Fields, quotas []Quota) {
	f.Need(len(quotas) <= maxQuotas, "Quotas", fmt.Sprintf("%d long", len(quotas)), fmt.Sprintf("at most %d long", maxQuotas))
	for i, q := range quotas {
		at := fmt.Sprintf("Quotas[%d].", i)
		f.Need(q.N >= 1 && int64(q.N) <= maxQuota, at+"N", q.N, "1 to 1e15")
		q.CheckWindow(f, at)
		for _, other := range quotas[:i] {
			f.Need(q.window() != other.window(), fmt.Sprintf("Quotas[%d]", i), q, "of another window than those before it")
		}
	}
}

// CheckWindow records what is wrong with the fields other than N, whose names follow at.
func (q Quota) CheckWindow(f *invalid.Fields, at string) {
	f.Need(q.Every == 0 || q.Every >= time.Millisecond && q.Every <= maxTime, at+"Every", q.Every, "a millisecond to 36 years")
	f.Need(slices.Contains([]Period{"", Day, Month}, q.Per), at+"Per", strconv.Quote(string(q.Per)), `"day" or "month"`)
	f.Need((q.Every == 0) != (q.Per == ""), at+"Per", strconv.Quote(string(q.Per)), "set where Every is not, and the other way round")
	f.Need(q.Per != "" || q.In == nil, at+"In", q.In, "nil where Per is not set")
	f.Need(q.From == 0 || q.Per == Month && q.From >= 1 && q.From <= 31, at+"From", q.From, "0, or 1 to 31 where Per is Month")
}

// window returns q without its N: what tells the quotas of a limit apart.
func (q Quota) window() Quota {
	q.N = 0
	if q.Per != "" && q.In == nil {
		q.In = time.UTC
	}
	if q.Per == Month {
		q.From = cmp.Or(q.From, 1)
	}
	return q
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

// Calendar returns the calendar of a quota that has a Per.
func (q Quota) calendar() *calendar.Calendar {
	q = q.window()
	return &calendar.Calendar{Months: q.Per == Month, Day: q.From, In: q.In}
}
