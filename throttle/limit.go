package throttle

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

// A Limit says how many tokens may be spent: at a rate with a burst, within quotas, or
// both. A call takes its tokens from all of them or from none. Its fields are those of
// [Config]; [Group.Set] and [Shared.Set] give a Limit to one key.
//
//	free := throttle.Limit{Rate: 10, Quotas: []throttle.Quota{{N: 1000, Per: throttle.Day}}}
//	paid := throttle.Limit{Rate: 100}
type Limit struct {
	// Rate is the number of tokens a second, as in [Config].
	Rate float64

	// Burst is how many tokens may be spent at once after a pause, as in [Config].
	Burst int

	// Quotas bound the tokens of longer times, as in [Config].
	Quotas []Quota
}

// Validate returns an error that names each invalid field, or nil.
func (l Limit) Validate() error {
	f := invalid.Fields{Type: "throttle.Limit"}
	l.validate(&f)
	return f.Err()
}

func (l Limit) validate(f *invalid.Fields) {
	checkQuotas(f, l.Quotas)
	if l.Rate == 0 && len(l.Quotas) > 0 {
		f.Need(l.Burst == 0, "Burst", l.Burst, "0 where there is no Rate")
		return
	}
	checkRate(f, l.Rate, l.Burst)
}

func (l Limit) isZero() bool { return l.Rate == 0 && l.Burst == 0 && len(l.Quotas) == 0 }

// withDefaults returns a valid l with its zero fields filled in. It shares no memory
// with l.
func (l Limit) withDefaults() Limit {
	if l.Rate != 0 {
		l.Burst = burstOf(l.Rate, l.Burst)
	}
	l.Quotas = slices.Clone(l.Quotas)
	for i := range l.Quotas {
		if q := &l.Quotas[i]; q.Per != "" && q.In == nil {
			q.In = time.UTC
		}
	}
	return l
}

// rate returns the rate and the burst of a valid l with its defaults filled in. Without a
// Rate the burst is more than any quota.
func (l Limit) rate() (bucket.Rate, int) {
	if l.Rate == 0 {
		return bucket.Unlimited, min(2*maxQuota, math.MaxInt)
	}
	r, _ := bucket.NewRate(l.Rate)
	return r, l.Burst
}

// part returns an nth part of a valid l with its defaults filled in, but at least one
// token of each number.
func (l Limit) part(n int) Limit {
	l.Rate /= float64(n)
	if l.Rate != 0 {
		l.Burst = max(1, l.Burst/n)
	}
	l.Quotas = slices.Clone(l.Quotas)
	for i := range l.Quotas {
		l.Quotas[i].N = max(1, l.Quotas[i].N/n)
	}
	return l
}

// A Quota allows N tokens in each window of time: in each day of a calendar, or in each
// hour that begins with the first token after the last one has ended. Unlike a rate it
// gives nothing back in the middle of a window: a client that has spent it all waits for
// the next one.
//
// As text, such as in JSON, a Quota is "1000 per day in Europe/Berlin" or "50 per 1h0m0s".
type Quota struct {
	// N is how many tokens a window allows: 1 to 1e15.
	N int

	// Every is the length of a window that begins with the first token spent after the
	// last one has ended: a millisecond to 36 years. So N tokens at the end of one window
	// and N at the beginning of the next are the most that any time as long as Every can
	// see. Set Every or Per.
	Every time.Duration

	// Per is the period of the calendar that is a window, such as [Day]. It begins and
	// ends at the same time for all keys.
	Per Period

	// In is the time zone of Per's calendar. Nil means UTC. A day in which the clocks
	// change has 23 or 25 hours. In text, In is the name of the zone, as
	// [time.LoadLocation] takes it.
	In *time.Location
}

// A Period is a period of the calendar.
type Period string

// The periods. Each begins at midnight.
const (
	Day   Period = "day"
	Week  Period = "week" // begins on Monday
	Month Period = "month"
	Year  Period = "year"
)

const (
	maxQuotas = 8
	maxQuota  = 1_000_000_000_000_000
	maxEvery  = 36 * 365 * 24 * time.Hour
)

