package resiliencegrpc

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
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

// A Server says which calls a [grpc.Server] serves, and how many. Every field is
// optional. A call passes the Limit, then the Slots, then the Middleware, and is then
// served. A stream counts as one call, which lasts as long as its handler runs.
//
// A call that is refused ends with
//
//   - RESOURCE_EXHAUSTED if a limit is used up,
//   - UNAVAILABLE if there is no capacity: no slot is free, a circuit is open, or a limit
//     refused for another reason, such as an outage or too many keys,
//   - DEADLINE_EXCEEDED if a timeout of the Middleware passed.
//
// If the policy says when to come back, the status has a RetryInfo detail, and the trailer
// grpc-retry-pushback-ms says the same. The trailer is -1 if another call is of no use.
// The client learns nothing else of the policy. The same holds where a handler
// returns the refusal of a policy of its own, such as the open circuit of a database.
//
// To the Middleware, the error of a handler is a [*StatusError]. If the client cancels the
// call, its connection breaks or its deadline passes, the ctx that the policies run under ends too,
// and to them a failure of the handler is the end of their caller. A timeout of the Middleware ends
// the ctx of a stream's handler, but no RecvMsg or SendMsg that waits for the client.
//
// The request of a unary call is received and decoded before any of this: bound its size with
// [grpc.MaxRecvMsgSize], and the streams of a connection with
// [grpc.MaxConcurrentStreams].
type Server struct {
	// Limit bounds the rate of calls for each key. Nil means no limit.
	Limit resiliencehttp.Admitter

	// Key returns the key of a call for Limit. Take it from what the
	// server knows about the client, such as its address or its authenticated account. A
	// client that can choose its key can choose a new one for each call, and has no limit.
	// Of a key of more than 200 bytes its SHA-256 is kept. Nil means [ClientIP] without
	// trusted proxies.
	Key func(context.Context) string

	// Slots bounds how many calls are served at once. If it has several levels, its
	// Priority finds the level of a call in the call's ctx, where an interceptor before
	// these can put what the server knows about the client. Nil means no bound.
	Slots *bulkhead.Bulkhead

	// StreamSlots bounds how many streams are served at once, in the place of Slots. Nil
	// means that streams are served in Slots.
	StreamSlots *bulkhead.Bulkhead

	// Middleware runs the handler of a call: a breaker, or a [resilience.Chain] of several
	// policies. A call is served once, so a retrier is of no use here. Nil means none.
	Middleware resilience.Middleware

	// Exempt reports whether calls of a full method pass without any of this. Nil means those of
	// the services grpc.health.v1.Health and grpc.reflection.*.ServerReflection: they must answer
	// while the server is full, or it is taken for one that is down.
	Exempt func(method string) bool
}

// Options returns options for [grpc.NewServer]. They add interceptors, which run in the
// order in which all options add them. If Key, or a Priority or Share of the slots, reads from
// the ctx of a call, an interceptor before these puts it there.
func (s Server) Options() []grpc.ServerOption {
	if s.Key == nil {
		s.Key = ClientIP()
	}
	if s.StreamSlots == nil {
		s.StreamSlots = s.Slots
	}
	if s.Exempt == nil {
		s.Exempt = healthOrReflection
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

func healthOrReflection(method string) bool {
	return strings.HasPrefix(method, "/grpc.health.v1.Health/") ||
		strings.HasPrefix(method, "/grpc.reflection.v1.ServerReflection/") ||
		strings.HasPrefix(method, "/grpc.reflection.v1alpha.ServerReflection/")
}

// chain returns the policies of a call.
func (s Server) chain(slots *bulkhead.Bulkhead) policies {
	var all []resilience.Middleware
	// A nil pointer is that of a group that a program does without.
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

// policies run the service in their ctx.
type policies resilience.Func

// serve calls the handler under the policies. It returns what the client gets.
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

// A service is a call on its way to its handler.
type service struct {
	ctx     context.Context // that its policies run under
	method  string
	handler resilience.Func
	served  bool
	ended   bool  // the handler has returned, and not panicked
	err     error // of the handler
}

type serviceKey struct{}

// serve is what the policies wrap: it calls the handler of the service in ctx.
func serve(ctx context.Context) error {
	s, ok := ctx.Value(serviceKey{}).(*service)
	switch {
	case !ok:
		return errNoCall
	case s.served:
		return errServed
	case ctx.Err() != nil:
		return resilience.ContextErr(ctx)
	}
	s.served = true
	s.err = s.handler(ctx)
	s.ended = true
	if s.err == nil {
		return nil
	}
	if resilience.Refused(s.err) {
		return s.err
	}
	return newStatusError(ctx, s.method, s.err, nil)
}

// result returns what the client gets after the policies have returned err.
func (s *service) result(err error) error {
	switch {
	case s.ended && s.err == nil:
		return nil
	case s.ended:
		return withStatus(s.ctx, s.err, true)
	case err == nil:
		err = errNotServed
	}
	return withStatus(s.ctx, err, true)
}

var (
	errServed    = retry.Permanent(errors.New("resiliencegrpc: the call has been served and is not served again"))
	errNotServed = status.Error(codes.Internal, "resiliencegrpc: the Middleware did not serve the call")
)

// shortKey returns a key from outside as a group keeps it: one of more than 200 bytes is its
// SHA-256. Otherwise whoever sends long keys fills the memory.
func shortKey(key string) string {
	if len(key) <= 200 {
		return key
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(key)))
}

// A guardedStream is the stream of a handler, under the ctx of the policies.
type guardedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *guardedStream) Context() context.Context { return s.ctx }

func (s *guardedStream) SendMsg(m any) error { return s.awaitEnd(s.ServerStream.SendMsg(m)) }
func (s *guardedStream) RecvMsg(m any) error { return s.awaitEnd(s.ServerStream.RecvMsg(m)) }

func (s *guardedStream) awaitEnd(err error) error {
	if code := status.Code(err); code == codes.Unavailable || code == codes.Canceled { // the client is gone
		awaitEnd(s.ctx)
	}
	return err
}

// awaitEnd waits for the ctx that policies see, once another that the caller's end reaches has ended: until then,
// an error would say something of the server.
func awaitEnd(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Second): // not all end with the caller's
	}
}

// ClientIP returns a function that names the client of a call by its address, to limit by: an
// IPv4 address, or the /64 of an IPv6 address, since a client usually has all addresses of
// its /64.
//
// It is the address of the connection, unless that belongs to a trusted proxy. Then it is
// taken from the metadata x-forwarded-for: the rightmost address that is not trusted. The
// client may have forged the addresses to the left of it. If the metadata is malformed, it is
// the address of the proxy, so that all clients that forge it share one limit. Trust a proxy
// only if it adds to it for each call. Without trusted proxies, all clients behind a proxy have
// its address.
//
// For a connection without an IP address, such as a Unix socket, it is the address as the
// connection has it.
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
