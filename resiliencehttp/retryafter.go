package resiliencehttp

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// retryAfter returns what the value of a Retry-After field (RFC 9110, section
// 10.2.3) asks for at now: seconds, or a date in one of its three forms. It is
// never negative, 0 for what is neither, and does not overflow.
func retryAfter(value string, now time.Time) time.Duration {
	value = strings.TrimSpace(value)
	if value == "" {
		return 0
	}
	if strings.Trim(value, "0123456789") == "" {
		seconds, err := strconv.ParseInt(value, 10, 64)
		if err != nil || seconds > math.MaxInt64/int64(time.Second) {
			return math.MaxInt64 // too many digits
		}
		return time.Duration(seconds) * time.Second
	}
	date, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return max(0, date.Sub(now))
}
