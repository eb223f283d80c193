package resiliencegrpc

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
)

// A stream is the [grpc.ClientStream] that the caller gets. The policies hold nothing for it. They are notified of
// its answer and of its result.
type stream struct {
	grpc.ClientStream // nil until the stream is open
	call
	desc    *grpc.StreamDesc
	ctx     context.Context         // derived from the caller's; its end ends the stream
	cancel  context.CancelCauseFunc // of ctx; nil until the stream is open
	sent    *evidence
	work    *resilience.Work
	release func(error)  // releases the slot of StreamSlots
	waiting atomic.Int32 // number of calls in which the caller waits for the server, or waited when the stream ended

	mu       sync.Mutex
	unwatch  func() bool // stops watching the caller's ctx; nil until the stream is open
	onAnswer []func()    // the functions to call when a message or the header arrives
	returned bool        // the policies have returned
	result   *error      // the result that the policies observe; nil until it is known
}

// A streamCtx makes the work of ctx a stream: internal/linger calls OnAnswer.
type streamCtx struct {
	context.Context
	s *stream
}

// OnAnswer calls f when the server has answered. The policies call OnAnswer before the caller gets the stream.
func (c streamCtx) OnAnswer(f func()) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.onAnswer = append(c.s.onAnswer, f)
}

// stream is a [grpc.StreamClientInterceptor].
func (cl *client) stream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	streamer grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	if cl.Exempt(method) {
		return streamer(ctx, desc, cc, method, opts...)
	}
	if ctx.Err() != nil {
		return nil, withStatus(ctx, resilience.ContextErr(ctx), false)
	}
	s := &stream{desc: desc, release: func(error) {}}
	s.call = call{ctx: ctx, client: cl, method: method, send: func(ctx context.Context, sent *evidence) error {
		return s.open(ctx, sent, func(
			ctx context.Context, sent *evidence, finish func(error),
		) (grpc.ClientStream, error) {
			return streamer(ctx, desc, cc, method, sent.options(opts, finish)...)
		})
	}}
	if cl.StreamSlots != nil {
		release, err := cl.StreamSlots.Begin(context.WithValue(ctx, callKey{}, &s.call))
		if err != nil {
			return nil, withStatus(ctx, err, false)
		}
		s.release = release
	}
	ctx, s.work = resilience.BeginWork(streamCtx{ctx, s})
	delivered := false
	defer func() {
		if !delivered { // a policy has refused, panicked or exited the goroutine
			s.end(errAbandoned)
		}
		s.policiesReturned()
	}()
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	delivered = true
	return s, nil
}

// open opens the stream. During the opening, the stream ends with the ctx of the attempt. Afterwards it ends only with
// the caller's ctx, because policies cancel a derived ctx when they return.
func (s *stream) open(
	attempt context.Context, sent *evidence,
	newStream func(context.Context, *evidence, func(error)) (grpc.ClientStream, error),
) error {
	ctx, cancel := context.WithCancelCause(s.call.ctx)
	leave := context.AfterFunc(attempt, func() { cancel(resilience.ContextErr(attempt)) })
	var opened atomic.Bool
	defer func() {
		if !opened.Load() {
			leave()
			cancel(nil)
		}
	}()
	inner, hidden := resilience.BeginWork(attempt)
	hidden.End(nil) // the policies of inner interceptors do not observe the stream's end
	seen := new(evidence)
	var early error // the error of finish; valid if seen.finished is set before opened
	finish := func(err error) {
		early = err
		seen.finished.Store(true)
		if opened.Load() {
			s.end(s.resultOf(err, s.waiting.Load() > 0))
		}
	}
	opening, err := newStream(&innerCtx{ctx, inner}, seen, finish)
	switch {
	case err != nil && seen.finished.Load(): // otherwise gRPC may still write to seen
		sent.trailer, sent.peer = seen.trailer, seen.peer
		sent.finished.Store(true)
	case err == nil && !leave():
		err = status.FromContextError(attempt.Err()).Err()
	}
	if err != nil {
		if s.call.ctx.Err() != nil {
			awaitEnd(attempt)
		}
		if st := status.Convert(err); st.Code() == codes.Canceled && attempt.Err() == context.DeadlineExceeded {
			message := st.Message()
			if endedInWait(st) {
				message = attempt.Err().Error()
			}
			err = status.Error(codes.DeadlineExceeded, message)
		}
		return err
	}
	s.ClientStream, s.ctx, s.cancel, s.sent = opening, ctx, cancel, seen
	s.work.Continue()
	opened.Store(true)
	s.mu.Lock()
	s.unwatch = context.AfterFunc(s.call.ctx, s.callerDone)
	s.mu.Unlock()
	if seen.finished.Load() { // perhaps before opened was set
		s.end(s.resultOf(early, false))
	}
	return nil
}

