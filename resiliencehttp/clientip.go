package resiliencehttp

import (
	"net/http"
	"net/netip"

	"github.com/go-resilience/resilience/internal/clientip"
)

// ClientIP returns a function that returns the address of a request's client, as a key to
// throttle by: an IPv4 address, or the /64 of an IPv6 address, since a client usually has
// all addresses of its /64.
//
// It is the address of the connection, unless that belongs to a trusted proxy. Then it is
// taken from X-Forwarded-For or Forwarded (RFC 7239): the rightmost address that is not
// trusted. The client may have forged the addresses to the left of it. If the fields are
// malformed or contradict each other, it is the address of the proxy, so that all clients
// that forge them share one limit. Trust a proxy only if it adds to one of the fields for
// each request. Without trusted proxies, all clients behind a proxy or a load balancer have
// its address, and share one limit.
//
// For a connection without an IP address, such as a Unix socket, it is
// [http.Request.RemoteAddr].
func ClientIP(trusted ...netip.Prefix) func(*http.Request) string {
	proxies := clientip.Trust(trusted)
	return func(r *http.Request) string {
		return proxies.Client(r.RemoteAddr, r.Header["X-Forwarded-For"], r.Header["Forwarded"])
	}
}
