package resiliencegrpc_test

import (
	"time"

	"google.golang.org/grpc"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencegrpc"
	"github.com/go-resilience/resilience/retry"
)

// The snippet of docs/cookbook.md, for the compiler: see TestSnippetsCompile. It is not run.
func _(retries *retry.Retrier, users *breaker.Breaker, slots, streams *bulkhead.Bulkhead) []grpc.DialOption {
	policies := resiliencegrpc.Client{
		Middleware:  resilience.Chain(retries.Wrap, users.Wrap, slots.Wrap, resilience.Timeout(10*time.Second)),
		StreamSlots: streams,         // slots limits calls, streams limits open streams
		Idle:        2 * time.Minute, // the server sends a heartbeat each minute
	}
	return policies.DialOptions()
}
