package resiliencehttp

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"iter"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
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

// Bulkhead returns middleware that serves each request in a slot of b. A request that gets
// no slot within the MaxWait of b gets 503 with Retry-After and a problem document of type
// temporary-reduced-capacity. If the client hangs up while its request waits, the wait
// ends, and the request is refused: a client that has only closed its sending side reads it.
//
// Over HTTP/1.1 the server does not notice that a client has gone before the request's body
// has been read, so a queued request with a body continues to wait. Bound the wait by b's
// MaxWait if requests have bodies.
//
// If b has several levels, its Priority finds the level of a request in the request's ctx.
// Put it there from what the server knows about the client; the middleware does not look at
// the request itself.
//
// ShareBy, if it is set, becomes the Share of the requests in b, by an Update. Several servers
// may do that with one b; calls of b that serve no request keep the Share that b has.
//
// Bulkhead panics if b is nil, and if ShareBy is set and no call waits in b, whose MaxWait is 0.
func (s Server) Bulkhead(b *bulkhead.Bulkhead) func(http.Handler) http.Handler {
	if b == nil {
		panic(errors.New("resiliencehttp: Bulkhead needs a Bulkhead, not nil"))
	}
	if s.ShareBy != nil {
		s.share(b)
	}
	return s.under(b.Wrap)
}

// BulkheadBy returns middleware that serves each request in a slot of the bulkhead that g
// has for its key, as [Server.Bulkhead] does. One client, tenant or route can then not take
// the slots of the others. A nil key means [ClientIP] without trusted proxies. BulkheadBy
// panics if g is nil, and if ShareBy is set.
//
// Take the key from what the server knows about the client, as for [Server.ThrottleBy].
func (s Server) BulkheadBy(
	g *resilience.Group[string, *bulkhead.Bulkhead], key func(*http.Request) string,
) func(http.Handler) http.Handler {
	if g == nil {
		panic(errors.New("resiliencehttp: BulkheadBy needs a Group, not nil"))
	}
	if s.ShareBy != nil {
		panic(errors.New("resiliencehttp: ShareBy is set: must be nil with BulkheadBy, which has a bulkhead for each key"))
	}
	if key == nil {
		key = ClientIP()
	}
	return s.under(g.By(func(ctx context.Context) string {
		if served, ok := ctx.Value(serviceKey{}).(*service); ok {
			return shortKey(key(served.r))
		}
		return "" // there is no request to serve
	}))
}

// share makes ShareBy the Share of requests in b.
func (s Server) share(b *bulkhead.Bulkhead) {
	err := b.Update(func(c *bulkhead.Config) {
		before := c.Share
		c.Share = func(ctx context.Context) string {
			if served, ok := ctx.Value(serviceKey{}).(*service); ok && served.shareBy != nil {
				return shortKey(served.shareBy(served.r))
			}
			if before != nil {
				return before(ctx)
			}
			return ""
		}
	})
	if err != nil {
		panic(err)
	}
}

// under returns middleware that serves each request under mw.
func (s Server) under(mw resilience.Middleware) func(http.Handler) http.Handler {
	return s.exempting(func(next http.Handler) http.Handler {
		serve := mw(func(ctx context.Context) error {
			v, ok := ctx.Value(serviceKey{}).(*service)
			if !ok {
				return errNoCall
			}
			v.served = true
			r := v.r.WithContext(ctx)
			defer giveBack(r, v.r)
			next.ServeHTTP(v.w, r)
			return nil
		})
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			v := &service{w: w, r: r, shareBy: s.ShareBy}
			as := refusal{encoding: w.Header()["Content-Encoding"]}
			err := serve(context.WithValue(r.Context(), serviceKey{}, v))
			if !v.served {
				s.refuse(w, r, cmp.Or(err, errNoResponse), as)
			}
		})
	})
}

// A service is a request on its way through the policies.
type service struct {
	w       http.ResponseWriter
	r       *http.Request
	shareBy func(*http.Request) string
	served  bool
}

type serviceKey struct{}

// giveBack gives the request that a middleware got what a handler has set in r, its copy with
// another ctx: net/http removes the temporary files of MultipartForm, and middleware further
// out looks at the pattern that matched, and at its values.
func giveBack(r, to *http.Request) {
	to.MultipartForm = r.MultipartForm
	if r.Pattern == to.Pattern {
		return
	}
	to.Pattern = r.Pattern
	for _, wildcard := range strings.Split(r.Pattern, "{")[1:] {
		name, _, _ := strings.Cut(wildcard, "}")
		name = strings.TrimSuffix(name, "...")
		to.SetPathValue(name, r.PathValue(name))
	}
}

// ClientIP returns a function that returns the address of a request's client, as a key to
// throttle by: see [ClientAddress]. Without trusted proxies, all clients behind a proxy or a
// load balancer have its address, and share one limit.
//
// For a connection without an IP address, such as a Unix socket, it is
// [http.Request.RemoteAddr].
func ClientIP(trusted ...netip.Prefix) func(*http.Request) string {
	trusted = slices.Clone(trusted)
	return func(r *http.Request) string {
		return ClientAddress(r.RemoteAddr, r.Header["X-Forwarded-For"], trusted...)
	}
}

