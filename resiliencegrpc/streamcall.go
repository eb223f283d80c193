package resiliencegrpc

import (
	"context"
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/retry"
)

// A streamCall is a streaming RPC.
//
// The policies run on a goroutine of their own, until they have judged the first message.
// Each of their attempts opens a try. The caller's goroutine sends and receives on the
// latest try: the first result of RecvMsg goes to the attempt, and RecvMsg waits for what
// the policies make of it.
type streamCall struct {
	call
	desc     *grpc.StreamDesc
	cc       *grpc.ClientConn
	streamer grpc.Streamer
	opts     []grpc.CallOption
	work     *resilience.Work

	lingers bool        // messages may follow the first one; set before the policies return
	going   atomic.Bool // the policies have returned, and the caller has the stream

	mu       sync.Mutex // guards what follows
	changed  sync.Cond  // for try and over
	try      *try       // the latest that was opened
	over     bool       // the policies have returned
	err      error      // what the caller gets then
	panicked any        // with which a policy panicked
	// What the caller did before the first message:
	request any  // a copy of the only message that it sent, if the call may be repeated
	header  bool // it has seen the header of a try
}

// stream is a [grpc.StreamClientInterceptor].
func (cl *client) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if ctx.Err() != nil {
		return nil, withStatus(ctx, resilience.EndOf(ctx), false)
	}
	c := &streamCall{
		call: call{ctx: ctx, client: cl, method: method},
		desc: desc, cc: cc, streamer: streamer, opts: opts,
	}
	c.changed.L = &c.mu
	var policies context.Context
	policies, c.work = begin(ctx, c)
	go c.run(policies)
	if t, err := c.await(nil); t == nil {
		return nil, err
	}
	return &stream{c}, nil
}

func (c *streamCall) about() *call { return &c.call }

// run runs the policies under ctx.
func (c *streamCall) run(ctx context.Context) {
	err := errExit
	defer func() { c.settle(err, recover()) }()
	err = c.result(c.client.policies(ctx))
}

