package resiliencegrpc

import (
	"context"

	"google.golang.org/grpc"

	"github.com/go-resilience/resilience"
)

// A unaryCall is a unary RPC. It ends when it returns, and has no work that goes on.
type unaryCall struct {
	call
	req, reply any
	cc         *grpc.ClientConn
	invoker    grpc.UnaryInvoker
	opts       []grpc.CallOption
}

// unary is a [grpc.UnaryClientInterceptor].
func (cl *client) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if ctx.Err() != nil {
		return withStatus(ctx, resilience.EndOf(ctx), false)
	}
	c := &unaryCall{
		call: call{ctx: ctx, client: cl, method: method},
		req:  req, reply: reply, cc: cc, invoker: invoker, opts: opts,
	}
	policies, _ := begin(ctx, c)
	return c.result(cl.policies(policies))
}

func (c *unaryCall) about() *call { return &c.call }

func (c *unaryCall) attempt(ctx context.Context) error {
	sent := new(evidence)
	opts := sent.options(c.opts, func(error) { sent.finished.Store(true) })
	if err := c.invoker(ctx, c.method, c.req, c.reply, c.cc, opts...); err != nil {
		return c.failed(ctx, err, sent, true)
	}
	c.accepted = true
	return nil
}
