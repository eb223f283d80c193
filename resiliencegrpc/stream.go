package resiliencegrpc

import (
	"context"
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
)

// A stream is a [grpc.ClientStream] that the policies have let its caller open. They hold
// nothing for it, and hear of its end.
type stream struct {
	grpc.ClientStream
	call
	desc    *grpc.StreamDesc
	cancel  context.CancelCauseFunc
	sent    *evidence
	work    *resilience.Work
	waiting atomic.Int32 // calls in which the caller waits for the server, or did when it ended

	mu       sync.Mutex
	returned bool   // the policies have
	ended    *error // what they hear of the end; nil until then
}

// An unheld ctx asks BeginWork for work whose end policies observe, but until which they hold nothing.
type unheld struct{ context.Context }

// UnheldWork returns true. internal/linger calls it.
func (unheld) UnheldWork() bool { return true }

// stream is a [grpc.StreamClientInterceptor].
func (cl *client) stream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	streamer grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	if ctx.Err() != nil {
		return nil, withStatus(ctx, resilience.ContextErr(ctx), false)
	}
	s := &stream{desc: desc}
	s.call = call{ctx: ctx, client: cl, method: method, make: func(ctx context.Context, sent *evidence) error {
		return s.open(ctx, sent, func(
			ctx context.Context, sent *evidence, finish func(error),
		) (grpc.ClientStream, error) {
			return streamer(ctx, desc, cc, method, sent.options(opts, finish)...)
		})
	}}
	ctx, s.work = resilience.BeginWork(unheld{ctx})
	handed := false
	defer func() {
		if !handed { // a policy has refused, panicked or ended the goroutine
			s.end(nil)
		}
		s.tell(true)
	}()
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	handed = true
	return s, nil
}

// open opens the stream. Until it is open, it ends with the ctx of the attempt, and then with
// that of the caller alone: policies cancel a ctx that they have derived when they return.
func (s *stream) open(
	attempt context.Context, sent *evidence,
	dial func(context.Context, *evidence, func(error)) (grpc.ClientStream, error),
) error {
	within, cancel := context.WithCancelCause(s.ctx)
	leave := context.AfterFunc(attempt, func() { cancel(resilience.ContextErr(attempt)) })
	var opened atomic.Bool
	defer func() {
		if !opened.Load() {
			leave()
			cancel(nil)
		}
	}()
	inner, hidden := resilience.BeginWork(attempt)
	hidden.End(nil) // interceptors further in hear nothing of the stream's end
	seen := new(evidence)
	finish := func(err error) {
		seen.finished.Store(true)
		if opened.Load() {
			s.end(s.result(err, s.waiting.Load() > 0))
		}
	}
	dialed, err := dial(&streamContext{within, inner}, seen, finish)
	switch {
	case err != nil && seen.finished.Load(): // else gRPC may still write to it
		sent.trailer, sent.peer = seen.trailer, seen.peer
		sent.finished.Store(true)
	case err == nil && !leave():
		err = status.FromContextError(attempt.Err()).Err()
	}
	if err != nil {
		if s.ctx.Err() != nil {
			awaitEnd(attempt)
		}
		if status.Code(err) == codes.Canceled && attempt.Err() == context.DeadlineExceeded {
			err = status.FromContextError(attempt.Err()).Err()
		}
		return err
	}
	s.ClientStream, s.cancel, s.sent = dialed, cancel, seen
	s.work.Continue()
	opened.Store(true)
	if seen.finished.Load() { // a moment ago
		s.end(s.result(context.Canceled, false))
	}
	return nil
}

// A streamContext is the ctx of a stream. It has the values of the attempt that opened it, and
// the deadline of the caller, which is the one that the server is told.
type streamContext struct {
	context.Context // derived from the caller's
	attempt         context.Context
}

// Value returns what the attempt's ctx has for key. What package context asks for is the end of
// the stream, and not of the attempt.
func (c *streamContext) Value(key any) any {
	v := c.attempt.Value(key)
	if _, isCtx := v.(context.Context); isCtx {
		return c.Context.Value(key)
	}
	return v
}

// RecvMsg receives a message. Its error, or the only message of a stream without others, is the
// end of the stream.
func (s *stream) RecvMsg(m any) error {
	s.waiting.Add(1)
	err := s.ClientStream.RecvMsg(m)
	s.waiting.Add(-1)
	if err != nil || !s.desc.ServerStreams {
		s.end(s.result(err, true))
	}
	return err
}

// SendMsg sends a message. After io.EOF gRPC has a status for the stream, or is about to. Any
// other error has ended it on this side.
func (s *stream) SendMsg(m any) error {
	s.waiting.Add(1)
	err := s.ClientStream.SendMsg(m)
	switch {
	case err == nil:
		s.waiting.Add(-1)
	case err != io.EOF:
		s.end(nil)
	}
	return err
}

// Header waits for the header. Without one, gRPC has a status for the stream, or is about to.
func (s *stream) Header() (metadata.MD, error) {
	s.waiting.Add(1)
	md, err := s.ClientStream.Header()
	if md != nil {
		s.waiting.Add(-1)
	}
	return md, err
}

// result returns what the policies hear of the end of a stream with err, as gRPC tells it.
// waiting is whether its caller waited for the server: if not, the program or its caller ended
// it, and not the server.
func (s *stream) result(err error, waiting bool) error {
	switch {
	case err == nil || err == io.EOF:
		return nil
	case s.ctx.Err() == context.Canceled:
		return resilience.ContextErr(s.ctx)
	case !waiting:
		return nil
	}
	e := newStatusError(s.ctx, s.method, err, s.sent)
	if resilience.Answered(e) {
		return nil
	}
	return e
}

// end ends the stream. A call after the first changes nothing.
func (s *stream) end(result error) {
	if s.cancel != nil {
		s.cancel(nil)
	}
	s.mu.Lock()
	if s.ended == nil {
		s.ended = &result
	}
	s.mu.Unlock()
	s.tell(false)
}

// tell lets the policies hear of the end, when it has come and they have returned.
func (s *stream) tell(returned bool) {
	s.mu.Lock()
	s.returned = s.returned || returned
	over := s.returned && s.ended != nil
	s.mu.Unlock()
	if over {
		s.work.End(*s.ended)
	}
}