// callerDone ends the stream when the caller's ctx has ended. gRPC also calls finish then, unless an inner interceptor
// does not pass on the call options.
func (s *stream) callerDone() {
	<-s.ctx.Done() // the cause is the caller's, and not that of end
	s.end(s.resultOf(status.FromContextError(s.call.ctx.Err()).Err(), s.waiting.Load() > 0))
}

// An innerCtx is the ctx that the inner interceptors and gRPC get for a stream. It has the values of the attempt that
// opened the stream, and the end and deadline of the stream.
type innerCtx struct {
	context.Context // the stream's
	attempt         context.Context
}

// Value returns the attempt's value of key. If that is a ctx, package context is looking for the ctx that can be
// canceled, which is the stream's.
func (c *innerCtx) Value(key any) any {
	v := c.attempt.Value(key)
	if _, isCtx := v.(context.Context); isCtx {
		return c.Context.Value(key)
	}
	return v
}

// Context returns the ctx of the stream, in which [ReportFailure] finds s.
func (s *stream) Context() context.Context {
	return context.WithValue(s.ClientStream.Context(), streamKey{}, s)
}

type streamKey struct{}

// RecvMsg receives a message. An error, or the only message of a stream without others, ends the stream.
func (s *stream) RecvMsg(m any) error {
	timer := s.await()
	err := s.idleError(s.ClientStream.RecvMsg(m))
	s.waited(timer, err == nil)
	if err != nil {
		s.end(s.resultOf(err, true))
		return err
	}
	s.answer()
	if !s.desc.ServerStreams {
		s.end(nil)
	}
	return nil
}

// SendMsg sends a message. If it returns io.EOF, gRPC has, or will have, a status for the stream. Any other error has
// ended the stream on the client.
func (s *stream) SendMsg(m any) error {
	timer := s.await()
	err := s.ClientStream.SendMsg(m)
	s.waited(timer, err == nil)
	if err != nil && err != io.EOF {
		s.end(errAbandoned)
	}
	return err
}

// Header waits for the header. If there is none, gRPC has, or will have, a status for the stream.
func (s *stream) Header() (metadata.MD, error) {
	timer := s.await()
	md, err := s.ClientStream.Header()
	s.waited(timer, md != nil)
	if md != nil {
		s.answer()
	}
	return md, s.idleError(err)
}

// await notes that the caller waits for the server. If it waits for Idle, the stream ends.
func (s *stream) await() (timer *time.Timer) {
	s.waiting.Add(1)
	if passed := s.client.idlePassed; passed != nil {
		timer = time.AfterFunc(passed.After, func() { s.cancel(passed) })
	}
	return timer
}

// waited ends the wait that await began, unless the stream has ended.
func (s *stream) waited(timer *time.Timer, open bool) {
	if timer != nil {
		timer.Stop()
	}
	if open {
		s.waiting.Add(-1)
	}
}

