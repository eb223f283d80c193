package resiliencehttp

import (
	"net/http"
	"time"
)

// A Server says how the middleware of a server tells clients about its limits, which
// requests it leaves alone, and what a refusal looks like. The zero Server has the defaults.
//
//	api := resiliencehttp.Server{
//		LimitName: "tenant",
//		Exempt:    func(r *http.Request) bool { return r.Method == http.MethodOptions || r.URL.Path == "/health" },
//	}
//	http.ListenAndServe(addr, api.ThrottleBy(tenants, tenant)(api.Bulkhead(slots)(handler)))
//
// A refused request gets 429 if the client is over a limit, and 503 otherwise. The response has
// Retry-After, in whole seconds and at least 1, unless another request is of no use, a
// Cache-Control of no-store, and a problem document (RFC 9457). It has no fields of the
// response that it replaces, such as ETag. A Content-Encoding that was set before the
// middleware got the request stays: it is that of a writer that compresses. Refuse cannot
// tell and removes it.
type Server struct {
	// LimitName is the name of the limit in the fields RateLimit-Policy and RateLimit and in
	// problem documents. Several limits in one chain need a LimitName each to be told apart.
	// Empty means "default".
	LimitName string

	// Window is the time in which the burst refills, rounded up to whole seconds for
	// the fields. Zero means the time of the limit itself, such as a minute for 100
	// requests a minute and a burst of 100, if that is a whole number of seconds. A
	// negative Window is left out of the fields. Quotas of the limit have windows of their
	// own.
	Window time.Duration

	// Exempt reports whether a request is served as if there were no middleware, such as
	// the probe of a load balancer or a preflight request of a browser. Nil means that no
	// request is.
	Exempt func(*http.Request) bool

	// ShareBy returns the share that a request has in the slots of [Server.Bulkhead], such as
	// its tenant, so that the flood of one does not use up what all share: see Share of
	// [bulkhead.Config], which needs a MaxWait. Take it from what the server knows about the
	// client. Of a share of more than 200 bytes its SHA-256 is kept. Nil means that there are no
	// shares.
	ShareBy func(*http.Request) string

	// OnRefuse writes the response for a request that is refused with err, in place of the
	// problem document. The fields of the response are already set, except Content-Type.
	// The status is 429 or 503, as above, unless OnRefuse calls WriteHeader with another
	// one. If OnRefuse writes nothing, the client gets the problem document. Do not show err
	// to clients: it names the policies of the server. Nil means none.
	OnRefuse func(w http.ResponseWriter, r *http.Request, err error)
}

// exempting returns mw, except for exempt requests.
func (s Server) exempting(mw func(http.Handler) http.Handler) func(http.Handler) http.Handler {
	if s.Exempt == nil {
		return mw
	}
	return func(next http.Handler) http.Handler {
		guarded := mw(next)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if s.Exempt(r) {
				next.ServeHTTP(w, r)
				return
			}
			guarded.ServeHTTP(w, r)
		})
	}
}
