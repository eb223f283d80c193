package resiliencegrpc

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// A Server specifies which calls a [grpc.Server] serves, and how many at the same time. Every field is optional. A call
// passes Limit, then Slots, then Middleware, and is then served. A stream is one call, which lasts until its
// handler returns.
//
// A refused call ends with
//
//   - RESOURCE_EXHAUSTED if a limit is used up,
//   - UNAVAILABLE if there is no capacity: no slot is free, a breaker is open, or a limit refused the call for
//     another reason, such as an outage or too many keys,
//   - DEADLINE_EXCEEDED if a timeout of the Middleware passed.
//
// If the policy specifies when to retry, the status has a RetryInfo detail, and the trailer grpc-retry-pushback-ms
// has the same time. The trailer is -1 if a retry cannot help. The client gets no other information about the
// policy. The same applies if a handler returns the refusal of one of its own policies, such as the open breaker of
// a database.
//
// The Middleware sees the error of a handler as a [*StatusError]. If the client cancels the call, its connection
// breaks or its deadline passes, the ctx of the policies also ends, and a failure of the handler counts as the end
// of the caller. A timeout of the Middleware ends the ctx of a stream's handler, but does not interrupt RecvMsg and
// SendMsg while they wait for the client.
//
// gRPC receives and decodes the request of a unary call before the interceptors run. Limit the size of requests with
// [grpc.MaxRecvMsgSize], and the streams of a connection with [grpc.MaxConcurrentStreams].
type Server struct {
	// Limit limits the rate of calls for each key. Nil means no limit.
	Limit resiliencehttp.Admitter

	// Key returns the key of a call for Limit. Derive it from what the server knows about the client, such as
	// its address or its authenticated account. A client that can choose its key can choose a new key for each
	// call, and has no limit. A key of more than 200 bytes is replaced by its SHA-256. Nil means [ClientIP]
	// without trusted proxies.
	Key func(context.Context) string

	// Slots limits how many calls are served at the same time. If Slots has several levels, its Priority derives
	// the level of a call from the call's ctx. An earlier interceptor can put what the server knows about
	// the client into this ctx. Nil means no limit.
	Slots *bulkhead.Bulkhead

	// StreamSlots limits how many streams are served at the same time, instead of Slots. Nil means that streams
	// are served in Slots.
	StreamSlots *bulkhead.Bulkhead

	// Middleware runs the handler of a call: a breaker, or a [resilience.Chain] of several policies. A call is
	// served once, so a retrier has no use here. Nil means none.
	Middleware resilience.Middleware

	// Exempt reports whether calls of a full method pass without any of this. Nil means the methods of the
	// services grpc.health.v1.Health and grpc.reflection.*.ServerReflection. If a full server refused health
	// checks, it would be considered down.
	Exempt func(method string) bool
}

// Options returns options for [grpc.NewServer]. The options add interceptors, which run in the order in which all
// options add them. If Key, or a Priority or Share of the slots, reads a value of the call's ctx, an earlier
// interceptor must set this value.
func (s Server) Options() []grpc.ServerOption {
	if s.Key == nil {
		s.Key = ClientIP()
	}
	if s.StreamSlots == nil {
		s.StreamSlots = s.Slots
	}
	if s.Exempt == nil {
		s.Exempt = isHealthOrReflection
	}
	unary, stream := s.chain(s.Slots), s.chain(s.StreamSlots)
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(
			ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
		) (any, error) {
			if s.Exempt(info.FullMethod) {
				return handler(ctx, req)
			}
			var resp any
			err := unary.serve(ctx, info.FullMethod, func(ctx context.Context) (err error) {
				resp, err = handler(ctx, req)
				return err
			}, func(md metadata.MD) { _ = grpc.SetTrailer(ctx, md) })
			return resp, err
		}),
		grpc.ChainStreamInterceptor(func(
			srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler,
		) error {
			if s.Exempt(info.FullMethod) {
				return handler(srv, ss)
			}
			return stream.serve(ss.Context(), info.FullMethod, func(ctx context.Context) error {
				return handler(srv, &guardedStream{ss, ctx})
			}, ss.SetTrailer)
		}),
	}
}

// chain returns the policies of a call.
func (s Server) chain(slots *bulkhead.Bulkhead) policies {
	var all []resilience.Middleware
	// Limit may be a nil pointer, of a group that the program does not use.
	if v := reflect.ValueOf(s.Limit); v.IsValid() && !(v.Kind() == reflect.Pointer && v.IsNil()) {
		all = append(all, func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				if _, err := s.Limit.Admit(ctx, shortKey(s.Key(ctx))); err != nil {
					return err
				}
				return next(ctx)
			}
		})
	}
	if slots != nil {
		all = append(all, slots.Wrap)
	}
	all = append(all, s.Middleware)
	return policies(resilience.Chain(all...)(serve))
}

