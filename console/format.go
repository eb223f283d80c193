package console

import (
	"fmt"
	"math"
	"strconv"
	"time"
)

// ago returns a duration as a text in a suitable unit, such as "90 s" or "5 min".
func ago(d time.Duration) string {
	switch d = max(d, 0); {
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

// since is like ago, for a number of seconds.
func since(seconds float64) string { return ago(time.Duration(seconds * float64(time.Second))) }

// stamp returns a time as a text with its date and time zone, or "" for the zero time.
func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Format("2006-01-02 15:04:05 MST")
}

// plural returns a number and its noun, such as "1 saga" or "2 sagas".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// atoi returns the number in a text, or 0 if the text is not a number.
func atoi(text string) int {
	n, _ := strconv.Atoi(text)
	return n
}

// rounded returns v with up to places decimals, without trailing zeros.
func rounded(v float64, places int) string {
	unit := math.Pow10(places)
	return strconv.FormatFloat(math.Round(v*unit)/unit, 'f', -1, 64)
}

// number returns v with at most three significant digits below 1000.
func number(v float64) string {
	a := math.Abs(v)
	switch {
	case a == 0:
		return "0"
	case a < 0.01:
		return "< 0.01"
	case a < 10_000:
		return rounded(v, max(2-int(math.Log10(max(a, 1))), 0))
	case a < 1e6:
		return rounded(v/1e3, 1) + " k"
	}
	return rounded(v/1e6, 1) + " M"
}

// percent returns a fraction as a percentage. It returns "0%" only for 0, and "100%" only for 1.
func percent(share float64) string {
	switch p := share * 100; {
	case p <= 0:
		return "0%"
	case p < 0.1:
		return "< 0.1%"
	case p < 10:
		return rounded(p, 1) + "%"
	case p > 99 && p < 100:
		return "> 99%"
	default:
		return rounded(p, 0) + "%"
	}
}

// bad returns the share of calls that failed or were refused as a text, such as "8% failed".
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
