package resiliencehttp

import (
	"cmp"
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

// A StatusError is the error that policies see in place of a response: see [DefaultJudge].
type StatusError struct {
	StatusCode int         // 503
	Header     http.Header // a copy of the response's
	Method     string      // of the request; "" if the response has none
	Host       string      // of the request's URL

	final bool
	after time.Duration // by the RetryAfter of a Transport
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

// RetryAfter returns for how long the server asked not to be asked again: by the RetryAfter of
// the [Transport], or else by its Retry-After field; 0 if that has no form of RFC 9110. A date is
// compared with the Date of the response, if that has one.
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

// Retryable reports whether the request may be sent again.
func (e *StatusError) Retryable() bool { return !e.final }

// Answered reports whether the status is an answer of a server that works: true for every
// status below 500.
func (e *StatusError) Answered() bool { return e.StatusCode < 500 }

// Throttled reports whether the server turned the request away to shed load: 429, 503 or 529.
func (e *StatusError) Throttled() bool { return overloaded(e.StatusCode) }

func overloaded(code int) bool {
	const siteOverloaded = 529
	return code == http.StatusTooManyRequests || code == http.StatusServiceUnavailable || code == siteOverloaded
}

// ErrorType returns the status code, for the attribute error.type of OpenTelemetry.
func (e *StatusError) ErrorType() string { return strconv.Itoa(e.StatusCode) }

// DefaultJudge returns the error that policies see in place of a response, by its status. It
// reads nothing ahead, and takes nil for an Ahead.
//
//   - For 500, 502, 503, 504, 507 and 520 to 530 it returns a [*StatusError]: the server, or a
//     proxy that could not reach it, failed.
//   - For 429 it returns a *StatusError that is [resilience.Answered]: the server works, and the
//     client is too fast.
//   - For 408 and 425 it returns the same if the request may be sent again: the server
//     did not get it in time, or not securely enough.
//   - For every other status it returns nil. Only the caller can judge 404 or 409, and another
//     attempt does not change 501.
//
// The StatusError is Retryable if the request may be sent again: by the [Transport] of the
// request, or by the method and the idempotency key of resp.Request.
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

// classify returns the StatusError of resp, which shares its Header, or nil. The call is that of
// resp, if there is one.
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

// failed reports whether a status is a failure of the server, or of a proxy before it.
func failed(code int) bool {
	switch code {
	case http.StatusInternalServerError, http.StatusServiceUnavailable, http.StatusInsufficientStorage:
		return true
	}
	return fromGateway(code) || 520 <= code && code <= 530
}

// fromGateway reports whether a status is that of a gateway which does not know what the server
// behind it has done.
func fromGateway(code int) bool {
	return code == http.StatusBadGateway || code == http.StatusGatewayTimeout
}

// Resend marks the error of a Judge: the request has had no effect, so it may be sent again
// even if its method forbids that, as a POST that was answered 429 before it was served. Its
// body must be one that can be sent again. It has no effect on a response of status 502 or
// 504: a gateway does not know what the server behind it has done. Resend(nil) is nil.
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

// retryAfter returns the time from now that the value of a Retry-After field (RFC 9110,
// section 10.2.3) asks for, in seconds or as a date in one of its three forms. It returns 0
// for any other value and for a date in the past, and does not overflow.
func retryAfter(value string, now time.Time) time.Duration {
	value = strings.TrimSpace(value)
	n, err := strconv.ParseUint(value, 10, 63)
	if err == nil || errors.Is(err, strconv.ErrRange) { // n is the greatest then
		return time.Duration(min(n, math.MaxInt64/uint64(time.Second))) * time.Second
	}
	date, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return max(0, date.Sub(now))
}

// A requestError is the error of a request that is wrong in itself. It describes neither the server nor the
// network, and another attempt would fail in the same way. The policies of a [Transport] see it as a refusal, which
// they do not count: as an answer, it would close the breaker of a dead host. The caller gets it as an answer,
// because a saga repeats a refused call until it is made.
type requestError struct {
	err      error
	deciding atomic.Bool // the policies have not returned yet
}

func (e *requestError) Error() string   { return e.err.Error() }
func (e *requestError) Unwrap() error   { return e.err }
func (e *requestError) Refused() bool   { return e.deciding.Load() || behavior.IsRefused(e.err) }
func (e *requestError) Answered() bool  { return true }
func (e *requestError) Retryable() bool { return false }

// A waitError is the error of an attempt that this process could not make, because it has no connection,
// file descriptor or local port left. It says nothing about the server.
type waitError struct{ err error }

func (e *waitError) Error() string   { return e.err.Error() }
func (e *waitError) Unwrap() error   { return e.err }
func (e *waitError) Refused() bool   { return true }
func (e *waitError) Retryable() bool { return true }

// A timeoutError wraps an error that has a timeout in it, such as a retrier's. It has a
// method Timeout itself, since [net/url.Error] does not look further in.
type timeoutError struct{ err error }

func (e *timeoutError) Error() string { return e.err.Error() }
func (e *timeoutError) Unwrap() error { return e.err }
func (e *timeoutError) Timeout() bool { return true }

// withTimeout returns err, in a timeoutError if it needs one.
func withTimeout(err error) error {
	if _, ok := err.(interface{ Timeout() bool }); !ok && behavior.IsTimeout(err) {
		return &timeoutError{err}
	}
	return err
}

// hopeless reports whether another attempt would fail with err again: there is no such host,
// the server's certificate is not trusted, or it speaks no TLS.
func hopeless(err error) bool {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return dns.IsNotFound
	}
	return is[*tls.CertificateVerificationError](err) || is[tls.RecordHeaderError](err)
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}
