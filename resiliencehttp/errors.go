package resiliencehttp

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"strings"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A finalError is the error of an attempt after which the request is not sent again.
type finalError struct{ err error }

func (e *finalError) Error() string   { return e.err.Error() }
func (e *finalError) Unwrap() error   { return e.err }
func (e *finalError) Retryable() bool { return false }

// A requestError is the error of a request that is wrong in itself. It says nothing about
// the server, and another attempt would fail in the same way.
type requestError struct{ err error }

func (e *requestError) Error() string   { return e.err.Error() }
func (e *requestError) Unwrap() error   { return e.err }
func (e *requestError) Answered() bool  { return true }
func (e *requestError) Retryable() bool { return false }

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

// neverConnected reports whether err says that no connection to the server was made, or that
// a policy within Base refused. Nothing was sent then, unless the request's body was read:
// a body whose Read dials may return such an error too.
func neverConnected(err error) bool {
	if behavior.IsRefused(err) {
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "dial" || op.Op == "proxyconnect")
}

// unsupported reports whether err says that a Base of net/http did not send a request: it does not
// know the scheme, or HTTP/2 does not allow a field, or the server not so many. These errors have
// no type.
func unsupported(err error) bool {
	text := err.Error()
	return strings.HasPrefix(text, "unsupported protocol scheme ") ||
		strings.HasPrefix(text, "http2: invalid ") ||
		strings.HasPrefix(text, "http2: request header list larger ")
}

// hopeless reports whether another attempt would fail with err again.
func hopeless(err error) bool {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return dns.IsNotFound
	}
	return untrusted(err)
}

// untrusted reports whether err says that the server's certificate is not trusted, or that
// the server speaks no TLS.
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
