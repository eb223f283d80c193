package resiliencegrpc

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/retry"
)

// A Client says how the calls of a connection go through policies. One call of the policies
// is one attempt: a unary call, or the opening of a stream. The policies run on the caller's
// goroutine. They see a failed attempt as a [*StatusError]. The caller gets the error of the last
// attempt as gRPC returned it, unless a policy wrapped it.
//
// # Streams
//
// A stream is guarded until it is open: a bulkhead holds its slot, and a timeout of the policies
// (resilience.Timeout, the AttemptTimeout of a retrier) runs, while it is opened. The server is
// told the caller's deadline only. An opening that failed is retried as a unary call is. A stream
// that is open is not repeated.
//
// Its status is its result. A breaker, an adaptive bulkhead and what else asks for the end of the
// work (see [resilience.Work]) hear of it when RecvMsg has returned an error or io.EOF, the ctx of
// the stream has ended, or the connection is closed: a stream that ends with UNAVAILABLE after an
// hour is a failure. Its caller must do one of these. If the caller has canceled the stream, what they hear
// is an error that matches [context.Canceled], which says nothing of the server. If its deadline
// passes, they hear a failure only if the caller was in RecvMsg, SendMsg or Header then. An
// answer, such as NOT_FOUND, is a good end.
//
// A Client may be used for several connections, which then share its policies.
type Client struct {
	// Middleware runs each attempt; usually a [resilience.Chain]. It is applied once for
	// each call of DialOptions. It may call what it wraps more than once, but one call
	// after the other, and none after it has returned. A policy of a call that it makes
	// itself before the opening of a stream, for a token, say, would hear of the stream's end
	// in place of the policies further in: give that call a ctx of its own. Nil means that
	// calls are made as they are.
	Middleware resilience.Middleware

	// Replayable reports whether sending a call of the method more than once has the
	// effect of sending it once. The method is a full one: "/users.v1.Users/Get". Nil
	// means [Idempotent], which a function may call too.
	Replayable func(ctx context.Context, method string) bool
}

// DialOptions returns options for [grpc.NewClient]. They add interceptors. Interceptors
// run in the order in which the options add them: an interceptor before these is called
// once for each call, and one after these once for each attempt.
//
// The options switch off the retries of a service config ([grpc.WithDisableRetry]),
// whether the config comes from the resolver or from the program. gRPC still repeats,
// once and unseen by the policies, a call that the server has certainly not processed (a
// transparent retry).
func (c Client) DialOptions() []grpc.DialOption {
	if c.Middleware == nil {
		return nil
	}
	cl := &client{policies: c.Middleware(attempt), replayable: c.Replayable}
	if cl.replayable == nil {
		cl.replayable = func(_ context.Context, method string) bool { return Idempotent(method) }
	}
	return []grpc.DialOption{
		grpc.WithDisableRetry(),
		grpc.WithChainUnaryInterceptor(cl.unary),
		grpc.WithChainStreamInterceptor(cl.stream),
	}
}

type client struct {
	policies   resilience.Func
	replayable func(context.Context, string) bool
}

// unary is a [grpc.UnaryClientInterceptor].
func (cl *client) unary(
	ctx context.Context, method string, req, reply any,
	cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	if ctx.Err() != nil {
		return withStatus(ctx, resilience.ContextErr(ctx), false)
	}
	c := &call{ctx: ctx, client: cl, method: method, make: func(ctx context.Context, sent *evidence) error {
		finish := func(error) { sent.finished.Store(true) }
		return invoker(ctx, method, req, reply, cc, sent.options(opts, finish)...)
	}}
	ctx, work := resilience.BeginWork(ctx)
	work.End(nil) // the call ends with its function, also where its caller's work goes on
	return c.run(ctx)
}

// A call is one RPC on its way through the policies.
type call struct {
	ctx    context.Context // the caller's
	client *client
	method string                                 // "/users.v1.Users/Get"
	make   func(context.Context, *evidence) error // makes one attempt

	made  bool         // an attempt has succeeded, and none is to follow
	final error        // not nil: nothing more may be sent, and this is why
	last  *StatusError // of the latest attempt that failed
}

type callKey struct{}

