package resiliencegrpc

import (
	"context"
	"net/netip"
	"slices"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/go-resilience/resilience/resiliencehttp"
)

// ClientIP returns a function that names the client of a call by its address, to limit by: an
// IPv4 address, or the /64 of an IPv6 address, since a client usually has all addresses of
// its /64.
//
// It is the address of the connection, unless that belongs to a trusted proxy. Then it is
// taken from the metadata x-forwarded-for: the rightmost address that is not trusted. The
// client may have forged the addresses to the left of it. If the metadata is malformed, it is
// the address of the proxy, so that all clients that forge it share one limit. Trust a proxy
// only if it adds to it for each call. Without trusted proxies, all clients behind a proxy have
// its address.
//
// For a connection without an IP address, such as a Unix socket, it is the address as the
// connection has it.
func ClientIP(trusted ...netip.Prefix) func(context.Context) string {
	trusted = slices.Clone(trusted)
	return func(ctx context.Context) string {
		p, ok := peer.FromContext(ctx)
		if !ok || p.Addr == nil {
			return ""
		}
		return resiliencehttp.ClientAddress(p.Addr.String(), metadata.ValueFromIncomingContext(ctx, "x-forwarded-for"), trusted...)
	}
}
