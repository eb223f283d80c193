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
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/retry"
)

// A Client specifies how the calls on a connection pass through policies. Every field is optional.
//
// One call of the policies is one attempt: a unary call, or the opening of a stream. The policies run on the
// caller's goroutine. They see a failed attempt as a [*StatusError]. The caller gets the error of the last
// attempt as gRPC returned it, unless a policy wrapped the error.
//
// # Streams
//
// The policies guard the opening of a stream. During the opening, a bulkhead of the Middleware holds a slot, and
// a timeout of the Middleware (resilience.Timeout, the AttemptTimeout of a retrier) runs. Both end when the
// stream is open. To limit open streams, use StreamSlots and Idle. The server receives only the caller's
// deadline.
//
// A failed opening is retried like a unary call. An open stream is not repeated. gRPC opens a stream without
// waiting for the server. If a handler returns UNAVAILABLE immediately, RecvMsg returns the status, and no
// retrier sees it.
//
// A breaker counts the call of a stream as a success when the first message or the header arrives. If the stream
// ends before that, its end is the result of the call. If the stream breaks later, a failure replaces the success.
// An adaptive bulkhead and other middleware that observes the end of work (see [resilience.Work]) also get the
// result of the stream:
//
//   - If the server ends the stream with OK, or with a status that is an answer, such as NOT_FOUND, the stream
//     ended normally.
//   - If the server announces that it closes the connection (GOAWAY with NO_ERROR), and the connection is closed
//     before the stream ends, the stream also ended normally. A server does this at its MaxConnectionAge, and
//     when it shuts down.
//   - If the caller cancels, or if the program closes the connection or sends a message that cannot be encoded, the
//     error matches [context.Canceled], and a breaker ignores the result.
//   - If the caller's deadline passes, the stream failed if the caller was in RecvMsg, SendMsg or Header. Otherwise a
//     breaker ignores the result.
//   - If the server is silent for Idle, or ends the stream with any other status, the stream failed.
//
// The caller must let each stream end: RecvMsg returns an error or io.EOF, the stream's ctx ends, or the
// connection is closed.
//
// # What gRPC does not report
//
// A call may have to wait for a stream, because the connection has as many streams as the server allows
// (MaxConcurrentStreams). If the call ends during that wait, the policies ignore its result. gRPC does not
// report how long a call has waited. If the call gets a stream in time, a timeout of the Middleware includes the
// wait, and may count as a failure of the server.
//
// The policies also ignore a call that cannot be sent because this process has no file descriptor or local port left.
// gRPC reports this only as the text of an error.
//
// gRPC continues to use a connection whose server is silent. Set [grpc.WithKeepaliveParams] to replace such a
// connection.
//
// A Client may be used for several connections, which then share its policies.
type Client struct {
	// Middleware runs each attempt; usually it is a [resilience.Chain]. It is applied once for each call of
	// DialOptions. It may call the function that it wraps more than once, but only one call after another, and
	// not after it has returned. Nil means that calls pass unchanged.
	//
	// If middleware itself makes a call before the opening of a stream, to get a token for example, it must use
	// a different ctx for that call. Otherwise the policies of that call observe the stream's end.
	Middleware resilience.Middleware

	// Replayable reports whether sending a call of the method more than once has the effect of sending it once.
	// The method is a full one: "/users.v1.Users/Get". Nil means [Idempotent], which a function may also call.
	Replayable func(ctx context.Context, method string) bool

	// StreamSlots limits how many streams are open at the same time. A stream takes a slot before its opening
	// and the Middleware, and releases it when it ends. No timeout of the Middleware limits the wait for the
	// slot; the MaxWait of StreamSlots does. Nil means no limit.
	StreamSlots *bulkhead.Bulkhead

	// Idle is the longest time for which RecvMsg, SendMsg or Header of an open stream may wait for the server. A
	// caller that pauses between these calls costs nothing. If the server is silent for longer, the stream ends
	// with DEADLINE_EXCEEDED and a [*resilience.TimeoutError], as a failure of the server. A subscription
	// whose server has nothing to send needs a longer Idle than the longest pause. Zero or less means no limit.
	Idle time.Duration

	// Exempt reports whether calls of a full method pass without policies, slots and Idle. Nil means the methods
	// of the services grpc.health.v1.Health and grpc.reflection.*.ServerReflection: a health check must reach
	// the server even if a breaker is open.
	Exempt func(method string) bool
}