// checkQuotas records what is wrong with quotas.
func checkQuotas(f *invalid.Fields, quotas []Quota) {
	f.Need(len(quotas) <= maxQuotas, "Quotas", fmt.Sprintf("%d long", len(quotas)), fmt.Sprintf("at most %d long", maxQuotas))
	for i, q := range quotas {
		at := fmt.Sprintf("Quotas[%d].", i)
		f.Need(q.N >= 1 && int64(q.N) <= maxQuota, at+"N", q.N, "1 to 1e15")
		f.Need(q.Every == 0 || q.Every >= time.Millisecond && q.Every <= maxEvery, at+"Every", q.Every, "a millisecond to 36 years")
		f.Need(slices.Contains([]Period{"", Day, Week, Month, Year}, q.Per), at+"Per", strconv.Quote(string(q.Per)), `"day", "week", "month" or "year"`)
		f.Need((q.Every == 0) != (q.Per == ""), at+"Per", strconv.Quote(string(q.Per)), "set where Every is not, and the other way round")
		f.Need(q.Per != "" || q.In == nil, at+"In", q.In, "nil where Per is not set")
		for _, other := range quotas[:i] {
			f.Need(q.window() != other.window(), fmt.Sprintf("Quotas[%d]", i), q, "of another window than those before it")
		}
	}
}

// window returns the text of the quota's window, which tells quotas of a Limit apart.
func (q Quota) window() string {
	switch {
	case q.Per == "":
		return q.Every.String()
	case q.In == nil || q.In == time.UTC:
		return string(q.Per)
	}
	return string(q.Per) + " in " + q.In.String()
}

// String returns "1000 per day in Europe/Berlin", "1000 per day" (in UTC) or
// "50 per 1h0m0s".
func (q Quota) String() string { return strconv.Itoa(q.N) + " per " + q.window() }

// MarshalText returns the text of String. It returns an error for a time zone that
// [time.LoadLocation] does not find by its name, such as one of [time.FixedZone].
func (q Quota) MarshalText() ([]byte, error) {
	if _, err := time.LoadLocation(q.In.String()); err != nil || q.In.String() == "" {
		return nil, fmt.Errorf("throttle.Quota in the time zone %q has no text: time.LoadLocation does not find it", q.In)
	}
	return []byte(q.String()), nil
}

// UnmarshalText accepts the texts of String.
func (q *Quota) UnmarshalText(text []byte) error {
	bad := func(why string) error {
		return fmt.Errorf(`throttle.Quota is %q: %s: must be such as "1000 per day in Europe/Berlin" or "50 per 1h0m0s"`, text, why)
	}
	number, window, ok := strings.Cut(string(text), " per ")
	if !ok {
		return bad("no number per time")
	}
	n, err := strconv.Atoi(number)
	if err != nil {
		return bad("no whole number")
	}
	next := Quota{N: n}
	if every, err := time.ParseDuration(window); err == nil {
		next.Every = every
	} else {
		per, zone, inZone := strings.Cut(window, " in ")
		next.Per = Period(per)
		next.In = time.UTC
		if inZone {
			if next.In, err = time.LoadLocation(zone); err != nil {
				return bad(err.Error())
			}
		}
	}
	f := invalid.Fields{Type: "throttle"}
	if checkQuotas(&f, []Quota{next}); f.Err() != nil {
		return bad(f.Err().Error())
	}
	*q = next
	return nil
}

// A Decision says whether tokens were taken and what is left: the information that
// the headers of an HTTP response give a client. Of a limit with Quotas it tells about
// the one that binds: if the tokens were taken, the one with the fewest tokens left;
// otherwise, of the quotas that have too few, the one whose window is over last.
type Decision struct {
	OK         bool
	Quota      Quota         // the quota that binds; zero if it is the Rate, with its Burst
	Limit      int           // the Burst, or N of the Quota
	Window     time.Duration // the time in which the Burst refills, to the nearest nanosecond; or the length of the Quota's window
	Remaining  int           // tokens that could be taken now, after this decision
	RetryAfter time.Duration // the time until the same tokens could be taken, if no other call takes any: 0 if they were taken; the longest Duration if they never can be
	ResetAfter time.Duration // the time until Limit tokens are there again, if no call takes any
}