// settle lets the caller know how the policies ended.
func (c *streamCall) settle(err error, panicked any) {
	if err != nil || !c.lingers {
		c.work.End(nil)
		if c.try != nil {
			c.try.ctx.drop()
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over, c.err, c.panicked = true, err, panicked
	c.going.Store(err == nil)
	c.changed.Broadcast()
}

// await returns the latest try when that is another one than last, or when the policies
// have returned. In this case err is what the caller gets.
func (c *streamCall) await(last *try) (t *try, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.try == last && !c.over {
		c.changed.Wait()
	}
	if c.panicked != nil {
		panic(c.panicked)
	}
	if c.over {
		return last, c.err
	}
	return c.try, nil
}

// attempt opens a try, and waits until the caller has received something on it.
func (c *streamCall) attempt(ctx context.Context) error {
	t := &try{call: c, ctx: newTryContext(ctx, c.ctx), first: make(chan outcome, 1)}
	defer func() {
		if !c.accepted {
			t.ctx.drop()
		}
	}()
	var err error
	opts := t.sent.options(c.opts, t.finish)
	if t.ClientStream, err = c.streamer(t.ctx, c.desc, c.cc, c.method, opts...); err != nil {
		return c.failed(ctx, t.reason(err), &t.sent, true)
	}
	if err := t.resend(); err != nil {
		return c.failed(ctx, t.reason(err), &t.sent, false)
	}
	c.mu.Lock()
	c.try = t
	c.changed.Broadcast()
	c.mu.Unlock()

	var o outcome
	select {
	case o = <-t.first:
	case <-t.ctx.Done():
		if !t.receiving.Load() {
			t.tell(outcome{unasked: true}) // unless RecvMsg has just returned
		}
		o = <-t.first
	}
	switch {
	case o.unasked && t.ctx.Err() != nil:
		return c.left(t)
	case o.unasked:
		return c.end(&StatusError{Method: c.method, Code: status.Code(o.err), Err: o.err, local: true})
	}
	return c.judge(ctx, t, o.err)
}

// judge returns what the policies get to see of the first result of RecvMsg.
func (c *streamCall) judge(ctx context.Context, t *try, err error) error {
	if err != nil && err != io.EOF {
		return c.failed(ctx, t.reason(err), &t.sent, c.repeats())
	}
	c.accepted = true
	t.ctx.extend()
	if err == nil && c.desc.ServerStreams {
		c.lingers = true
		c.work.GoOn()
	}
	return nil
}

// left returns what the policies get to see of a try that ended with its ctx while the
// caller was not receiving. The server is to blame only if the caller waited for it in
// another way.
func (c *streamCall) left(t *try) error {
	code := codes.Canceled
	if t.ctx.timedOut() {
		code = codes.DeadlineExceeded
	}
	err := status.Error(code, "the stream ended before a message was received")
	return c.end(&StatusError{Method: c.method, Code: code, Err: err, local: !t.sending.Load() && !t.heading.Load()})
}

// end returns e for the policies, as one after which nothing is sent.
func (c *streamCall) end(e *StatusError) error {
	c.last = e
	c.final = retry.Permanent(e)
	return c.final
}

// repeats reports whether a stream that has been opened can be opened again, with the
// same messages.
func (c *streamCall) repeats() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.request != nil && !c.header
}

var errExit = status.Error(codes.Internal, "resiliencegrpc: the Middleware did not return")

// A try is a stream that gRPC opened for an attempt.
type try struct {
	grpc.ClientStream
	call  *streamCall
	ctx   *tryContext
	sent  evidence
	first chan outcome // what the attempt waits for; holds one

	// The caller is in RecvMsg, SendMsg or Header; or it was in one of the latter two when
	// the stream ended.
	receiving, sending, heading atomic.Bool
}

// An outcome is the first thing that happened to a try.
type outcome struct {
	err     error // of RecvMsg, or with which gRPC ended the stream
	unasked bool  // gRPC ended it for a reason on this side, while nobody received
}

// tell tells the attempt of the first outcome. Others are dropped.
func (t *try) tell(o outcome) {
	select {
	case t.first <- o:
	default:
	}
}

// resend sends the request on the try, if it was sent on an earlier one.
func (t *try) resend() error {
	t.call.mu.Lock()
	request := t.call.request
	t.call.mu.Unlock()
	if request == nil {
		return nil
	}
	return t.SendMsg(request)
}

// finish is called by gRPC when the stream is over, while the caller receives or not.
func (t *try) finish(err error) {
	t.sent.finished.Store(true)
	if t.receiving.Load() || t.heading.Load() {
		return // RecvMsg is to say how it ended
	}
	t.tell(outcome{err: err, unasked: true})
	t.endIfFinished()
}

// endIfFinished gives back what is held for the stream if gRPC has finished it, the
// policies have returned, and the caller is not receiving. Each of the three that comes
// true calls it.
func (t *try) endIfFinished() {
	if t.sent.finished.Load() && t.call.going.Load() && !t.receiving.Load() {
		t.end(nil)
	}
}

// end ends the work of the policies with err, which RecvMsg returned to the caller.
func (t *try) end(err error) {
	t.ctx.drop()
	t.call.work.End(t.brokeOff(err))
}

// brokeOff returns how the stream broke off, or nil if that says nothing of the server.
func (t *try) brokeOff(err error) error {
	if err == nil || err == io.EOF {
		return nil
	}
	e := newStatusError(t.call.method, err, &t.sent)
	if resilience.Answered(e) {
		return nil
	}
	return e
}

// reason returns the error of a try, which a timeout has ended as a cancel of its ctx.
func (t *try) reason(err error) error {
	if status.Code(err) == codes.Canceled && t.ctx.timedOut() {
		return status.FromContextError(context.DeadlineExceeded).Err()
	}
	return err
}
