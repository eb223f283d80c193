package resiliencehttp

import (
	"errors"
	"net"
	"net/http"

	"github.com/go-resilience/resilience/internal/behavior"
)

// replayable reports whether a request does no more when it is sent twice than
// when it is sent once: by its method (RFC 9110, section 9.2.2), or because it
// carries a key by which the server knows a repetition.
func replayable(req *http.Request) bool {
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace,
		http.MethodPut, http.MethodDelete:
		return true
	}
	_, key := req.Header["Idempotency-Key"]
	_, xkey := req.Header["X-Idempotency-Key"]
	return key || xkey
}

// neverConnected reports whether err says that no connection to the server was made,
// or that a policy further down refused. It proves that nothing was sent only if the
// request's body was not read: what provides the body may dial, too.
func neverConnected(err error) bool {
	if behavior.IsRefused(err) {
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "dial" || op.Op == "proxyconnect")
}
