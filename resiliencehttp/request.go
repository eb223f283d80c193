package resiliencehttp

import (
	"context"
	"net"
	"net/http"
	"strings"
)

// RequestFrom returns the request that a policy or hook is called for, if ctx is that of
// a [Transport]'s call: the caller's request or, under Transport.Hedge, a copy of it with
// another ctx. It must not be changed. Otherwise RequestFrom returns nil and false.
func RequestFrom(ctx context.Context) (*http.Request, bool) {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c.req, true
	}
	return nil, false
}

// HostOf returns the server, as "host:port", that the request which ctx belongs to is sent to:
// the key of a Group with a member for each server. It is that of the URL, whatever the field
// Host says: in lower case, without a final dot, and with the port 80 for http or 443 for
// https if the URL has none. With another scheme and no port it is the host alone. HostOf
// returns "" if ctx is not that of a [Transport]'s call.
//
//	circuits := breaker.NewGroup(breaker.GroupConfig[string]{})
//	transport.Middleware = resilience.Chain(retries.Wrap, circuits.By(resiliencehttp.HostOf))
func HostOf(ctx context.Context) string {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c.host
	}
	return ""
}

func hostOf(req *http.Request) string {
	if req.URL == nil {
		return ""
	}
	host, port := strings.TrimSuffix(strings.ToLower(req.URL.Hostname()), "."), req.URL.Port()
	if port == "" {
		switch req.URL.Scheme {
		case "http":
			port = "80"
		case "https":
			port = "443"
		default:
			return host
		}
	}
	return net.JoinHostPort(host, port)
}