// DialOptions returns options for [grpc.NewClient]. The options add interceptors. Interceptors run in the order in
// which the options add them: an interceptor before these is called once for each call, and an interceptor
// after these is called once for each attempt. A Client without Middleware, StreamSlots and Idle has no options.
//
// The options disable the retries of a service config ([grpc.WithDisableRetry]), whether the config comes
// from the resolver or from the program. gRPC still repeats a call once if the server has certainly not processed
// it (a transparent retry). The policies do not see that.
func (c Client) DialOptions() []grpc.DialOption {
	if c.Middleware == nil && c.StreamSlots == nil && c.Idle <= 0 {
		return nil
	}
	if c.Replayable == nil {
		c.Replayable = func(_ context.Context, method string) bool { return Idempotent(method) }
	}
	if c.Exempt == nil {
		c.Exempt = isHealthOrReflection
	}
	cl := &client{Client: c, policies: resilience.Chain(c.Middleware)(attempt)}
	if c.Idle > 0 {
		cl.idlePassed = &resilience.TimeoutError{Name: "Idle", After: c.Idle}
	}
	return []grpc.DialOption{
		grpc.WithDisableRetry(),
		grpc.WithChainUnaryInterceptor(cl.unary),
		grpc.WithChainStreamInterceptor(cl.stream),
	}
}

// A client is a Client with its defaults.
type client struct {
	Client
	policies   resilience.Func
	idlePassed *resilience.TimeoutError // the cause that ends a silent stream; nil if there is no Idle
}

func isHealthOrReflection(method string) bool {
	return strings.HasPrefix(method, "/grpc.health.v1.Health/") ||
		strings.HasPrefix(method, "/grpc.reflection.v1.ServerReflection/") ||
		strings.HasPrefix(method, "/grpc.reflection.v1alpha.ServerReflection/")
}

// unary is a [grpc.UnaryClientInterceptor].
func (cl *client) unary(
	ctx context.Context, method string, req, reply any,
	cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	if cl.Exempt(method) {
		return invoker(ctx, method, req, reply, cc, opts...)
	}
	if ctx.Err() != nil {
		return withStatus(ctx, resilience.ContextErr(ctx), false)
	}
	c := &call{ctx: ctx, client: cl, method: method, send: func(ctx context.Context, sent *evidence) error {
		finish := func(error) { sent.finished.Store(true) }
		return invoker(ctx, method, req, reply, cc, sent.options(opts, finish)...)
	}}
	ctx, work := resilience.BeginWork(ctx)
	work.End(nil) // the call ends with its function, even if the work of the caller's ctx continues
	return c.run(ctx)
}

// A call is an RPC that passes through the policies.
type call struct {
	ctx    context.Context // the caller's
	client *client
	method string                                 // "/users.v1.Users/Get"
	send   func(context.Context, *evidence) error // makes one attempt

	succeeded bool            // an attempt has succeeded, and no other may follow
	final     error           // the error of every further attempt; nil if another attempt may be sent
	last      *StatusError    // the error of the latest failed attempt
	wrong     *wrongCallError // the error of an attempt that was wrong in itself; usually nil
}

type callKey struct{}

// run runs the policies under ctx and returns the error that the caller gets.
func (c *call) run(ctx context.Context) error {
	err := c.client.policies(context.WithValue(ctx, callKey{}, c))
	if c.wrong != nil {
		c.wrong.decided.Store(true)
	}
	switch {
	case c.succeeded:
		return nil
	case err == nil && c.last != nil:
		return c.last.Err
	case err == nil:
		return errNoAttempt
	case err == c.final:
		err = errors.Unwrap(err)
	}
	switch e := err.(type) {
	case *StatusError:
		return e.Err // as gRPC returned it
	case *notMadeError:
		return e.Err
	case *wrongCallError:
		return e.Err
	}
	return withStatus(c.ctx, err, false)
}

