package resiliencehttp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strconv"
	"time"
)

// A StatusError is a response that says "failed", as the policies see it.
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

// DefaultClassify returns a [*StatusError] for 429, 502, 503 and 504, and for 500
// if the request may be sent again, and nil for every other response. The
// StatusError is not Retryable if the request may not be sent again, going by
// its method and its idempotency key.
func DefaultClassify(resp *http.Response) error {
	failed := classify(resp, resp.Request != nil && replayable(resp.Request))
	if failed == nil {
		return nil
	}
	failed.Header = failed.Header.Clone()
	return failed
}

// classify returns what is wrong with resp, or nil. The two share a Header.
func classify(resp *http.Response, mayRepeat bool) *StatusError {
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout:
	case http.StatusInternalServerError:
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
func (e *finalError) Timeout() bool { return timedOut(e.err) }

// A timeoutError is an error around that of a time-out, such as a retrier's. It
// says so itself, since [net/url.Error] asks nobody further in.
type timeoutError struct{ err error }

func (e *timeoutError) Error() string { return e.err.Error() }
func (e *timeoutError) Unwrap() error { return e.err }
func (e *timeoutError) Timeout() bool { return true }

// withTimeout returns err as one that says whether it is a time-out.
func withTimeout(err error) error {
	if _, ok := err.(interface{ Timeout() bool }); !ok && timedOut(err) {
		return &timeoutError{err}
	}
	return err
}

func timedOut(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) {
		return true // a retrier's reason to give up, say, beside an error that is none
	}
	t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return ok && t.Timeout()
}

// worthRepeating reports whether nothing in err says that it is not Retryable.
func worthRepeating(err error) bool {
	r, ok := errors.AsType[interface {
		error
		Retryable() bool
	}](err)
	return !ok || r.Retryable()
}

// hopeless reports whether sending req again would end in err again.
func hopeless(req *http.Request, err error) bool {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return dns.IsNotFound
	}
	return untrusted(err) || unsendable(req, err)
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

// unsendable reports whether err is due to req itself. What net/http says of
// that has no type to know it by.
func unsendable(req *http.Request, err error) bool {
	switch req.URL.Scheme {
	case "http", "https":
		return req.URL.Host == "" || !sendable(req)
	}
	// Somebody may have registered the scheme, and a network may be behind it.
	return !is[net.Error](err)
}

// sendable reports whether the method and header fields of req can be written
// (RFC 9110, sections 5.1 and 5.5).
func sendable(req *http.Request) bool {
	if req.Method != "" && !token(req.Method) {
		return false
	}
	for name, values := range req.Header {
		if !token(name) {
			return false
		}
		for _, v := range values {
			for i := range len(v) {
				if c := v[i]; c < ' ' && c != '\t' || c == 0x7f {
					return false
				}
			}
		}
	}
	return true
}

// token reports whether s is a token (RFC 9110, section 5.6.2).
func token(s string) bool {
	for i := range len(s) {
		if !tokenChar(s[i]) {
			return false
		}
	}
	return s != ""
}

func tokenChar(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	switch c {
	case '!', '#', '$', '%', '&', '\'', '*', '+', '-', '.', '^', '_', '`', '|', '~':
		return true
	}
	return false
}
