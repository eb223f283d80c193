package resiliencehttp

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
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
// each request.
//
// For a connection without an IP address, such as a Unix socket, it is
// [http.Request.RemoteAddr].
func ClientIP(trusted ...netip.Prefix) func(*http.Request) string {
	trusted = unmapped(trusted)
	isTrusted := func(addr netip.Addr) bool {
		return slices.ContainsFunc(trusted, func(p netip.Prefix) bool { return p.Contains(addr) })
	}
	return func(r *http.Request) string {
		addr, ok := parseNode(r.RemoteAddr)
		if !ok {
			return r.RemoteAddr
		}
		if isTrusted(addr) {
			addr = forwardedFor(r.Header, addr, isTrusted)
		}
		return clientName(addr)
	}
}

// unmapped returns prefixes with each IPv4-mapped IPv6 prefix as an IPv4 one, so that they
// contain the addresses of parseNode.
func unmapped(prefixes []netip.Prefix) []netip.Prefix {
	prefixes = slices.Clone(prefixes)
	for i, p := range prefixes {
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			prefixes[i] = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
	}
	return prefixes
}

// clientName returns the address, or the /64 that it is in.
func clientName(addr netip.Addr) string {
	if addr.Is4() {
		return addr.String()
	}
	prefix, _ := addr.Prefix(64) // fails for other addresses than IPv6
	return prefix.String()
}

// forwardedFor returns the address of the client of a trusted proxy, or proxy itself if
// that is not known.
func forwardedFor(h http.Header, proxy netip.Addr, trusted func(netip.Addr) bool) netip.Addr {
	x, forwarded := h["X-Forwarded-For"], h["Forwarded"]
	switch {
	case len(forwarded) == 0:
		return rightmost(listed(x), proxy, trusted)
	case len(x) == 0:
		return rightmost(forwardedNodes(forwarded), proxy, trusted)
	}
	// Most proxies know only one of the fields and pass the other on unchanged.
	addr := rightmost(listed(x), proxy, trusted)
	if addr != rightmost(forwardedNodes(forwarded), proxy, trusted) {
		return proxy
	}
	return addr
}

// rightmost returns the last address in nodes that is not trusted, or proxy if nodes are
// malformed.
func rightmost(nodes []string, proxy netip.Addr, trusted func(netip.Addr) bool) netip.Addr {
	addr := proxy
	for i := len(nodes) - 1; i >= 0; i-- {
		next, ok := parseNode(nodes[i])
		if !ok {
			return proxy
		}
		addr = next
		if !trusted(addr) {
			break
		}
	}
	return addr
}

// listed returns the members of a field that is a comma-separated list. Empty members do
// not count (RFC 9110, section 5.6.1).
func listed(lines []string) []string {
	members := strings.Split(strings.Join(lines, ","), ",")
	return slices.DeleteFunc(members, func(m string) bool { return strings.Trim(m, " \t") == "" })
}

// forwardedNodes returns the for parameter of each element of Forwarded, or "" for an
// element without one. An empty element does not count. It returns just one "" if the field
// is malformed (RFC 7239).
func forwardedNodes(lines []string) []string {
	var nodes []string
	node, empty := "", true
	s := strings.Join(lines, ",")
	for {
		name, value, rest, ok := forwardedPair(s)
		if !ok {
			return []string{""}
		}
		empty = empty && name == ""
		if strings.EqualFold(name, "for") {
			node = value
		}
		if rest == "" || rest[0] == ',' {
			if !empty {
				nodes = append(nodes, node)
			}
			node, empty = "", true
		}
		if rest == "" {
			return nodes
		}
		s = rest[1:]
	}
}

// forwardedPair parses a pair of a Forwarded element, which may be empty, up to the separator
// that follows.
func forwardedPair(s string) (name, value, rest string, ok bool) {
	s = strings.TrimLeft(s, " \t")
	if s == "" || s[0] == ',' || s[0] == ';' {
		return "", "", s, true
	}
	name, s, ok = strings.Cut(s, "=")
	if !ok || !token(name) {
		return "", "", "", false
	}
	if value, s, ok = quoted(s); !ok {
		return "", "", "", false
	}
	s = strings.TrimLeft(s, " \t")
	return name, value, s, s == "" || s[0] == ',' || s[0] == ';'
}

// quoted parses a quoted string or a token. It takes any other text up to a separator for a
// token, since servers write addresses without quotes.
func quoted(s string) (value, rest string, ok bool) {
	if s == "" || s[0] != '"' {
		end := strings.IndexAny(s, " \t,;")
		if end < 0 {
			end = len(s)
		}
		return s[:end], s[end:], end > 0
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; c {
		case '"':
			return b.String(), s[i+1:], true
		case '\\':
			if i++; i == len(s) {
				return "", "", false
			}
			b.WriteByte(s[i])
		default:
			b.WriteByte(c)
		}
	}
	return "", "", false
}

// parseNode parses an IP address with or without a port. It removes the zone and returns an
// IPv4-mapped IPv6 address as an IPv4 one.
func parseNode(s string) (netip.Addr, bool) {
	s = strings.Trim(s, " \t")
	addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"))
	if err != nil {
		with, err := netip.ParseAddrPort(s)
		if err != nil {
			return netip.Addr{}, false
		}
		addr = with.Addr()
	}
	return addr.Unmap().WithZone(""), true
}