// run runs the policies under ctx and returns what the caller gets.
func (c *call) run(ctx context.Context) error {
	err := c.client.policies(context.WithValue(ctx, callKey{}, c))
	switch {
	case c.made:
		return nil
	case err == nil && c.last != nil:
		return c.last.Err
	case err == nil:
		return errNoAnswer
	case err == c.final:
		err = errors.Unwrap(err)
	}
	if e, ok := err.(*StatusError); ok {
		return e.Err // as gRPC returned it
	}
	return withStatus(c.ctx, err, false)
}

// attempt is what the policies wrap: it makes an attempt of the call in ctx.
func attempt(ctx context.Context) error {
	c, ok := ctx.Value(callKey{}).(*call)
	switch {
	case !ok:
		return errNoCall
	case c.made:
		return nil // an error would keep a policy going that tries again whatever it gets
	case c.final != nil:
		return c.final
	case ctx.Err() != nil:
		return resilience.ContextErr(ctx)
	}
	returned := false
	defer func() {
		if !returned && !c.client.replayable(c.ctx, c.method) { // a panic, of which a policy may make an error
			c.final = retry.Permanent(errCrashed)
		}
	}()
	var sent evidence
	err := c.make(ctx, &sent)
	returned = true
	switch {
	case err == nil:
		c.made = true
		return nil
	case resilience.Refused(err):
		return err // a policy further in made no call
	}
	e := newStatusError(ctx, c.method, err, &sent)
	c.last = e
	if e.Code == codes.DeadlineExceeded && over(ctx) && !over(c.ctx) {
		e.worth = yes // a timeout of the attempt alone
	}
	if e.may = sent.never() || c.client.replayable(c.ctx, c.method); !e.may {
		c.final = retry.Permanent(e)
		return c.final
	}
	return e
}

// over reports whether ctx has ended. Its deadline counts from the moment that it
// passes: gRPC often returns a moment before ctx is canceled.
func over(ctx context.Context) bool {
	if ctx.Err() != nil {
		return true
	}
	deadline, ok := ctx.Deadline()
	return ok && !time.Now().Before(deadline)
}

// evidence is what call options tell of an attempt.
type evidence struct {
	trailer  metadata.MD
	peer     peer.Peer
	finished atomic.Bool
}

// options returns opts with those that collect the evidence. gRPC calls finish with the end of
// the attempt.
func (e *evidence) options(opts []grpc.CallOption, finish func(error)) []grpc.CallOption {
	return slices.Concat(opts, []grpc.CallOption{grpc.Trailer(&e.trailer), grpc.Peer(&e.peer), grpc.OnFinish(finish)})
}

// never reports whether the call was certainly never sent: gRPC has finished it and knows
// of no connection that it was sent on. If an interceptor further in keeps the options
// from gRPC, it cannot be told.
func (e *evidence) never() bool { return e.finished.Load() && e.peer.Addr == nil }

// MethodOf returns the full method, such as "/users.v1.Users/Get", of the call that a
// policy, a hook of one or a handler runs for, on the client and on the server. It
// returns "" if ctx belongs to no call. It is a key for groups: circuits for each method
// of a service, say.
func MethodOf(ctx context.Context) string {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c.method
	}
	method, _ := grpc.Method(ctx)
	return method
}

// Idempotent reports whether a full method, such as "/users.v1.Users/Get", is declared to
// be without side effects or idempotent:
//
//	rpc Get(GetRequest) returns (User) { option idempotency_level = NO_SIDE_EFFECTS; }
//
// It reads the descriptors that generated code registers (protoregistry.GlobalFiles). A
// method that is not registered is not idempotent.
func Idempotent(method string) bool {
	name := strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", ".")
	found, _ := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	descriptor, ok := found.(protoreflect.MethodDescriptor)
	if !ok {
		return false
	}
	options, _ := descriptor.Options().(*descriptorpb.MethodOptions)
	return options.GetIdempotencyLevel() != descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
}

var (
	errCrashed  = status.Error(codes.Unknown, "resiliencegrpc: an attempt panicked, and the call may not be sent again")
	errNoCall   = errors.New("resiliencegrpc: the Middleware lost the ctx of the call")
	errNoAnswer = errors.New("resiliencegrpc: the Middleware returned no error, but there is no answer")
)
