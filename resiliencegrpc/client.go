package resiliencegrpc

import (
	"context"
	"errors"
	"net"
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
// An attempt is one unary call that is sent to the server, or one opening of a stream. The policies run
// around the attempts, on the caller's goroutine. The policies see the error of a failed attempt as a
// [*StatusError]. The caller receives the last attempt's error as gRPC returned it, unless a policy wrapped
// the error.
//
// # Streams
//
// The policies guard only the opening of a stream. Bulkheads in the Middleware hold a slot until the stream
// is open. Timeouts in the Middleware, such as resilience.Timeout and a retrier's AttemptTimeout, also stop
// when the stream is open. To limit open streams, use StreamSlots and Idle. The deadline that gRPC sends to
// the server is the caller's deadline, not a timeout of the Middleware.
//
// A failed opening is retried like a unary call. An open stream is not repeated. gRPC opens a stream without
// waiting for the server's reply. Even if the server's handler returns UNAVAILABLE immediately, the stream is
// already open: RecvMsg returns the status, and retriers do not see it.
//
// A breaker counts a stream as a success when the first message or the header arrives. If the stream ends before the
// first message and the header, the breaker counts the stream's result. If the stream fails later, the breaker
// replaces the success by a failure. When the stream ends, an adaptive bulkhead and other middleware that calls
// OnEnd of [resilience.Work] also receive the stream's result. The result is:
//
//   - If the server ends the stream with OK, or with a status that is an answer, such as NOT_FOUND, the stream
//     ended normally.
//   - If the server announces that it will close the connection (GOAWAY with NO_ERROR), and then closes the
//     connection before the stream ends, the stream also ended normally. A server sends a GOAWAY with
//     NO_ERROR when a connection reaches MaxConnectionAge, and when the server shuts down.
//   - If the caller cancels the stream, if the program closes the connection, or if the program sends a message that
//     cannot be encoded, the client itself ended the stream. The error then matches [context.Canceled], and a breaker
//     ignores the result.
//   - If the caller's deadline passes while the caller waits in RecvMsg, SendMsg or Header, the stream
//     failed. If the deadline passes while the caller is in none of these methods, a breaker ignores the
//     result.
//   - If the caller waits for the server for longer than Idle, or if the server ends the stream with a status
//     that is neither OK nor an answer, the stream failed.
//
// [resilience.AtEnd] does not wait for the end of a stream: it calls its function when the opening returns.
//
// The caller must make sure that each stream ends. A stream ends when RecvMsg returns an error or io.EOF,
// when the stream's ctx is done, or when the connection is closed.
//
// # What gRPC does not report
//
// Each call needs an HTTP/2 stream. If a connection already has as many streams as the server allows
// (MaxConcurrentStreams), the call waits. If the call ends while it waits for a stream, the policies ignore
// the call's result. A timeout of the Middleware includes the wait for a stream, because gRPC does not report
// the duration of the wait. If the timeout expires after the wait, the timeout may therefore count as a
// failure of the server.
//
// If a call cannot be sent because this process has no file descriptor or local port left, the policies also
// ignore the call's result. gRPC reports the lack of a descriptor or port only in the text of an error.
//
// gRPC continues to use a connection even if the server no longer sends anything on it. To replace a
// connection on which the server sends nothing, set [grpc.WithKeepaliveParams].
//
// A Client may be used for several connections, which then share its policies.
type Client struct {
	// Middleware holds the policies, usually a [resilience.Chain]. DialOptions applies it once, to a function
	// that makes one attempt. Middleware may call this function more than once, but not concurrently, and not
	// after Middleware itself has returned. Interceptors after the Client's interceptors must not call their
	// invoker or streamer concurrently, either. To hedge calls, use an interceptor before the Client's
	// interceptors. Nil means no policies.
	//
	// Middleware may itself call a server before a stream is opened, for example to get a token. For such a call,
	// Middleware must use a different ctx. Otherwise the policies of that call would treat the end of the stream
	// as the end of that call.
	Middleware resilience.Middleware

	// Replayable reports whether calls to a method may be sent more than once. A call may be sent more than once
	// if repeating it has no further effect. method is the full name, such as "/users.v1.Users/Get". Nil means
	// [Idempotent], which your own function may also call.
	Replayable func(ctx context.Context, method string) bool

	// StreamSlots limits how many streams are open at the same time. A stream takes a slot before the
	// Middleware opens it, and releases the slot when the stream ends. The wait for the slot is limited by
	// the MaxWait of StreamSlots, and not by a timeout of the Middleware. Nil means no limit.
	StreamSlots *bulkhead.Bulkhead

	// Idle is the maximum time that each RecvMsg, SendMsg or Header of an open stream may wait for the server.
	// Pauses in which the caller does not wait for the server do not count. If a wait takes longer than Idle,
	// the stream ends with DEADLINE_EXCEEDED and a [*resilience.TimeoutError], and counts as a failure of the
	// server. For a subscription, Idle must be longer than any pause in which the server has nothing to send.
	// Zero or less means no limit.
	Idle time.Duration

	// Exempt reports whether calls to a method bypass Middleware, StreamSlots and Idle. method is the full
	// name, such as "/users.v1.Users/Get". Nil exempts the methods of the services grpc.health.v1.Health and
	// grpc.reflection.*.ServerReflection, because a health check must reach the server even if a breaker is
	// open.
	Exempt func(method string) bool
}

// DialOptions returns options for [grpc.NewClient] that add the interceptors of c. Interceptors run in the
// order in which options add them. An interceptor that was added before the interceptors of c runs once for
// each call. An interceptor that was added after the interceptors of c runs once for each attempt. If
// Middleware, StreamSlots and Idle are all unset, DialOptions returns no options.
//
// DialOptions disables all retries that a service config specifies (see [grpc.WithDisableRetry]). gRPC still
// repeats a call once if the server has certainly not processed the call. The policies do not see this
// transparent retry of gRPC.
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

// A client is a Client with its defaults filled in.
type client struct {
	Client
	policies   resilience.Func
	idlePassed *resilience.TimeoutError // the cause that ends a stream after Idle; nil if there is no Idle
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
	work.End(nil) // a unary call ends when it returns, even if it is part of work that continues
	return c.run(ctx)
}

// A call is an RPC that passes through the policies.
type call struct {
	ctx    context.Context // the caller's
	client *client
	method string                                 // "/users.v1.Users/Get"
	send   func(context.Context, *evidence) error // makes one attempt

	succeeded bool            // an attempt has succeeded; no further attempt is sent
	final     error           // the error of all further attempts, none of which is sent; nil if the call may be repeated
	last      *StatusError    // the error of the latest failed attempt
	wrong     *wrongCallError // the error of an attempt that the caller's own mistake made fail; usually nil
}

type callKey struct{}

// run runs the policies under ctx and returns the error for the caller.
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

// attempt is the function that the policies wrap. It makes one attempt of the call in ctx.
func attempt(ctx context.Context) error {
	c, ok := ctx.Value(callKey{}).(*call)
	switch {
	case !ok:
		return errNoCall
	case c.succeeded:
		return nil // after an error, a policy that retries every error would resend the call
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
		return err // a policy in an inner interceptor did not start the call
	}
	e := newStatusError(ctx, c.method, err, &sent)
	c.last = e
	if e.Code == codes.DeadlineExceeded && isDone(ctx) && !isDone(c.ctx) {
		e.worth = yes // only the attempt's own timeout has expired
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

// isDone reports whether ctx is done. A ctx whose deadline has expired counts as done even if it is not
// canceled yet, because gRPC often returns before ctx is canceled.
func isDone(ctx context.Context) bool {
	if ctx.Err() != nil {
		return true
	}
	deadline, ok := ctx.Deadline()
	return ok && !time.Now().Before(deadline)
}

// evidence is the information about an attempt that gRPC reports through call options.
type evidence struct {
	trailer  metadata.MD
	peer     peer.Peer
	finished atomic.Bool // gRPC has finished the call and no longer writes to the other fields
}

// options returns opts with the options that collect the evidence. gRPC calls finish with the result of the
// attempt.
func (e *evidence) options(opts []grpc.CallOption, finish func(error)) []grpc.CallOption {
	e.peer.Addr = noConn{}
	return slices.Concat(opts, []grpc.CallOption{grpc.Trailer(&e.trailer), grpc.Peer(&e.peer), grpc.OnFinish(finish)})
}

// A noConn is the address in an evidence until gRPC reports the connection that the call was sent on. It is
// not nil, because a connection of a custom dialer may have no address.
type noConn struct{ net.Addr }

// neverSent reports whether the call was certainly never sent. This is the case if gRPC has finished the call
// without reporting the connection that it was sent on. If an inner interceptor does not pass the options to
// gRPC, neverSent returns false.
func (e *evidence) neverSent() bool { return e.finished.Load() && e.peer.Addr == net.Addr(noConn{}) }

// MethodOf returns the full method, such as "/users.v1.Users/Get", of the call that ctx belongs to. MethodOf
// returns "" if ctx belongs to no call. MethodOf works in policies, observers and handlers. The result of
// MethodOf can be the key of a [resilience.Group], for example of a group with a breaker for each method.
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
