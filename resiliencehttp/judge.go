package resiliencehttp

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A StatusError is the error that policies see instead of a failed response; see [DefaultJudge].
type StatusError struct {
	StatusCode int         // the response's status code, such as 503
	Header     http.Header // a copy of the response's header
	Method     string      // the request's method; "" if the response has no Request
	Host       string      // the host of the request's URL; "" if the response has no Request

	final bool          // the request must not be repeated
	after time.Duration // the result of Transport.RetryAfter; 0 if there is none
}

// Error returns the status with the method and the host of the request. Error omits the path and the query, which may
// contain secrets.
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

// RetryAfter returns the time to wait before another request, as the server specified it. If the function
// RetryAfter of the [Transport] returned a positive time, that time is the result. Otherwise the result is
// the value of the header field Retry-After, or 0 if the field is missing or invalid. If the field is a date,
// the time is measured from the response's Date, or from now if the response has no Date.
func (e *StatusError) RetryAfter() time.Duration {
	value := e.Header.Get("Retry-After")
	if e.after > 0 || value == "" {
		return e.after
	}
	now, err := http.ParseTime(e.Header.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return retryAfter(value, now)
}

// Retryable reports whether the request may be repeated.
func (e *StatusError) Retryable() bool { return !e.final }

// Answered reports whether the status shows that the server works. Each status below 500 shows this.
func (e *StatusError) Answered() bool { return e.StatusCode < 500 }

// Throttled reports whether the server rejected the request to shed load: the status is 429, 503 or 529.
func (e *StatusError) Throttled() bool { return overloaded(e.StatusCode) }

func overloaded(code int) bool {
	const siteOverloaded = 529
	return code == http.StatusTooManyRequests || code == http.StatusServiceUnavailable || code == siteOverloaded
}

// ErrorType returns the status code as a decimal number, such as "503", for OpenTelemetry's attribute
// error.type.
func (e *StatusError) ErrorType() string { return strconv.Itoa(e.StatusCode) }

// DefaultJudge returns the error that policies see instead of a response, or nil if the response is a
// success. DefaultJudge classifies the response only by its status. The Ahead may be nil, because
// DefaultJudge does not use it.
//
//   - For 500, 502, 503, 504, 507 and 520 to 530, DefaultJudge returns a [*StatusError]: the server failed, or a proxy
//     could not reach the server.
//   - For 429, DefaultJudge returns a *StatusError that is [resilience.Answered]: the server works, and the client
//     sends too many requests.
//   - For 408 and 425, DefaultJudge also returns a *StatusError that is Answered, but only if the request may
//     be repeated. 408 means that the server did not receive the request in time. 425 means that the server did
//     not process the request because it could be a replay.
//   - For any other status, DefaultJudge returns nil. Only the caller knows whether 404 or 409 is a failure,
//     and a retry does not help against 501.
//
// The StatusError is Retryable if the request may be repeated. If the Judge of a [Transport] calls DefaultJudge,
// the Transport decides whether the request may be repeated, and its function RetryAfter is used. Otherwise, the
// request's method and its idempotency key decide, and only the header field Retry-After is used. An example is a
// response that an http.Client has returned.
func DefaultJudge(resp *http.Response, _ *Ahead) error {
	var c *call
	mayRepeat := false
	if resp.Request != nil {
		if c = callOf(resp.Request.Context()); c != nil {
			mayRepeat = c.mayRepeat()
		} else {
			mayRepeat = replayable(resp.Request)
		}
	}
	failed := classify(resp, c, mayRepeat)
	if failed == nil {
		return nil
	}
	failed.Header = failed.Header.Clone()
	return failed
}

// classify returns the StatusError of resp, or nil. The StatusError shares resp's Header. c is the call that resp
// belongs to, or nil.
func classify(resp *http.Response, c *call, mayRepeat bool) *StatusError {
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
	if c != nil && c.t.RetryAfter != nil {
		e.after = max(0, c.t.RetryAfter(resp))
	}
	return e
}

// failed reports whether a status is a failure of the server, or of a proxy in front of the server.
func failed(code int) bool {
	switch code {
	case http.StatusInternalServerError, http.StatusServiceUnavailable, http.StatusInsufficientStorage:
		return true
	}
	return fromGateway(code) || 520 <= code && code <= 530
}

// fromGateway reports whether a status comes from a gateway that does not know whether the server behind it
// has processed the request.
func fromGateway(code int) bool {
	return code == http.StatusBadGateway || code == http.StatusGatewayTimeout
}

// Resend marks an error that a Judge returns. The mark means that the request had no effect, so the request
// may be repeated even if its method is not safe to repeat. For example, a Judge can mark the error of a POST
// that the server rejected with 429. The request is repeated only if its body is rewindable; see [Transport].
// Resend has no effect on a response with status 502 or 504, because a gateway does not know whether the
// server behind it has processed the request. Resend(nil) is nil.
func Resend(err error) error {
	if err == nil {
		return nil
	}
	return &resendError{err}
}

type resendError struct{ err error }

func (e *resendError) Error() string   { return e.err.Error() }
func (e *resendError) Unwrap() error   { return e.err }
func (e *resendError) Retryable() bool { return true }

func resends(err error) bool { return is[*resendError](err) }

// retryAfter parses the value of a Retry-After field (RFC 9110, section 10.2.3) and returns the time to wait,
// measured from now. The value is a number of seconds, or a date in one of the three formats of HTTP.
// retryAfter returns 0 for any other value and for a date in the past. For a number that overflows a
// time.Duration, it returns the longest Duration in whole seconds.
func retryAfter(value string, now time.Time) time.Duration {
	value = strings.TrimSpace(value)
	n, err := strconv.ParseUint(value, 10, 63)
	if err == nil || errors.Is(err, strconv.ErrRange) { // after ErrRange, n is the maximum
		return time.Duration(min(n, math.MaxInt64/uint64(time.Second))) * time.Second
	}
	date, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return max(0, date.Sub(now))
}

// A requestError is the error of a request that itself is invalid. The error does not depend on the server or
// the network, and another attempt would fail in the same way. Until the policies of a [Transport] have
// returned, the error is a refusal, which they ignore. If it were an answer, it would close the breaker of a
// host that is down. After that, the error is an answer, because a saga would repeat a refused call forever.
type requestError struct {
	err      error
	late     bool        // the time for the request was over, so the error may not be the request's fault
	deciding atomic.Bool // the policies have not returned yet
}

func (e *requestError) Error() string   { return e.err.Error() }
func (e *requestError) Unwrap() error   { return e.err }
func (e *requestError) Refused() bool   { return e.deciding.Load() || behavior.IsRefused(e.err) }
func (e *requestError) Answered() bool  { return !e.late }
func (e *requestError) Retryable() bool { return false }

// badRequest returns a requestError for err. But if ctx is done, it returns err: a requestError is an answer, which
// would close an outer breaker.
func badRequest(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	return &requestError{err: err}
}

// A waitError is the error of an attempt that was never sent, because this process had no free connection,
// file descriptor or local port. It is a refusal, because it is not caused by the server.
type waitError struct{ err error }

func (e *waitError) Error() string   { return e.err.Error() }
func (e *waitError) Unwrap() error   { return e.err }
func (e *waitError) Refused() bool   { return true }
func (e *waitError) Retryable() bool { return true }

// A timeoutError wraps an error, such as a retrier's, that wraps a timeout at any depth. It has its own
// method Timeout, because the Timeout method of [net/url.Error] only calls the Timeout method of the error
// that it wraps directly.
type timeoutError struct{ err error }

func (e *timeoutError) Error() string { return e.err.Error() }
func (e *timeoutError) Unwrap() error { return e.err }
func (e *timeoutError) Timeout() bool { return true }

// withTimeout wraps err in a timeoutError if err wraps a timeout but has no method Timeout itself. Otherwise
// it returns err unchanged.
func withTimeout(err error) error {
	if _, ok := err.(interface{ Timeout() bool }); !ok && behavior.IsTimeout(err) {
		return &timeoutError{err}
	}
	return err
}

// isPermanent reports whether another attempt would fail in the same way: the host does not exist, the server's
// certificate is not trusted, or the server does not use TLS.
func isPermanent(err error) bool {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return dns.IsNotFound
	}
	return is[*tls.CertificateVerificationError](err) || is[tls.RecordHeaderError](err)
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}
