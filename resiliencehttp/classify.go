package resiliencehttp

import (
	"cmp"
	"net/http"
	"strconv"
	"time"
)

// A StatusError is the error that policies see in place of a response.
//
// Status 500, 502, 503, 504, 507 or 520 to 530 is a failure of the server, or of a proxy
// that could not reach it. Status 408, 425 or 429 is an answer of a server that works
// ([resilience.Answered]) and asks for the request again later: a breaker counts it as a
// success, and a retrier makes another attempt.
type StatusError struct {
	StatusCode int         // 503
	Header     http.Header // a copy of the response's
	Method     string      // of the request; "" if the response has none
	Host       string      // of the request's URL

	final bool
}

func (e *StatusError) Error() string {
	s := "resiliencehttp: status " + strconv.Itoa(e.StatusCode)
	if text := http.StatusText(e.StatusCode); text != "" {
		s += " " + text
	}
	if e.Host != "" {
		s += " (" + e.Method + " " + e.Host + ")"
	}
	return s
}

// RetryAfter returns the time from now on for which the server asked, by its Retry-After
// field, not to be asked again. It returns 0 if there is no such field, or none in a form
// of RFC 9110. A date is compared with the Date of the response, if that has one, so that
// the clock of this machine does not matter.
func (e *StatusError) RetryAfter() time.Duration {
	value := e.Header.Get("Retry-After")
	if value == "" {
		return 0
	}
	now, err := http.ParseTime(e.Header.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return retryAfter(value, now)
}

// Retryable reports whether the request may be sent again.
func (e *StatusError) Retryable() bool { return !e.final }

// Answered reports whether the status is an answer of a server that works: true for every
// status below 500.
func (e *StatusError) Answered() bool { return e.StatusCode < 500 }

// Throttled reports whether the server turned the request away to shed load: true for 429,
// 503 and 529, which some servers use for "overloaded". A throttle.Adaptive counts it as
// throttled.
func (e *StatusError) Throttled() bool {
	switch e.StatusCode {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, statusOverloaded:
		return true
	}
	return false
}

const statusOverloaded = 529

// ErrorType returns the status code, for the attribute error.type of OpenTelemetry.
func (e *StatusError) ErrorType() string { return strconv.Itoa(e.StatusCode) }

// DefaultClassify returns the error that policies see in place of a response:
//
//   - For 500, 502, 503, 504, 507 and 520 to 530 it returns a [*StatusError]: the server failed.
//   - For 429 it returns a *StatusError that is [resilience.Answered]: the server works,
//     and the client is too fast.
//   - For 408 and 425 it returns the same if the request may be sent again: the server
//     did not get it in time, or not securely enough.
//   - For every other status it returns nil: the server has answered. Only the caller can
//     judge 404 or 409, and another attempt does not change 501.
//
// The StatusError is Retryable if the request may be sent again. The [Transport] of the
// request decides that; without one, the method and the idempotency key of resp.Request
// do.
func DefaultClassify(resp *http.Response) error {
	failed := classify(resp, repeatable(resp.Request))
	if failed == nil {
		return nil
	}
	failed.Header = failed.Header.Clone()
	return failed
}

// classify returns the StatusError of resp, which shares its Header, or nil.
func classify(resp *http.Response, mayRepeat bool) *StatusError {
	switch code := resp.StatusCode; {
	case failed(code), code == http.StatusTooManyRequests:
	case (code == http.StatusRequestTimeout || code == http.StatusTooEarly) && mayRepeat:
	default:
		return nil
	}
	e := &StatusError{StatusCode: resp.StatusCode, Header: resp.Header, final: !mayRepeat}
	if req := resp.Request; req != nil && req.URL != nil {
		e.Method, e.Host = cmp.Or(req.Method, http.MethodGet), req.URL.Host
	}
	return e
}

// failed reports whether a status is a failure of the server, or of a proxy before it.
func failed(code int) bool {
	switch code {
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable,
		http.StatusGatewayTimeout, http.StatusInsufficientStorage:
		return true
	}
	return 520 <= code && code <= 530
}
