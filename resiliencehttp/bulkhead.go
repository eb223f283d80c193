package resiliencehttp

import (
	"context"
	"errors"
	"net/http"

	"github.com/go-resilience/resilience/bulkhead"
)

// Bulkhead returns middleware that serves each request in a slot of b. A request that gets
// no slot within the MaxWait of b gets 503 with Retry-After and a problem document of type
// temporary-reduced-capacity. If the client hangs up while its request waits, the wait
// ends, and the request is refused: a client that has only closed its sending side reads it.
//
// Over HTTP/1.1 the server does not notice that a client has gone before the request's body
// has been read, so a queued request with a body continues to wait. Bound the wait by b's
// MaxWait if requests have bodies.
//
// If b has several levels, its Priority finds the level of a request in the request's ctx.
// Put it there from what the server knows about the client; the middleware does not look at
// the request itself.
//
// ShareBy, if it is set, becomes the Share of the requests in b, by an Update. Several servers
// may do that with one b; calls of b that serve no request keep the Share that b has.
//
// Bulkhead panics if b is nil, and if ShareBy is set and no call waits in b, whose MaxWait is 0.
func (s Server) Bulkhead(b *bulkhead.Bulkhead) func(http.Handler) http.Handler {
	if b == nil {
		panic(errors.New("resiliencehttp: Bulkhead needs a Bulkhead, not nil"))
	}
	if s.ShareBy != nil {
		s.share(b)
	}
	return s.guard(b.Wrap, false)
}

// BulkheadBy returns middleware that serves each request in a slot of the bulkhead that g
// has for its key, as [Server.Bulkhead] does. One client, tenant or route can then not take
// the slots of the others. A nil key means [ClientIP] without trusted proxies. BulkheadBy
// panics if g is nil, and if ShareBy is set.
//
// Take the key from what the server knows about the client, as for [Server.ThrottleBy].
func (s Server) BulkheadBy(g *bulkhead.Group[string], key func(*http.Request) string) func(http.Handler) http.Handler {
	if g == nil {
		panic(errors.New("resiliencehttp: BulkheadBy needs a Group, not nil"))
	}
	if s.ShareBy != nil {
		panic(errors.New("resiliencehttp: ShareBy is set: must be nil with BulkheadBy, which has a bulkhead for each key"))
	}
	if key == nil {
		key = ClientIP()
	}
	return s.guard(g.By(func(ctx context.Context) string {
		if served, ok := ctx.Value(serviceKey{}).(*service); ok {
			return shortKey(key(served.r))
		}
		return "" // there is no request to serve
	}), false)
}

// share makes ShareBy the Share of requests in b.
func (s Server) share(b *bulkhead.Bulkhead) {
	err := b.Update(func(c *bulkhead.Config) {
		before := c.Share
		c.Share = func(ctx context.Context) string {
			if served, ok := ctx.Value(serviceKey{}).(*service); ok && served.shareBy != nil {
				return shortKey(served.shareBy(served.r))
			}
			if before != nil {
				return before(ctx)
			}
			return ""
		}
	})
	if err != nil {
		panic(err)
	}
}
