package resiliencehttp

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// write sets the fields that tell a client about its quota. Several quotas in one chain make
// one list (RFC 9651, section 3.1).
func (q Quota) write(h http.Header, name string, d throttle.Decision) {
	reset := wholeSeconds(untilMore(d))
	policy := name + ";q=" + sfInteger(int64(d.Limit))
	window := q.Window
	if window == 0 && d.Window%time.Second == 0 { // no other window can be told in whole seconds
		window = d.Window
	}
	if window > 0 {
		policy += ";w=" + sfInteger(seconds(window))
	}
	h.Add("RateLimit-Policy", policy)
	h.Add("RateLimit", name+";r="+sfInteger(int64(d.Remaining))+";t="+sfInteger(reset))
	if q.Legacy {
		h.Set("X-RateLimit-Limit", strconv.Itoa(d.Limit))
		h.Set("X-RateLimit-Remaining", strconv.Itoa(d.Remaining))
		h.Set("X-RateLimit-Reset", strconv.FormatInt(reset, 10))
	}
}

// untilMore returns the time until more remains than d.Remaining, if no request takes any.
// It is never longer than the RetryAfter of a request that is refused meanwhile.
func untilMore(d throttle.Decision) time.Duration {
	taken := d.Limit - d.Remaining
	if taken <= 0 {
		return d.ResetAfter
	}
	token := float64(d.Window) / float64(d.Limit)
	until := d.ResetAfter - time.Duration(float64(taken-1)*token)
	if until <= 0 { // a part of taken is not taken, but kept for other levels
		until = min(d.ResetAfter, time.Duration(token))
	}
	return until
}

// wholeSeconds returns a wait in seconds, rounded up, except that a rounding error of a
// limit, about a nanosecond, does not add a second.
func wholeSeconds(wait time.Duration) int64 { return seconds(wait.Round(time.Microsecond)) }

// seconds returns d in whole seconds, rounded up.
func seconds(d time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	return int64((d-1)/time.Second) + 1
}

// sfInteger returns n as an Integer of at most 15 digits (RFC 9651, section 4.1.4).
func sfInteger(n int64) string {
	return strconv.FormatInt(min(max(n, 0), 999_999_999_999_999), 10)
}

// sfString returns s as a String (RFC 9651, section 4.1.6). A character that a String cannot
// hold becomes an underscore.
func sfString(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < ' ' || r > '~':
			b.WriteByte('_')
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}
