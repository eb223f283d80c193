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

// A stream is the [grpc.ClientStream] that the caller receives. While it is open, the policies of the
// Middleware hold no slot for it and run no timeout. They are notified when the server has answered and when
// the stream has ended.
type stream struct {
	grpc.ClientStream // nil until the stream is open
	call
	desc    *grpc.StreamDesc
	ctx     context.Context         // derived from the caller's ctx; the stream ends when it is done
	cancel  context.CancelCauseFunc // cancels ctx; nil until the stream is open
	sent    *evidence
	work    *resilience.Work
	release func(error) // releases the slot of StreamSlots
	// waiting is the number of RecvMsg, SendMsg and Header calls that wait for the server, or that waited
	// when the stream ended.
	waiting atomic.Int32

	mu       sync.Mutex
	unwatch  func() bool // stops watching the caller's ctx; nil until the stream is open
	onAnswer []func()    // the functions to call when a message or the header arrives
	returned bool        // the policies have returned
	result   *error      // the result that the policies observe; nil until it is known
}

// A streamCtx marks the work of a ctx as a stream. Package internal/linger checks whether a ctx has the
// method OnAnswer, and calls it.
type streamCtx struct {
	context.Context
	s *stream
}

// OnAnswer calls f when the server has answered. The policies call OnAnswer before the caller receives the
// stream.
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
		if !delivered { // a policy returned an error, panicked or exited the goroutine
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

// open opens the stream. Until the stream is open, it ends when the attempt's ctx is done. An open stream
// ends only when the caller's ctx is done: policies may derive the attempt's ctx, and cancel a derived ctx
// when they return.
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
	hidden.End(nil) // policies in inner interceptors must not observe the stream's end
	seen := new(evidence)
	var early error // the error that finish received; valid if seen.finished was set before opened
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
	if seen.finished.Load() { // finish may have run before opened was set, and then did not call s.end
		s.end(s.resultOf(early, false))
	}
	return nil
}

// callerDone ends the stream when the caller's ctx is done. Usually gRPC also calls finish, but not if an
// inner interceptor dropped the call options.
func (s *stream) callerDone() {
	<-s.ctx.Done() // wait for the caller's cause, before s.end cancels s.ctx without a cause
	s.end(s.resultOf(status.FromContextError(s.call.ctx.Err()).Err(), s.waiting.Load() > 0))
}

// An innerCtx is the ctx of a stream for the inner interceptors and gRPC. Its values come from the ctx of the
// attempt that opened the stream. Its cancellation and its deadline come from the ctx of the stream.
type innerCtx struct {
	context.Context // the stream's
	attempt         context.Context
}

// Value returns the value of key in the attempt's ctx. There is one exception: package context itself calls Value
// to find the ctx whose cancellation it must follow. In this case, the value is a ctx, and Value returns the value
// in the stream's ctx.
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

// RecvMsg receives a message. The stream ends if RecvMsg returns an error, or if the server sends only one
// message and RecvMsg has received it.
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

// SendMsg sends a message. If SendMsg returns io.EOF, gRPC reports the stream's status separately, through
// RecvMsg and finish. Any other error of SendMsg means that the stream has ended on the client.
func (s *stream) SendMsg(m any) error {
	timer := s.await()
	err := s.ClientStream.SendMsg(m)
	s.waited(timer, err == nil)
	if err != nil && err != io.EOF {
		s.end(errAbandoned)
	}
	return err
}

// Header waits for the header. If the stream ends without a header, gRPC reports the stream's status
// separately, through RecvMsg and finish.
func (s *stream) Header() (metadata.MD, error) {
	timer := s.await()
	md, err := s.ClientStream.Header()
	s.waited(timer, md != nil)
	if md != nil {
		s.answer()
	}
	return md, s.idleError(err)
}

// await records that the caller starts to wait for the server. If the wait takes longer than Idle, the stream
// ends.
func (s *stream) await() (timer *time.Timer) {
	s.waiting.Add(1)
	if passed := s.client.idlePassed; passed != nil {
		timer = time.AfterFunc(passed.After, func() { s.cancel(passed) })
	}
	return timer
}

// waited ends the wait that await started, unless the stream has ended.
func (s *stream) waited(timer *time.Timer, open bool) {
	if timer != nil {
		timer.Stop()
	}
	if open {
		s.waiting.Add(-1)
	}
}

// answer notifies the policies that the server has answered. Only the first call has an effect.
func (s *stream) answer() {
	s.mu.Lock()
	notify := s.onAnswer
	s.onAnswer = nil
	s.mu.Unlock()
	for _, f := range notify {
		f()
	}
}

// isSilent reports whether the stream ended because the caller waited for longer than Idle.
func (s *stream) isSilent() bool {
	passed := s.client.idlePassed
	return passed != nil && context.Cause(s.ctx) == error(passed)
}

// idleError returns the error for the caller if the stream ended with err. If Idle canceled the stream, gRPC
// reports CANCELED, and idleError returns DEADLINE_EXCEEDED instead.
func (s *stream) idleError(err error) error {
	if err != nil && status.Code(err) == codes.Canceled && s.isSilent() {
		return &policyError{err: s.client.idlePassed, code: codes.DeadlineExceeded}
	}
	return err
}

// resultOf returns the result that the policies observe when the stream ends with err. waiting reports
// whether the caller was waiting for the server. If it was not, the program has ended the stream, and not the
// server.
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

// errAbandoned is the result of a stream that the client program ended without canceling its ctx. It matches
// context.Canceled, so breakers ignore the result.
var errAbandoned = fmt.Errorf("resiliencegrpc: client abandoned the stream: %w", context.Canceled)

// end ends the stream and releases its slot. The result of the first call is the stream's result, unless
// ReportFailure has already set one.
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

// setResult sets the result that the policies observe, unless a result is already set. It reports whether it
// has set the result.
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

// policiesReturned is called when the policies have returned. Only from then on may the policies be notified
// of the result.
func (s *stream) policiesReturned() {
	s.mu.Lock()
	s.returned = true
	result := s.result
	s.mu.Unlock()
	if result != nil {
		s.work.End(*result)
	}
}

// ReportFailure reports to the policies that a stream of a [Client] failed. Use it if the stream's status does not
// show the failure. For example, the stream's messages may show that the server no longer updates its data. A breaker
// counts err as a failure, unless err is an answer ([resilience.Answered]). ReportFailure does not end the stream, so
// cancel the stream's ctx after the call to ReportFailure.
//
// ReportFailure reports whether it had an effect. ReportFailure has no effect if err is nil, if the stream
// has ended, if the stream belongs to no Client, or if the stream's method is exempt. Interceptors may wrap
// the stream, but must keep its Context. ReportFailure may be called from any goroutine after the first
// RecvMsg or Header has returned.
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

// streamOf returns s as a stream, or the stream that s wraps, or nil if there is none.
func streamOf(s grpc.ClientStream) *stream {
	found, _ := s.Context().Value(streamKey{}).(*stream)
	return found
}
