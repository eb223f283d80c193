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

// A Server says how the middleware of a server tells clients about its limits, and what a
// refusal looks like. The zero Server has the defaults.
//
//	api := resiliencehttp.Server{LimitName: "tenant"}
//	http.ListenAndServe(addr, api.ThrottleBy(tenants, tenant)(api.Bulkhead(slots)(handler)))
//
// A refused request gets 429 if the client is over a limit, and 503 otherwise. The response has
// Retry-After, in whole seconds and at least 1, unless another request is of no use, a
// Cache-Control of no-store, and a problem document (RFC 9457). It has no fields of the
// response that it replaces, such as ETag. A Content-Encoding that was set before the
// middleware got the request stays, as that of a writer that compresses; Refuse removes it.
type Server struct {
	// LimitName is the name of the limit in the fields RateLimit-Policy and RateLimit and in
	// problem documents. Empty means "default".
	LimitName string

	// OnRefuse writes the response for a request that is refused with err, in place of the
	// problem document. The status, unless OnRefuse sets another one, and the fields of the
	// response are set, except Content-Type. If OnRefuse writes nothing, the client gets the
	// problem document. Do not show err to clients: it names the policies of the server.
	OnRefuse func(w http.ResponseWriter, r *http.Request, err error)

	// BodyIdle is the longest time that a Read of a request's body may wait for the client. It applies to the
	// handlers within [Server.Bulkhead]: otherwise a client that sends the header and then nothing would keep
	// its slot. After that time, Read returns a [*resilience.TimeoutError], and net/http closes the connection
	// (HTTP/1.1) or resets the stream (HTTP/2). BodyIdle does not limit a handler that pauses between Reads,
	// the body of a CONNECT, or a connection after [http.ResponseController.Hijack]. A client that continues
	// to send a few bytes is limited only by ReadTimeout of the [http.Server].
	//
	// Zero means 30 seconds. [resilience.Unlimited] means no limit, for streams of requests whose sender may
	// pause. There is no limit either if the ResponseWriter does not support SetReadDeadline.
	BodyIdle time.Duration
}

// Bulkhead returns middleware that serves each request in a slot of b. A request that gets
// no slot within the MaxWait of b gets 503, with a problem document of type
// temporary-reduced-capacity; so does one whose client hangs up, as with [Server.Throttle].
//
// If the handler has less capacity than b admits, or its capacity changes, requests queue behind b,
// where no order of b's queue helps. Then call the handler within Do of a bulkhead of package
// bulkhead/adaptive, which finds its limit, and pass the error of Do to [Server.Refuse].
//
// Priority and Share of b find the level and the share of a request, such as its tenant, in the
// request's ctx. Put them there from what the server knows about the client. Bulkhead panics if b
// is nil or if BodyIdle is negative, except Unlimited.
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
			// The handler gets no copy of r with another ctx: net/http removes the files of r's MultipartForm,
			// and outer middleware reads the pattern that matched.
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

// ClientIP returns a function that returns the [ClientAddress] of a request, as a key to
// throttle by. Without trusted proxies, all clients behind a proxy or a load balancer have its
// address, and share one limit.
func ClientIP(trusted ...netip.Prefix) func(*http.Request) string {
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
// proxy only if it adds to the field for each request. A remote without an IP address, such as a
// Unix socket, is returned as it is.
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
		addr, _ := netip.ParseAddr(strings.TrimSuffix(inner, "]"))
		return addr.Unmap().WithZone(""), addr.Is6() // which the zero Addr is not
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
