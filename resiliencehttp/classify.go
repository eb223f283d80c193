package resiliencehttp

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A StatusError is a response that policies are to heed, as they see it.
//
// With status 500, 502, 503 or 504 it is a failure of the server. With 408, 425 or 429
// it is an answer of a server that works ([resilience.Answered]), which asks for the
// request again later: a breaker counts it as a success, and a retrier makes another
// attempt.
type StatusError struct {
	StatusCode int         // 503
	Header     http.Header // a copy of the response's

	final bool
}

func (e *StatusError) Error() string {
	s := "resiliencehttp: status " + strconv.Itoa(e.StatusCode)
	if text := http.StatusText(e.StatusCode); text != "" {
		s += " " + text
	}
	return s
}

// RetryAfter returns how long the server asked to be left alone from now on, by
// its Retry-After field: 0 if it did not, or not in a form that RFC 9110 knows.
func (e *StatusError) RetryAfter() time.Duration {
	return retryAfter(e.Header.Get("Retry-After"), time.Now())
}

// Retryable reports whether the request may be sent again.
func (e *StatusError) Retryable() bool { return !e.final }

// Answered reports whether the status says nothing against the server: true for every
// status below 500.
func (e *StatusError) Answered() bool { return e.StatusCode < 500 }

// Throttled reports whether the server refused the request to shed load: true for 429
// and 503. A throttle.Adaptive counts it as refused by the server.
func (e *StatusError) Throttled() bool {
	return e.StatusCode == http.StatusTooManyRequests || e.StatusCode == http.StatusServiceUnavailable
}

// DefaultClassify says what policies are to make of a response. It returns
//
//   - for 500, 502, 503 and 504 a [*StatusError]: the server failed.
//   - for 429 a *StatusError that is [resilience.Answered]: the server works, and the
//     client is too fast.
//   - for 408 and 425 the same, if the request may be sent again: the server did not
//     get it in time, or not securely enough.
//   - nil for every other status: the server has answered. Nobody else can judge 404
//     or 409, and 501 is not going to change.
//
// The StatusError is Retryable if the request may be sent again: as the [Transport]
// says that resp came through, or elsewhere by the method and the idempotency key of
// resp.Request.
func DefaultClassify(resp *http.Response) error {
	failed := classify(resp, repeatable(resp.Request))
	if failed == nil {
		return nil
	}
	failed.Header = failed.Header.Clone()
	return failed
}

// repeatable reports whether a request that has been sent may be sent again.
func repeatable(req *http.Request) bool {
	if req == nil {
		return false
	}
	if c, ok := req.Context().Value(callKey{}).(*call); ok {
		return c.mayRepeat()
	}
	return replayable(req)
}

// classify returns what policies see of resp, or nil. The two share a Header.
func classify(resp *http.Response, mayRepeat bool) *StatusError {
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
	case http.StatusRequestTimeout, http.StatusTooEarly:
		if !mayRepeat {
			return nil
		}
	default:
		return nil
	}
	return &StatusError{StatusCode: resp.StatusCode, Header: resp.Header, final: !mayRepeat}
}

// A finalError is an error after which the request is not sent again.
type finalError struct{ err error }

func (e *finalError) Error() string   { return e.err.Error() }
func (e *finalError) Unwrap() error   { return e.err }
func (e *finalError) Retryable() bool { return false }

// Timeout reports whether what is in it is a time-out.
func (e *finalError) Timeout() bool { return behavior.IsTimeout(e.err) }

// A requestError is the error of a request that was at fault itself. It says nothing
// against the server, and another attempt would end in the same.
type requestError struct{ err error }

func (e *requestError) Error() string   { return e.err.Error() }
func (e *requestError) Unwrap() error   { return e.err }
func (e *requestError) Answered() bool  { return true }
func (e *requestError) Retryable() bool { return false }
func (e *requestError) Timeout() bool   { return behavior.IsTimeout(e.err) }

// A timeoutError is an error around that of a time-out, such as a retrier's. It
// says so itself, since [net/url.Error] asks nobody further in.
type timeoutError struct{ err error }

func (e *timeoutError) Error() string { return e.err.Error() }
func (e *timeoutError) Unwrap() error { return e.err }
func (e *timeoutError) Timeout() bool { return true }

// withTimeout returns err as one that says whether it is a time-out.
func withTimeout(err error) error {
	if _, ok := err.(interface{ Timeout() bool }); !ok && behavior.IsTimeout(err) {
		return &timeoutError{err}
	}
	return err
}

// hopeless reports whether sending the request again would end in err again.
func hopeless(err error) bool {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return dns.IsNotFound
	}
	return untrusted(err)
}

// untrusted reports whether err says that the server is not who it should be,
// or speaks no TLS.
func untrusted(err error) bool {
	return is[*tls.CertificateVerificationError](err) ||
		is[x509.UnknownAuthorityError](err) ||
		is[x509.HostnameError](err) ||
		is[x509.CertificateInvalidError](err) ||
		is[x509.SystemRootsError](err) ||
		is[tls.RecordHeaderError](err)
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}