// attempt is the function that the policies wrap. It makes an attempt of the call that ctx belongs to.
func attempt(ctx context.Context) error {
	c, ok := ctx.Value(callKey{}).(*call)
	switch {
	case !ok:
		return errNoCall
	case c.succeeded:
		return nil // an error would make a policy that retries every error continue
	case c.final != nil:
		return c.final
	case ctx.Err() != nil:
		return resilience.ContextErr(ctx)
	}
	returned := false
	defer func() {
		if !returned && !c.client.Replayable(c.ctx, c.method) { // a policy may recover the panic and retry
			c.final = retry.Permanent(errCrashed)
		}
	}()
	var sent evidence
	err := c.send(ctx, &sent)
	returned = true
	switch {
	case err == nil:
		c.succeeded = true
		return nil
	case resilience.Refused(err):
		return err // an inner policy has not made the call
	}
	e := newStatusError(ctx, c.method, err, &sent)
	c.last = e
	if e.Code == codes.DeadlineExceeded && isDone(ctx) && !isDone(c.ctx) {
		e.worth = yes // only the attempt's own timeout has passed
	}
	neverSent := sent.neverSent()
	e.may = neverSent || c.client.Replayable(c.ctx, c.method)
	err = e
	if st := e.GRPCStatus(); e.local {
		c.wrong = &wrongCallError{StatusError: e}
		err = c.wrong
	} else if neverSent && (endedInWait(st) || isOwnShortage(st)) {
		err = &notMadeError{e}
	}
	if !e.may {
		c.final = retry.Permanent(err)
		return c.final
	}
	return err
}

// isDone reports whether ctx has ended. If the deadline of ctx has passed, ctx has ended: gRPC often returns
// before ctx is canceled.
func isDone(ctx context.Context) bool {
	if ctx.Err() != nil {
		return true
	}
	deadline, ok := ctx.Deadline()
	return ok && !time.Now().Before(deadline)
}

// evidence is what gRPC reports about an attempt through call options.
type evidence struct {
	trailer  metadata.MD
	peer     peer.Peer
	finished atomic.Bool // gRPC no longer writes to the other fields
}

// options returns opts with the options that collect the evidence. gRPC calls finish with the result of the
// attempt.
func (e *evidence) options(opts []grpc.CallOption, finish func(error)) []grpc.CallOption {
	return slices.Concat(opts, []grpc.CallOption{grpc.Trailer(&e.trailer), grpc.Peer(&e.peer), grpc.OnFinish(finish)})
}

// neverSent reports whether the call was certainly never sent: gRPC has finished the call, and knows no connection
// that the call was sent on. If an inner interceptor does not pass the options to gRPC, neverSent returns false.
func (e *evidence) neverSent() bool { return e.finished.Load() && e.peer.Addr == nil }

// MethodOf returns the full method, such as "/users.v1.Users/Get", of the call that ctx belongs to. It returns "" if
// ctx belongs to no call. ctx may be that of a policy, an observer or a handler. The method is a key for
// groups, such as a group with a breaker for each method of a service.
func MethodOf(ctx context.Context) string {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c.method
	}
	method, _ := grpc.Method(ctx)
	return method
}

// Idempotent reports whether a full method, such as "/users.v1.Users/Get", is declared to have no side effects or to
// be idempotent:
//
//	rpc Get(GetRequest) returns (User) { option idempotency_level = NO_SIDE_EFFECTS; }
//
// Idempotent reads the descriptors that generated code registers in protoregistry.GlobalFiles. A method that is not
// registered is not idempotent.
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
	errCrashed   = status.Error(codes.Unknown, "resiliencegrpc: attempt panicked and may not be repeated")
	errNoCall    = errors.New("resiliencegrpc: Middleware did not pass on the ctx of the call")
	errNoAttempt = errors.New("resiliencegrpc: Middleware returned no error but made no attempt")
)