// policies serve the call that their ctx belongs to.
type policies resilience.Func

// serve calls the handler under the policies. It returns the error that the client gets.
func (p policies) serve(
	ctx context.Context, method string, handler resilience.Func, setTrailer func(metadata.MD),
) error {
	s := &service{method: method, handler: handler}
	s.ctx = context.WithValue(ctx, serviceKey{}, s)
	err := s.result(p(s.ctx))
	if refusal, ok := err.(*policyError); ok {
		if md := refusal.pushback(); md != nil {
			setTrailer(md)
		}
	}
	return err
}

// A service is the serving of a call.
type service struct {
	ctx      context.Context // the ctx of the policies
	method   string
	handler  resilience.Func
	called   bool  // the handler was called
	returned bool  // the handler has returned, and has not panicked
	err      error // the handler's error
}

type serviceKey struct{}

// serve is the function that the policies wrap. It calls the handler of the call that ctx belongs to.
func serve(ctx context.Context) error {
	s, ok := ctx.Value(serviceKey{}).(*service)
	switch {
	case !ok:
		return errNoCall
	case s.called:
		return errServed
	case ctx.Err() != nil:
		return resilience.ContextErr(ctx)
	}
	s.called = true
	s.err = s.handler(ctx)
	s.returned = true
	if s.err == nil {
		return nil
	}
	if resilience.Refused(s.err) {
		return s.err
	}
	return newStatusError(ctx, s.method, s.err, nil)
}

// result returns the error that the client gets after the policies have returned err.
func (s *service) result(err error) error {
	switch {
	case s.returned && s.err == nil:
		return nil
	case s.returned:
		return withStatus(s.ctx, s.err, true)
	case err == nil:
		err = errNotServed
	}
	return withStatus(s.ctx, err, true)
}

var (
	errServed    = retry.Permanent(errors.New("resiliencegrpc: call was already served"))
	errNotServed = status.Error(codes.Internal, "resiliencegrpc: Middleware did not serve the call")
)

// shortKey returns the key that a group stores for a key from outside: the SHA-256 of a key of more than 200 bytes.
// Otherwise clients that send long keys could fill the memory.
func shortKey(key string) string {
	if len(key) <= 200 {
		return key
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(key)))
}

// A guardedStream is the stream of a handler. Its ctx is that of the policies.
type guardedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *guardedStream) Context() context.Context { return s.ctx }

func (s *guardedStream) SendMsg(m any) error { return s.awaitEnd(s.ServerStream.SendMsg(m)) }
func (s *guardedStream) RecvMsg(m any) error { return s.awaitEnd(s.ServerStream.RecvMsg(m)) }

func (s *guardedStream) awaitEnd(err error) error {
	if code := status.Code(err); code == codes.Unavailable || code == codes.Canceled { // the client has disconnected
		awaitEnd(s.ctx)
	}
	return err
}

// awaitEnd waits for the end of ctx, the ctx of a policy, after the caller's ctx has ended. If a call returned before
// ctx ends, the policy would count the call's error as a failure of the server.
func awaitEnd(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Second): // the ctx of a policy need not end with the caller's
	}
}

// ClientIP returns a function that returns the address of a call's client, as a key for limits. The key is an IPv4
// address, or the /64 prefix of an IPv6 address, because a client usually has all addresses of its /64.
//
// The address is the address of the connection, unless that is a trusted proxy. In that case the address comes
// from the metadata x-forwarded-for: it is the rightmost address that is not trusted. The client may have forged the
// addresses to the left of it. If the metadata is malformed, the address is the proxy's, and all clients that send
// such metadata share one limit. Trust a proxy only if it adds to the metadata of each call. Without trusted proxies,
// all clients behind a proxy have the address of the proxy.
//
// If the connection has no IP address, such as a Unix socket, the key is the connection's address.
func ClientIP(trusted ...netip.Prefix) func(context.Context) string {
	return func(ctx context.Context) string {
		p, ok := peer.FromContext(ctx)
		if !ok || p.Addr == nil {
			return ""
		}
		forwarded := metadata.ValueFromIncomingContext(ctx, "x-forwarded-for")
		return resiliencehttp.ClientAddress(p.Addr.String(), forwarded, trusted...)
	}
}
