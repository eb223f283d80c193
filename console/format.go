package console

import (
	"fmt"
	"math"
	"strconv"
	"time"
)

// ago returns a duration as a person says it.
func ago(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d > 0 && d < time.Second:
		return fmt.Sprintf("%d ms", max(d/time.Millisecond, 1))
	case d < 10*time.Second:
		return strconv.FormatFloat(math.Floor(d.Seconds()*10)/10, 'f', -1, 64) + " s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", d/time.Hour)
	}
	return fmt.Sprintf("%d days", d/(24*time.Hour))
}

// stamp returns a time.Time, or what a pointer to one points to.
func stamp(t any) string {
	const layout = "2006-01-02 15:04:05 MST"
	switch t := t.(type) {
	case time.Time:
		return t.Format(layout)
	case *time.Time:
		return t.Format(layout)
	}
	return ""
}

// number returns v with at most three digits that count, and a thin space between thousands.
func number(v float64) string {
	a := math.Abs(v)
	switch {
	case a == 0:
		return "0"
	case a < 0.01:
		return "< 0.01"
	case a < 10:
		return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64)
	case a < 100:
		return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64)
	case a < 10_000:
		return strconv.FormatFloat(math.Round(v), 'f', -1, 64)
	case a < 1e6:
		return strconv.FormatFloat(math.Round(v/100)/10, 'f', -1, 64) + " k"
	}
	return strconv.FormatFloat(math.Round(v/1e5)/10, 'f', -1, 64) + " M"
}

func percent(share float64) string {
	switch p := share * 100; {
	case p <= 0:
		return "0 %"
	case p < 0.1:
		return "< 0.1 %"
	case p < 10:
		return strconv.FormatFloat(math.Round(p*10)/10, 'f', -1, 64) + " %"
	case p > 99 && p < 100:
		return "> 99 %"
	default:
		return strconv.FormatFloat(math.Round(p), 'f', -1, 64) + " %"
	}
}

// rate returns the calls a second as a text.
func (s status) rate() string { return number(s.calls) }

// bad returns which share of the calls failed or was refused, as a text.
func (s status) bad() string {
	switch {
	case s.calls <= 0:
		return "idle"
	case s.failed > 0 && s.refused > 0:
		return percent(s.share()) + " failed or refused"
	case s.refused > 0, s.never:
		return percent(s.share()) + " refused"
	}
	return percent(s.share()) + " failed"
}
