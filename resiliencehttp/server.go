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

// A Server configures the middleware of a server: how it reports limits to clients, and how it refuses requests. The
// zero Server uses the defaults.
//
//	api := resiliencehttp.Server{LimitName: "tenant"}
//	http.ListenAndServe(addr, api.ThrottleBy(tenants, tenant)(api.Bulkhead(slots)(handler)))
//
// A refused request gets 429 if the client is over a limit, 413 if the request costs more than the limit can ever
// allow, and 503 otherwise. The response has a Cache-Control of no-store, a problem document (RFC 9457), and a
// Retry-After in whole seconds, at least 1. It has no Retry-After if another request cannot succeed. It has no fields
// of the response that it replaces, such as ETag. Middleware keeps a Content-Encoding that was set before the
// middleware received the request, because a writer that compresses has set it. [Server.Refuse] removes it.
type Server struct {
	// LimitName is the name of the limit in the fields RateLimit-Policy and RateLimit and in problem documents.
	// Empty means "default".
	LimitName string

	// OnRefuse, if not nil, writes the response for a request that is refused with err, instead of the problem
	// document. The fields of the response are set before the call, except Content-Type. The status is also
	// determined, but OnRefuse may set another one. If OnRefuse writes nothing, the client receives the problem
	// document. Do not show err to clients, because it names the policies of the server.
	OnRefuse func(w http.ResponseWriter, r *http.Request, err error)

	// BodyIdle is the maximum time that a Read of a request's body waits for the client. It applies to handlers
	// inside [Server.Bulkhead]. Without it, a client that sends the header and then nothing would hold its slot.
	// After that time, Read returns a [*resilience.TimeoutError], and net/http closes the connection (HTTP/1.1) or
	// resets the stream (HTTP/2). BodyIdle does not limit a handler that pauses between Reads, the body of a
	// CONNECT, or a connection after [http.ResponseController.Hijack]. If a client continues to send a few bytes,
	// only ReadTimeout of the [http.Server] limits it.
	//
	// Zero means 30 seconds. [resilience.Unlimited] means no limit, for request streams whose sender may pause.
	// There is no limit either if the ResponseWriter does not support SetReadDeadline.
	BodyIdle time.Duration
}

// Bulkhead returns middleware that serves each request in a slot of b. If a request gets no slot within b's MaxWait,
// the client receives 503 with a problem document of type temporary-reduced-capacity. A request is also refused with
// 503 if its client disconnects while the request waits; see [Server.Throttle].
//
// If the handler has less capacity than b, or its capacity changes, requests queue after they have left b's queue, and
// b's priorities and shares do not order them. Then call the handler within Do of a bulkhead of package
// bulkhead/adaptive, which determines its limit itself, and pass the error of Do to [Server.Refuse].
//
// b's Priority and Share read the level and the share of a request, such as its tenant, from the request's ctx. Set
// them there from information that the client cannot choose. Bulkhead panics if b is nil, or if BodyIdle is negative
// and not Unlimited.
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
			// The handler does not get a copy of r with another ctx. In a copy, net/http would not find the
			// MultipartForm whose files it removes, and outer middleware would not find the matched pattern.
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

// ClientAddress returns a client's address, as the key of a limit: an IPv4 address, or the /64 prefix of an IPv6
// address. A client usually has all addresses of its /64, and could otherwise choose among as many limits.
//
// remote is the address of the connection, and forwarded holds the lines of X-Forwarded-For. The result is remote,
// unless remote belongs to a trusted proxy. Then the result is the rightmost address of forwarded that is not trusted.
// The client may have forged the addresses to the left of it. If every address is trusted, the result is the leftmost.
// If X-Forwarded-For is malformed to the right of the result, the result is the proxy's address: all clients that forge
// the field share one limit. Trust a proxy only if it adds to the field for each request. A remote without an IP
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

// isTrusted reports whether one of the prefixes contains addr. addr must not be an IPv4-mapped IPv6 address. A prefix
// may be one, such as ::ffff:10.0.0.0/104.
func isTrusted(addr netip.Addr, trusted []netip.Prefix) bool {
	return slices.ContainsFunc(trusted, func(p netip.Prefix) bool {
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		return p.Contains(addr)
	})
}

// forwardedFor returns the last address in X-Forwarded-For that is not trusted, or proxy if a member to the right of it
// is malformed. It reads from the right and stops at that address, because the client may have forged the members to
// the left. Empty members are ignored (RFC 9110, section 5.6.1).
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