// answer notifies the policies that the server has answered. A call after the first has no effect.
func (s *stream) answer() {
	s.mu.Lock()
	notify := s.onAnswer
	s.onAnswer = nil
	s.mu.Unlock()
	for _, f := range notify {
		f()
	}
}

// isSilent reports whether Idle has ended the stream.
func (s *stream) isSilent() bool {
	passed := s.client.idlePassed
	return passed != nil && context.Cause(s.ctx) == error(passed)
}

// idleError returns err, or the error of a silent stream if gRPC reports that the stream was canceled because of Idle.
func (s *stream) idleError(err error) error {
	if err != nil && status.Code(err) == codes.Canceled && s.isSilent() {
		return &policyError{err: s.client.idlePassed, code: codes.DeadlineExceeded}
	}
	return err
}

// resultOf returns the result that the policies observe when the stream ends with err. waiting is whether the caller
// was waiting for the server. If not, the program has ended the stream, and not the server.
func (s *stream) resultOf(err error, waiting bool) error {
	switch {
	case err == nil || err == io.EOF:
		return nil
	case s.call.ctx.Err() == context.Canceled:
		return resilience.ContextErr(s.call.ctx)
	case s.isSilent():
		err = s.idleError(err)
	case !waiting:
		return errAbandoned
	}
	sent := s.sent
	if !sent.finished.Load() {
		sent = new(evidence) // gRPC may still write to s.sent
	}
	e := newStatusError(s.call.ctx, s.method, err, sent)
	switch {
	case e.local:
		return errAbandoned
	case resilience.Answered(e), closedAsAnnounced(e.GRPCStatus()):
		return nil
	}
	return e
}

// errAbandoned is the result of a stream that the program has ended without canceling it. A breaker ignores the result,
// because it matches context.Canceled.
var errAbandoned = fmt.Errorf("resiliencegrpc: client abandoned the stream: %w", context.Canceled)

// end ends the stream and releases its slot. The first call determines the result, unless ReportFailure has.
func (s *stream) end(result error) {
	s.mu.Lock()
	unwatch := s.unwatch
	s.mu.Unlock()
	if unwatch != nil {
		unwatch()
	}
	if s.cancel != nil {
		s.cancel(nil)
	}
	s.release(result)
	s.setResult(result)
}

// setResult sets the result that the policies observe. It reports whether there was none before.
func (s *stream) setResult(result error) bool {
	s.mu.Lock()
	first := s.result == nil
	if first {
		s.result = &result
	}
	notify := first && s.returned
	s.mu.Unlock()
	if notify {
		s.work.End(result)
	}
	return first
}

// policiesReturned is called when the policies have returned. They can observe the result only after that.
func (s *stream) policiesReturned() {
	s.mu.Lock()
	s.returned = true
	result := s.result
	s.mu.Unlock()
	if result != nil {
		s.work.End(*result)
	}
}

// ReportFailure reports to the policies that a stream of a [Client] failed although its status does not show it. For
// example, the stream's messages show that the server has stopped updating them. A breaker counts err as a failure,
// unless err is an answer ([resilience.Answered]). Cancel the stream's ctx afterwards: ReportFailure does not end
// the stream.
//
// ReportFailure returns false, and has no effect, if the stream has ended, if it is not a stream of a Client or
// is exempt, or if err is nil. An interceptor may wrap the stream, but must pass on its Context. ReportFailure may be
// called from any goroutine, after the first RecvMsg or Header has returned.
func ReportFailure(s grpc.ClientStream, err error) bool {
	if s == nil || err == nil {
		return false
	}
	reported := false
	for inner := streamOf(s); inner != nil; inner = streamOf(inner.ClientStream) {
		reported = inner.setResult(err) || reported
	}
	return reported
}

// streamOf returns the stream that s is or wraps, or nil.
func streamOf(s grpc.ClientStream) *stream {
	found, _ := s.Context().Value(streamKey{}).(*stream)
	return found
}
