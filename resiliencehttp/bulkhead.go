package resiliencehttp

import (
	"errors"
	"net/http"

	"github.com/go-resilience/resilience/bulkhead"
)

// Bulkhead returns middleware that serves at most as many requests at once as b
// has slots. One that gets none, at once or within the time that b lets it wait,
// gets 503 with Retry-After and a problem document of type
// temporary-reduced-capacity. Nothing is written for a client that has gone, and
// its wait ends with it.
//
// Over HTTP/1.1 the server does not notice that a client has gone before the request's
// body has been read, so a queued request with a body waits on. Give b a MaxWait where
// requests have bodies.
//
// The level of a request, if b has several, is what b's Priority makes of the
// request's ctx: set it there from what the server knows of the client. Nothing
// in the request itself is looked at.
//
// Bulkhead panics if b is nil.
func Bulkhead(b *bulkhead.Bulkhead) func(http.Handler) http.Handler {
	if b == nil {
		panic(errors.New("resiliencehttp: Bulkhead needs a Bulkhead, not nil"))
	}
	return guard(b.Wrap, false)
}
