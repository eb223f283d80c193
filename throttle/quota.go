package throttle

import (
	"fmt"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// A Quota allows N tokens in each window of time. Unlike a rate it gives nothing back in the
// middle of one.
type Quota struct {
	// N is how many tokens a window allows: 1 to 1e15.
	N int

	// Every is the length of a window that begins with the first token spent after the
	// last one has ended: a millisecond to 36 years. Set Every or Per.
	Every time.Duration

	// Per is the period of the calendar that is a window.
	Per Period

	// In is the time zone of Per's calendar. Nil means UTC.
	In *time.Location

	// From is the day with which a [Month] begins, 1 to 31, in a shorter month the last. Zero
	// means 1.
	From int
}

// A Period of the calendar begins at midnight.
type Period string

const (
	Day   Period = "day"
	Month Period = "month"
)

// From returns the windows of p in the time zone of date, those of [Month] from its day on: a
// customer's billing months. N is not set.
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

// String returns such as "1000 per month from 31 in Europe/Berlin" or "50 per 1h0m0s".
func (q Quota) String() string {
	text := strconv.Itoa(q.N) + " per " + string(q.Per)
	if q.Per == "" {
		return text + q.Every.String()
	}
	if q.From > 1 {
		text += " from " + strconv.Itoa(q.From)
	}
	if q.In.String() != "UTC" {
		text += " in " + q.In.String()
	}
	return text
}
