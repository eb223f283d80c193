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

// A Server specifies the policies of a [grpc.Server]: which calls the server serves, and how many at the same
// time. Every field is optional. Each call passes first Limit, then Slots, then Middleware, and finally
// reaches its handler. A stream is one call, which lasts until its handler returns.
//
// A refused call ends with one of these statuses:
//
//   - RESOURCE_EXHAUSTED if a limit is used up, or if the call costs more than the limit can ever hold.
//   - UNAVAILABLE if there is no capacity: no slot is free, a breaker is open, or a limit refused the call for another
//     reason, such as an outage of its store or a cooldown.
//   - DEADLINE_EXCEEDED if a timeout of the Middleware passed.
//
// If the policy that refused the call specifies when to retry, the client receives this time. The time is in a
// RetryInfo detail of the status and in the trailer grpc-retry-pushback-ms. If a retry cannot help, the trailer
// grpc-retry-pushback-ms is -1. The client receives no other information about the policy. A handler may make
// calls under policies of its own, for example under the breaker of a database. If such a policy refuses a call
// and the handler returns the policy's error, the same statuses apply.
//
// The Middleware sees a handler's error as a [*StatusError]. If the client cancels the call, if its
// connection breaks, or if its deadline passes, the ctx of the policies is also done. The policies then
// attribute an error of the handler to the client's cancellation or deadline. A timeout of the Middleware
// cancels the ctx of a stream's handler, but does not interrupt RecvMsg and SendMsg while they wait for the
// client.
//
// gRPC receives and decodes the request of a unary call before the policies run, so the policies do not limit
// the memory for requests. Limit the size of requests with [grpc.MaxRecvMsgSize], and the number of streams
// on each connection with [grpc.MaxConcurrentStreams].
type Server struct {
	// Limit limits the rate of calls for each key. If Slots or the Middleware then refuses the call, Limit still
	// counts the call. Nil means no limit.
	Limit resiliencehttp.Admitter

	// Key returns the key of a call for Limit. Derive the key from facts about the client that the server has
	// verified, such as its address or its authenticated account. A client that can choose its own key can
	// choose a new key for each call, and is then not limited. A key of more than 200 bytes is replaced by
	// its SHA-256. Nil means [ClientIP] without trusted proxies.
	Key func(context.Context) string

	// Slots limits how many calls are served at the same time. If Slots has several priority levels, its
	// Priority function derives the level of a call from the call's ctx. An earlier interceptor can put
	// information about the client into the call's ctx. Nil means no limit.
	Slots *bulkhead.Bulkhead

	// StreamSlots limits how many streams are served at the same time. If StreamSlots is set, streams do not take
	// slots from Slots. Nil means that streams take slots from Slots, like unary calls.
	StreamSlots *bulkhead.Bulkhead

	// Middleware holds further policies around the handler: a breaker, for example, or a [resilience.Chain]
	// of several policies. The handler of a call runs only once, so a retrier has no use here. Nil means no
	// further policies.
	Middleware resilience.Middleware

	// Exempt reports whether calls to a method bypass all policies of the Server. method is the full name,
	// such as "/users.v1.Users/Get". Nil exempts the methods of the services grpc.health.v1.Health and
	// grpc.reflection.*.ServerReflection. If a server without free capacity refused health checks, its load
	// balancer would consider it down.
	Exempt func(method string) bool
}

// Options returns options for [grpc.NewServer] that add the interceptors of s. Interceptors run in the order
// in which options add them. Key can read values from the call's ctx, and so can the functions Priority and
// Share of a bulkhead. An interceptor that was added earlier must set these values.
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

// chain returns the policies that guard a call: Limit, then slots, then Middleware.
func (s Server) chain(slots *bulkhead.Bulkhead) policies {
	var all []resilience.Middleware
	// Limit may hold a nil pointer, for example to a group that the program creates only if it is configured.
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

// policies run around the handler of the call in their ctx.
type policies resilience.Func

// serve calls the handler under the policies. It returns the error for the client.
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

// A service is the state of a call that is being served.
type service struct {
	ctx      context.Context // the ctx of the policies
	method   string
	handler  resilience.Func
	called   bool  // the handler was called
	returned bool  // the handler returned without a panic
	err      error // the handler's error
}

type serviceKey struct{}

// serve is the function that the policies wrap. It calls the handler of the call in ctx.
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

// result returns the error for the client after the policies have returned err.
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

// shortKey returns key, or the SHA-256 of key if it has more than 200 bytes. A group stores its keys, so
// clients that send long keys could otherwise fill the memory.
func shortKey(key string) string {
	if len(key) <= 200 {
		return key
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(key)))
}

// A guardedStream is the stream that a handler receives. Its ctx is the ctx of the policies.
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

// awaitEnd waits until ctx, the ctx of a policy, is done. It is called when the caller's ctx is done, or is
// about to be. If the call returned before ctx is done, the policy would count the call's error as a failure
// of the server.
func awaitEnd(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Second): // a policy's ctx may outlive the caller's ctx
	}
}

// ClientIP returns a function that returns the address of a call's client, as a key for limits. The key is an
// IPv4 address, or the /64 prefix of an IPv6 address, because a client usually has all addresses of its /64
// prefix.
//
// Usually the client's address is the remote address of the connection. If the remote address belongs to a
// trusted proxy, ClientIP reads the metadata x-forwarded-for and returns the rightmost address that is not
// trusted. The client may have forged the addresses to the left of the returned address. If the metadata
// x-forwarded-for is malformed, ClientIP returns the proxy's address, and all clients that send malformed
// metadata share one limit. Trust a proxy only if it appends the client's address to the metadata of each
// call. Without trusted proxies, all clients behind a proxy share the proxy's address.
//
// If the connection has no IP address, like a Unix socket, the key is the connection's address as text.
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
