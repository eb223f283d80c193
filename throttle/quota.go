package throttle

import (
	"fmt"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// A Quota allows N tokens in each window. A rate yields tokens continuously, but a quota yields no new tokens within a
// window.
type Quota struct {
	// N is the number of tokens that a window allows, from 1 to 1e15. [None] admits nothing. [Unlimited] admits
	// everything. Zero is invalid. If a 0 from another source means "nothing", convert the 0 to None.
	N int

	// Window is the period for which N applies.
	Window Window
}

// A Window is the period for which a quota applies. Set either Every or Per. In, From and At are valid only with Per.
type Window struct {
	// Every is the length of a window, from a millisecond to 36 years. A window starts with the first token that is
	// spent after the previous window has ended.
	Every time.Duration

	// Per is the calendar period of the window.
	Per Period

	// In is the time zone of the calendar. Nil means UTC.
	In *time.Location

	// From is the day on which a [Month] starts, from 1 to 31. If a calendar month has fewer than From days, the period
	// starts on the last day of that month. Zero means 1. For other periods, From must be 0.
	From int

	// At is the time of day at which a period starts, in the time zone In. If Per is [Week] or [Month], At may be longer
	// than a day: for example, 54 * time.Hour is 6:00 on the third day. At must be less than a day if Per is [Day], less
	// than 7 days for a Week, and less than 28 days for a Month.
	At time.Duration
}

// BillingMonth returns the window of a customer's billing months. A billing month starts at midnight on start's day of
// the month, in start's time zone.
func BillingMonth(start time.Time) Window {
	return Window{Per: Month, In: start.Location(), From: start.Day()}
}

// A Period is a period of the calendar. A period starts at midnight, unless Window.At is set.
type Period string

const (
	Day   Period = "day"   // starts every day
	Week  Period = "week"  // starts on Monday
	Month Period = "month" // starts on the day in Window.From
)

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
		f.Need(q.N == None || q.N == Unlimited || q.N >= 1 && int64(q.N) <= maxQuota, at+"N", q.N,
			"1 to 1e15, throttle.None to admit nothing, or throttle.Unlimited")
		q.Window.calendar().Check(f, at+"Window.")
		for _, other := range quotas[:i] {
			f.Need(q.Window.calendar() != other.Window.calendar(), fmt.Sprintf("Quotas[%d]", i), q,
				"for a window that no earlier quota has")
		}
	}
}

// calendar converts w to a calendar.Window with its defaults filled in.
func (w Window) calendar() calendar.Window {
	return calendar.Window{Every: w.Every, Per: string(w.Per), In: w.In, From: w.From, At: w.At}.Filled()
}

// limit returns the number of tokens that a window allows.
func (q Quota) limit() int {
	if q.N == None {
		return 0
	}
	return q.N
}

// String returns text such as "1000 per month from 31 in Europe/Berlin" or "50 per 1h0m0s".
func (q Quota) String() string {
	text := strconv.Itoa(q.N)
	switch q.N {
	case None:
		text = "none"
	case Unlimited:
		text = "unlimited"
	}
	return text + " per " + q.Window.String()
}

// String returns text such as "month from 31 in Europe/Berlin", "day at 13h40m0s" or "1h0m0s".
func (w Window) String() string {
	if w.Per == "" {
		return w.Every.String()
	}
	text := string(w.Per)
	if w.From > 1 {
		text += " from " + strconv.Itoa(w.From)
	}
	if w.At > 0 {
		text += " at " + w.At.String()
	}
	if w.In.String() != "UTC" {
		text += " in " + w.In.String()
	}
	return text
}
