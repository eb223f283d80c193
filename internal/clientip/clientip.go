// Package clientip finds the address of a client behind proxies.
package clientip

import (
	"net/netip"
	"slices"
	"strings"
)

// Proxies are the addresses of the proxies that are trusted.
type Proxies []netip.Prefix

// Trust returns the Proxies with the given prefixes.
func Trust(prefixes []netip.Prefix) Proxies { return unmapped(prefixes) }

// Client returns the address of the client of a connection from remote, or the /64 that it
// is in: that of remote, unless it is trusted. Then x and forwarded, the lines of
// X-Forwarded-For and Forwarded (RFC 7239), tell the address. A remote without an IP address
// is returned as it is.
func (p Proxies) Client(remote string, x, forwarded []string) string {
	addr, ok := parseNode(remote)
	if !ok {
		return remote
	}
	if p.trusted(addr) {
		addr = forwardedFor(x, forwarded, addr, p.trusted)
	}
	return clientName(addr)
}

func (p Proxies) trusted(addr netip.Addr) bool {
	return slices.ContainsFunc(p, func(prefix netip.Prefix) bool { return prefix.Contains(addr) })
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
func forwardedFor(x, forwarded []string, proxy netip.Addr, trusted func(netip.Addr) bool) netip.Addr {
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

// token reports whether s is a token (RFC 9110, section 5.6.2).
func token(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r > '~' || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
	})
}
