package resiliencehttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
)

// A Server provides middleware for an HTTP server. The fields of a Server configure how the middleware
// reports limits to clients and how it refuses requests. The zero Server uses the defaults.
//
//	api := resiliencehttp.Server{LimitName: "tenant"}
//	http.ListenAndServe(addr, api.ThrottleBy(tenants, tenant)(api.Bulkhead(slots)(handler)))
//
// The response to a refused request has the status 429 if the client is over a limit, 413 if the request
// costs more than the limit can ever allow, and 503 otherwise. The body of this response is a problem
// document (RFC 9457). The response has a Cache-Control of no-store. The response also has a Retry-After of
// at least 1 second, unless a retry can never succeed.
//
// A refusal removes header fields that describe the body of the original response, such as ETag. A refusal
// does not remove a Content-Encoding that was set before the middleware received the request. Such a
// Content-Encoding belongs to an outer ResponseWriter that compresses the response. In contrast,
// [Server.Refuse] always removes the Content-Encoding.
type Server struct {
	// LimitName is the name of the limit in the header fields RateLimit-Policy and RateLimit and in problem
	// documents. Empty means "default".
	LimitName string

	// OnRefuse, if not nil, writes the response to a request that was refused with err. The response of OnRefuse
	// replaces the problem document. Before OnRefuse is called, the header fields of the response are set,
	// except Content-Type. If OnRefuse does not set a status, the response has the status that it would have had
	// without OnRefuse. If OnRefuse writes nothing, the client receives the problem document. Do not show err to
	// clients, because it names the server's policies.
	OnRefuse func(w http.ResponseWriter, r *http.Request, err error)

	// BodyIdle is the maximum time that a Read of a request's body waits for data. BodyIdle applies to handlers
	// inside [Server.Bulkhead]. Without BodyIdle, a client that sends a header but no body would hold its slot
	// forever. After BodyIdle, Read returns a [*resilience.TimeoutError], and net/http closes the connection
	// (HTTP/1.1) or resets the stream (HTTP/2). BodyIdle does not limit the time between two Reads, the body
	// of a CONNECT, or a connection after [http.ResponseController.Hijack]. A client that keeps sending a few
	// bytes at a time is limited only by the ReadTimeout of the [http.Server]. A client that does not read its
	// response also holds its slot, and is limited only by the server's WriteTimeout.
	//
	// Over HTTP/1.1, net/http reads the unread part of a body when the handler writes. BodyIdle also limits
	// these reads, unless outer middleware has wrapped or replaced the body, as [http.MaxBytesHandler] does.
	// Use such middleware inside Bulkhead.
	//
	// Zero means 30 seconds. [resilience.Unlimited] means no limit; use it for request streams whose sender
	// may pause. Bulkhead panics if BodyIdle has any other negative value. If the ResponseWriter does not
	// support SetReadDeadline, BodyIdle has no effect.
	BodyIdle time.Duration
}

// Bulkhead returns middleware that serves each request in a slot of b. If a request gets no slot within b's MaxWait,
// the client receives 503 with a problem document of type temporary-reduced-capacity. A request is also refused with
// 503 if its client disconnects while the request waits; see [Server.Throttle].
//
// Some handlers can process fewer requests concurrently than b has slots, or have a capacity that varies.
// Requests then queue inside the handler, and b's priorities and shares have no effect there. For such a
// handler, use a bulkhead of package bulkhead/adaptive, which finds the right limit itself. Call the handler
// in the bulkhead's Do, and pass the error of Do to [Server.Refuse].
//
// b's functions Priority and Share can read values, such as the tenant, from the request's ctx. Outer
// middleware must set these values from information that the client cannot choose. Bulkhead panics if b is
// nil.
func (s Server) Bulkhead(b *bulkhead.Bulkhead) func(http.Handler) http.Handler {
	if b == nil {
		panic(errors.New("resiliencehttp: Bulkhead needs a Bulkhead, not nil"))
	}
	if s.BodyIdle < 0 && s.BodyIdle != resilience.Unlimited {
		panic(fmt.Errorf("resiliencehttp: Server: BodyIdle is %v: must be 0 (for the default), more, or Unlimited",
			s.BodyIdle))
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			// The handler gets r itself, and not a copy with the bulkhead's ctx. A handler sets fields of r:
			// the MultipartForm, whose files net/http removes, and the matched pattern, which outer
			// middleware reads. If the handler set them in a copy, net/http and outer middleware would not
			// see them.
			err := b.Do(r.Context(), func(context.Context) error {
				s.serve(next, w, r)
				return nil
			})
			if err != nil {
				s.refuse(w, r, err, true)
			}
		})
	}
}

// ClientIP returns a function that returns a request's [ClientAddress], as a key for [Server.ThrottleBy]. Without
// trusted proxies, all clients behind a proxy or a load balancer have the proxy's address, and share one limit.
func ClientIP(trusted ...netip.Prefix) func(*http.Request) string {
	return func(r *http.Request) string {
		return ClientAddress(r.RemoteAddr, r.Header["X-Forwarded-For"], trusted...)
	}
}

// ClientAddress returns a client's address, as the key of a limit: an IPv4 address, or the /64 prefix of an
// IPv6 address. A client usually has all addresses of its /64 prefix. If each IPv6 address had its own limit,
// a client could avoid its limit by changing its address.
//
// remote is the remote address of the connection, and forwarded holds the lines of the header field
// X-Forwarded-For. If remote is not a trusted proxy, ClientAddress returns remote. If remote is a trusted
// proxy, ClientAddress returns the rightmost address in forwarded that is not trusted. The client may have
// forged the addresses to the left of the returned address. If all addresses in forwarded are trusted,
// ClientAddress returns the leftmost address.
//
// ClientAddress reads X-Forwarded-For from right to left. If ClientAddress reaches a malformed address first,
// it returns the proxy's address, so all clients that send malformed fields share one limit. Trust a proxy
// only if it appends the client's address to the X-Forwarded-For of each request. A remote without an IP
// address, such as a Unix socket, is returned unchanged.
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
	prefix, _ := addr.Prefix(64) // cannot fail for an IPv6 address
	return prefix.String()
}

// isTrusted reports whether one of the prefixes contains addr. addr must not be an IPv4-mapped IPv6 address.
// A prefix may have such an address, as ::ffff:10.0.0.0/104 does.
func isTrusted(addr netip.Addr, trusted []netip.Prefix) bool {
	return slices.ContainsFunc(trusted, func(p netip.Prefix) bool {
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		return p.Contains(addr)
	})
}

// forwardedFor returns the rightmost address in X-Forwarded-For that is not trusted. It reads the field from
// the right and stops at that address, because the client may have forged the addresses to the left. If it
// finds a malformed address first, it returns proxy. If all addresses are trusted, it returns the leftmost
// one. Empty list members are ignored (RFC 9110, section 5.6.1).
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
		addr, _ := netip.ParseAddr(strings.TrimSuffix(inner, "]"))
		return addr.Unmap().WithZone(""), addr.Is6() // false for the zero Addr of a failed parse
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
