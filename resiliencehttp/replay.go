package resiliencehttp

import "net/http"

// replayable reports whether sending a request twice has the effect of sending it once: by
// its method (RFC 9110, section 9.2.2), or because it carries a key by which the server
// recognizes a repetition.
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