// ClientAddress returns the address of a client, as a key to limit by: an IPv4 address, or the
// /64 of an IPv6 address, since a client usually has all addresses of its /64.
//
// It is the address of the connection, remote, unless that belongs to a trusted proxy. Then it
// is the rightmost address that is not trusted in forwarded, the lines of X-Forwarded-For. The
// client may have forged the addresses to the left of it. If the field is malformed up to there,
// it is the address of the proxy, so that all clients that forge it share one limit. Trust a
// proxy only if it adds to the field for each request. A remote without an IP address is
// returned as it is.
func ClientAddress(remote string, forwarded []string, trusted ...netip.Prefix) string {
	addr, ok := parseNode(remote)
	if !ok {
		return remote
	}
	if isTrusted(addr, trusted) {
		addr = forwardedFor(forwarded, trusted, addr)
	}
	if addr.Is4() {
		return addr.String()
	}
	prefix, _ := addr.Prefix(64) // fails for other addresses than IPv6
	return prefix.String()
}

// isTrusted reports whether a prefix contains addr, which is not an IPv4-mapped IPv6 address. A
// prefix may be of such.
func isTrusted(addr netip.Addr, trusted []netip.Prefix) bool {
	return slices.ContainsFunc(trusted, func(p netip.Prefix) bool {
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		return p.Contains(addr)
	})
}

// forwardedFor returns the last address in X-Forwarded-For that is not trusted, or proxy if the
// field is malformed up to there. It reads from the right and no further, since what is to the
// left comes from the client. Empty members do not count (RFC 9110, section 5.6.1).
func forwardedFor(lines []string, trusted []netip.Prefix, proxy netip.Addr) netip.Addr {
	addr := proxy
	for _, line := range slices.Backward(lines) {
		for more := true; more; {
			comma := strings.LastIndexByte(line, ',')
			member := strings.Trim(line[comma+1:], " \t")
			if more = comma >= 0; more {
				line = line[:comma]
			}
			if member == "" {
				continue
			}
			next, ok := parseNode(member)
			if !ok {
				return proxy
			}
			if addr = next; !isTrusted(addr, trusted) {
				return addr
			}
		}
	}
	return addr
}

// parseNode parses an IP address with or without a port. It removes the zone and returns an
// IPv4-mapped IPv6 address as an IPv4 one.
func parseNode(s string) (netip.Addr, bool) {
	if inner, ok := strings.CutPrefix(s, "["); ok && strings.HasSuffix(inner, "]") {
		addr, err := netip.ParseAddr(strings.TrimSuffix(inner, "]"))
		return addr.Unmap().WithZone(""), err == nil && addr.Is6()
	}
	addr, err := netip.ParseAddr(s)
	if err != nil {
		with, err := netip.ParseAddrPort(s)
		if err != nil {
			return netip.Addr{}, false
		}
		addr = with.Addr()
	}
	return addr.Unmap().WithZone(""), true
}

// Health returns a handler that reports the health of policies, which a *registry.Registry
// knows: resiliencehttp.Health(reg).
//
//	{"status": "warn", "checks": [
//		{"name": "users", "status": "fail", "state": "open"},
//		{"name": "mail", "status": "pass", "state": "ok"}
//	]}
//
// A policy passes if its error is nil. It fails if the error has a method Failed() bool that
// returns true, and warns otherwise. Its state is "ok", or what the method HealthState() string
// of the error returns, or else "ailing". The texts of the errors are not told. The whole passes
// if all of them pass, and warns otherwise: the status of the response is 200, since a process
// that is told to restart does not mend what it depends on. The policies are asked with a ctx
// that ends after a second.
//
// Source: Health Endpoint Monitoring in the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/health-endpoint-monitoring).
func Health(policies interface {
	Health(context.Context) iter.Seq2[string, error]
}) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, http.StatusText(http.StatusMethodNotAllowed), http.StatusMethodNotAllowed)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), time.Second)
		defer cancel()
		all := struct {
			Status string  `json:"status"`
			Checks []check `json:"checks"`
		}{"pass", []check{}}
		for name, err := range policies.Health(ctx) {
			c := checkOf(name, err)
			all.Checks = append(all.Checks, c)
			if c.Status != "pass" {
				all.Status = "warn"
			}
		}
		body, _ := json.Marshal(all) // strings
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_, _ = w.Write(append(body, '\n'))
	})
}

type check struct {
	Name   string `json:"name"`
	Status string `json:"status"`
	State  string `json:"state"`
}

func checkOf(name string, err error) check {
	if err == nil {
		return check{name, "pass", "ok"}
	}
	c := check{name, "warn", "ailing"}
	if e, ok := errors.AsType[interface {
		error
		Failed() bool
	}](err); ok && e.Failed() {
		c.Status = "fail"
	}
	if e, ok := errors.AsType[interface {
		error
		HealthState() string
	}](err); ok {
		c.State = e.HealthState()
	}
	return c
}
