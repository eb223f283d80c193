package resiliencehttp

import (
	"context"
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

// HostOf returns the host, and the port if the URL has one, of the request that ctx
// belongs to, in lower case: the key of a Group with a member for each server. It returns
// "" if ctx is not that of a [Transport]'s call.
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
	return strings.ToLower(req.URL.Host)
}
