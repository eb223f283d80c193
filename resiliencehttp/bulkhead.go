package resiliencehttp

import (
	"errors"
	"net/http"

	"github.com/go-resilience/resilience/bulkhead"
)

// Bulkhead returns middleware that serves each request in a slot of b. A request that gets
// no slot within the MaxWait of b gets 503 with Retry-After and a problem document of type
// temporary-reduced-capacity. If the client hangs up while its request waits, the wait
// ends, and nothing is written.
//
// Over HTTP/1.1 the server does not notice that a client has gone before the request's body
// has been read, so a queued request with a body continues to wait. Bound the wait by b's
// MaxWait if requests have bodies.
//
// If b has several levels, its Priority finds the level of a request in the request's ctx.
// Put it there from what the server knows about the client; the middleware does not look at
// the request itself.
//
// Bulkhead panics if b is nil.
func Bulkhead(b *bulkhead.Bulkhead) func(http.Handler) http.Handler {
	if b == nil {
		panic(errors.New("resiliencehttp: Bulkhead needs a Bulkhead, not nil"))
	}
	return guard(b.Wrap, false)
}
