package resiliencegrpc

import (
	"context"
	"net/netip"

	"google.golang.org/grpc/peer"
)

// PeerIP returns a function that names the client of a call by the address of its
// connection, to limit by: an IPv4 address, or the /64 of an IPv6 address, because a
// client that has one address of it has them all. For a connection without an IP address,
// such as one on a Unix socket, it is the address as the connection has it.
//
// All clients behind one proxy have its address, whatever the metadata of a call says.
// Behind a proxy, take the key from what the server has verified, such as the account of
// a token or the peer's certificate.
func PeerIP() func(context.Context) string { return peerIP }

func peerIP(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	parsed, err := netip.ParseAddrPort(p.Addr.String())
	if err != nil {
		return p.Addr.String()
	}
	addr := parsed.Addr().Unmap().WithZone("")
	if addr.Is4() {
		return addr.String()
	}
	prefix, _ := addr.Prefix(64) // fails for other addresses than IPv6
	return prefix.String()
}
