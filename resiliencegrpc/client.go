package resiliencegrpc

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/retry"
)

// A Client says how the calls of a connection go through policies. One call of the
// policies is one attempt.
//
// # Unary calls
//
// The policies run on the caller's goroutine. They see a failed attempt as a
// [*StatusError]. The caller gets the error of the last attempt as gRPC returned it,
// unless a policy wrapped it.
//
// # Streams
//
// An attempt begins when the stream is opened, and the policies judge it when its first
// message or its end has arrived. A timeout (resilience.Timeout, the AttemptTimeout of a
// retrier) covers the time until then, and not the rest of the stream. The server is
// told the caller's deadline only.
//
// A bulkhead of this module holds the slot of a stream until RecvMsg has returned an
// error or io.EOF, the ctx of the stream has ended, or the connection is closed. One of
// these must happen: the slot of a stream that is neither drained nor canceled stays
// taken, and shows in how long the longest slot has been held. A stream that breaks off
// after its first message is one more failure for a breaker.
//
// A long-lived stream, such as a watch, holds its slot as long. Give such streams a
// connection and a Client of their own, or a limit that has room for them.
//
// A stream on which the server alone streams is retried, if its method may be repeated,
// until its first message has arrived or the caller has read its header. The caller waits
// for that in RecvMsg. The request is sent again as it was when it was sent first; one
// that is not a proto.Message must not be changed before the first message has arrived.
//
// The caller may send before it receives. Therefore the policies of a stream run on a
// goroutine of their own, until its first message or its end has arrived. A panic of a
// policy passes to the caller, in the call that opens the stream, in RecvMsg or in
// SendMsg.
//
// If a timeout passes while the caller is neither receiving nor sending, the server is
// not to blame. Policies treat the error as an answer ([resilience.Answered]).
//
// A Client may be used for several connections, which then share its policies.
type Client struct {
	// Middleware runs each attempt; usually a [resilience.Chain]. It is applied once for
	// each call of DialOptions. It may call what it wraps more than once, but one call
	// after the other, and none after it has returned. Nil means that calls are made as
	// they are.
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

// A call is one RPC on its way through the policies.
type call struct {
	ctx    context.Context // the caller's
	client *client
	method string // "/users.v1.Users/Get"

	accepted bool         // no attempt is to follow
	final    error        // not nil: nothing more may be sent, and this is why
	last     *StatusError // of the latest attempt that failed
}

// attempter is what a ctx holds for callKey.
type attempter interface {
	attempt(context.Context) error
	about() *call
}

type callKey struct{}

// begin returns the ctx that the policies of a call run under. The work is that of the call, and
// not that of a caller further out, such as a stream.
func begin(ctx context.Context, a attempter) (context.Context, *resilience.Work) {
	ctx, work := resilience.BeginWork(ctx)
	return context.WithValue(ctx, callKey{}, a), work
}

// attempt is what the policies wrap: it makes an attempt of the call in ctx.
func attempt(ctx context.Context) error {
	a, ok := ctx.Value(callKey{}).(attempter)
	if !ok {
		return errNoCall
	}
	c := a.about()
	switch {
	case c.accepted:
		return nil // an error would keep a policy going that tries again whatever it gets
	case c.final != nil:
		return c.final
	case ctx.Err() != nil:
		return resilience.EndOf(ctx)
	}
	returned := false
	defer func() {
		if !returned && !c.client.replayable(c.ctx, c.method) { // a panic, of which a policy may make an error
			c.final = retry.Permanent(errCrashed)
		}
	}()
	err := a.attempt(ctx)
	returned = true
	return err
}

// failed returns the error that the policies see in place of err, with which an attempt
// under ctx ended. sent is what is known of the attempt. again is whether the messages
// can be sent once more.
func (c *call) failed(ctx context.Context, err error, sent *evidence, again bool) error {
	if resilience.Refused(err) {
		return err // a policy further in made no call
	}
	e := newStatusError(c.method, err, sent)
	c.last = e
	if e.Code == codes.DeadlineExceeded && over(ctx) && !over(c.ctx) {
		e.worth = yes // a timeout of the attempt alone
	}
	e.may = sent.never() || again && c.client.replayable(c.ctx, c.method)
	if !e.may {
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

// result returns what the caller gets after the policies have returned err.
func (c *call) result(err error) error {
	switch {
	case c.accepted:
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

var (
	errCrashed  = status.Error(codes.Unknown, "resiliencegrpc: an attempt panicked, and the call may not be sent again")
	errNoCall   = errors.New("resiliencegrpc: the Middleware lost the ctx of the call")
	errNoAnswer = errors.New("resiliencegrpc: the Middleware returned no error, but there is no answer")
)
