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
		addr = p.forwardedFor(x, forwarded, addr)
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
func (p Proxies) forwardedFor(x, forwarded []string, proxy netip.Addr) netip.Addr {
	switch {
	case len(forwarded) == 0:
		return p.ofX(x, proxy)
	case len(x) == 0:
		return p.ofForwarded(forwarded, proxy)
	}
	// Most proxies know only one of the fields and pass the other on unchanged.
	addr := p.ofX(x, proxy)
	if addr != p.ofForwarded(forwarded, proxy) {
		return proxy
	}
	return addr
}

// ofX returns the last address in X-Forwarded-For that is not trusted, or proxy if the field
// is malformed up to there. It reads from the right and no further, since what is to the left
// comes from the client. Empty members do not count (RFC 9110, section 5.6.1).
func (p Proxies) ofX(lines []string, proxy netip.Addr) netip.Addr {
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
			if addr = next; !p.trusted(addr) {
				return addr
			}
		}
	}
	return addr
}

// ofForwarded returns the last address in Forwarded (RFC 7239) that is not trusted, or proxy
// if the field is malformed. It reads from the left, as quoted strings must be. An empty
// element does not count, and one without a for parameter is malformed.
func (p Proxies) ofForwarded(lines []string, proxy netip.Addr) netip.Addr {
	addr, found := proxy, false // found: an address, or that there is none
	for _, line := range lines {
		node, empty := "", true
		for s := line; ; s = s[1:] {
			name, value, rest, ok := forwardedPair(s)
			if !ok {
				return proxy
			}
			empty = empty && name == ""
			if strings.EqualFold(name, "for") {
				node = value
			}
			s = rest
			if s != "" && s[0] == ';' {
				continue
			}
			if !empty {
				next, ok := parseNode(node)
				switch {
				case !ok:
					addr, found = proxy, true
				case !found || !p.trusted(next):
					addr, found = next, true
				}
			}
			if s == "" {
				break
			}
			node, empty = "", true
		}
	}
	return addr
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
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '"':
			return unescaped(s[1:i]), s[i+1:], true
		case '\\':
			i++
		}
	}
	return "", "", false
}

// unescaped returns the text that is between the quotes of a quoted string.
func unescaped(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' {
			i++
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// parseNode parses an IP address with or without a port. It removes the zone and returns an
// IPv4-mapped IPv6 address as an IPv4 one.
func parseNode(s string) (netip.Addr, bool) {
	s = strings.Trim(s, " \t")
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

// token reports whether s is a token (RFC 9110, section 5.6.2).
func token(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r > '~' || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
	})
}
