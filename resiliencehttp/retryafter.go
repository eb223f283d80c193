package resiliencehttp

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// retryAfter returns the time from now that the value of a Retry-After field (RFC 9110,
// section 10.2.3) asks for, in seconds or as a date in one of its three forms. It returns 0
// for any other value and for a date in the past, and does not overflow.
func retryAfter(value string, now time.Time) time.Duration {
	value = strings.TrimSpace(value)
	if value == "" {
		return 0
	}
	if strings.Trim(value, "0123456789") == "" {
		seconds, _ := strconv.ParseInt(value, 10, 64) // the greatest if it is out of range
		if seconds > math.MaxInt64/int64(time.Second) {
			return math.MaxInt64
		}
		return time.Duration(seconds) * time.Second
	}
	date, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return max(0, date.Sub(now))
}
