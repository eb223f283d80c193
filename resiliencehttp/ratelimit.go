package resiliencehttp

import (
	"cmp"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// quotaName returns the name of a limit: that of its rate or, with the window, of one of its
// quotas.
func (s Server) quotaName(q throttle.Quota) string {
	name := cmp.Or(s.LimitName, "default")
	if q != (throttle.Quota{}) {
		name += strings.TrimPrefix(q.String(), strconv.Itoa(q.N)) // " per day"
	}
	return name
}

// tell sets the fields that tell a client about its quota. name is that of the rate. Several
// quotas in one chain make one list (RFC 9651, section 3.1).
func (s Server) tell(h http.Header, name string, d throttle.Decision) {
	if d.Quota != (throttle.Quota{}) {
		name = sfString(s.quotaName(d.Quota))
	}
	s.tellPolicy(h, name, d.Quota, d.Limit, d.Window)
	if d.Remaining == 0 && d.ResetAfter == 0 {
		return // the limit cannot tell what is left
	}
	reset := wholeSeconds(untilMore(d))
	h.Add("RateLimit", name+";r="+sfInteger(int64(d.Remaining))+";t="+sfInteger(reset))
}

// tellPolicy sets the fields that do not change from request to request.
func (s Server) tellPolicy(h http.Header, name string, q throttle.Quota, limit int, window time.Duration) {
	policy := name + ";q=" + sfInteger(int64(limit))
	if s.Window != 0 && q == (throttle.Quota{}) {
		window = s.Window
	} else if window%time.Second != 0 { // it cannot be told in whole seconds
		window = 0
	}
	if window > 0 {
		policy += ";w=" + sfInteger(seconds(window))
	}
	h.Add("RateLimit-Policy", policy)
}

// tellRefusal sets the fields for a request that a limit refused with e, which does not say
// all that a Decision says.
func (s Server) tellRefusal(h http.Header, e *throttle.LimitedError) {
	name := sfString(s.quotaName(e.Quota))
	s.tellPolicy(h, name, e.Quota, e.Limit, e.Quota.Every)
	left := name + ";r=0"
	if e.RetryAfter() > 0 {
		left += ";t=" + sfInteger(retryAfterSeconds(e))
	}
	h.Add("RateLimit", left)
}

// untilMore returns the time until more remains than d.Remaining, if no request takes any.
// It is never longer than the RetryAfter of a request that is refused meanwhile.
func untilMore(d throttle.Decision) time.Duration {
	taken := d.Limit - d.Remaining
	if taken <= 0 || d.Quota != (throttle.Quota{}) { // a quota gives nothing back before its end
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
