package resiliencegrpc

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
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
// call or its deadline passes, the ctx that the policies run under ends too, and they
// ignore what the handler makes of that. A timeout of the Middleware ends the ctx of a
// stream's handler, but no RecvMsg or SendMsg that waits for the client.
//
// A request is received and decoded before any of this: bound its size with
// [grpc.MaxRecvMsgSize], and the streams of a connection with
// [grpc.MaxConcurrentStreams].
type Server struct {
	// Limit bounds the rate of calls for each key. Nil means no limit.
	Limit Admitter

	// Key returns the key of a call for Limit and MessageLimit. Take it from what the
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

	// ShareBy returns the share that a call has in Slots and StreamSlots, such as its tenant,
	// so that the flood of one does not use up what all share: it becomes the Share of their
	// [bulkhead.Config]. Take it from what the server knows about the client. Of a share of
	// more than 200 bytes its SHA-256 is kept. Nil means that there are no shares.
	ShareBy func(context.Context) string

	// MessageLimit bounds the rate of messages that a client sends on its streams, for
	// each key. A stream whose message is over the limit ends as a call that is
	// refused, whatever its handler returns; with a MaxWait, its messages are received
	// later, and the client has to slow down. Nil means no limit.
	MessageLimit Admitter

	// Middleware runs the handler of a call: a breaker, or a [resilience.Chain] of several
	// policies. A call is served once, so a retrier is of no use here. Nil means none.
	Middleware resilience.Middleware

	// Exempt reports whether calls of a full method pass without any of this. Nil means
	// those of [HealthOrReflection].
	Exempt func(method string) bool
}

// An Admitter is a limit for each key: a *[throttle.Group] of strings.
type Admitter interface {
	// Admit takes what a call costs from the limit of key. It returns what is left, and an
	// error if the call is refused.
	Admit(ctx context.Context, key string) (throttle.Decision, error)
}

// HealthOrReflection reports whether a full method is one of the services
// grpc.health.v1.Health and grpc.reflection.*.ServerReflection. They must answer while the
// server is full, or it is taken for one that is down.
func HealthOrReflection(method string) bool {
	return strings.HasPrefix(method, "/grpc.health.v1.Health/") ||
		strings.HasPrefix(method, "/grpc.reflection.v1.ServerReflection/") ||
		strings.HasPrefix(method, "/grpc.reflection.v1alpha.ServerReflection/")
}

// Options returns options for [grpc.NewServer]. They add interceptors, which run in the
// order in which all options add them. If Key, ShareBy or a Priority reads from the ctx of a
// call, an interceptor before these puts it there.
//
// Options panics if ShareBy is set and Slots and StreamSlots are nil, or no call waits in one
// of them, whose MaxWait is 0. Several servers may share slots by their ShareBy; calls of these
// bulkheads that serve nothing keep the Share that these have.
func (s Server) Options() []grpc.ServerOption {
	if s.Key == nil {
		s.Key = ClientIP()
	}
	if s.StreamSlots == nil {
		s.StreamSlots = s.Slots
	}
	if s.Exempt == nil {
		s.Exempt = HealthOrReflection
	}
	s.Limit, s.MessageLimit = orNil(s.Limit), orNil(s.MessageLimit)
	if s.ShareBy != nil {
		s.share(s.Slots, s.StreamSlots)
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
				g := &guardedStream{ServerStream: ss, ctx: ctx, limit: s.MessageLimit}
				if s.MessageLimit != nil {
					g.key = shortKey(s.Key(ctx))
				}
				err := handler(srv, g)
				return cmp.Or(g.refusal(), err)
			}, ss.SetTrailer)
		}),
	}
}

// orNil returns nil for a nil pointer, such as that of a group that a program does without.
func orNil(limit Admitter) Admitter {
	if v := reflect.ValueOf(limit); v.Kind() == reflect.Pointer && v.IsNil() {
		return nil
	}
	return limit
}

// chain returns the policies of a call.
func (s Server) chain(slots *bulkhead.Bulkhead) policies {
	var all []resilience.Middleware
	if s.Limit != nil {
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
	return policies{resilience.Chain(all...)(serve), s.ShareBy}
}

// share makes ShareBy the Share of calls in the slots that are not nil.
func (s Server) share(slots ...*bulkhead.Bulkhead) {
	slots = slices.DeleteFunc(slots, func(b *bulkhead.Bulkhead) bool { return b == nil })
	if len(slots) == 0 {
		panic(errors.New("resiliencegrpc: ShareBy is set: must be nil, or Slots or StreamSlots be set"))
	}
	for _, b := range slots {
		err := b.Update(func(c *bulkhead.Config) {
			before := c.Share
			c.Share = func(ctx context.Context) string {
				if s, ok := ctx.Value(serviceKey{}).(*service); ok && s.shareBy != nil {
					return shortKey(s.shareBy(ctx))
				}
				if before != nil {
					return before(ctx)
				}
				return ""
			}
		})
		if err != nil {
			panic(err)
		}
	}
}

// policies runs the service that its ctx is, under all policies.
type policies struct {
	run     resilience.Func
	shareBy func(context.Context) string
}

// serve calls the handler under the policies. It returns what the client gets.
func (p policies) serve(
	ctx context.Context, method string, handler resilience.Func, setTrailer func(metadata.MD),
) error {
	s := &service{method: method, handler: handler, shareBy: p.shareBy}
	s.ctx = context.WithValue(ctx, serviceKey{}, s)
	err := s.result(p.run(s.ctx))
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
	shareBy func(context.Context) string
	served  bool
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
		return resilience.EndOf(ctx)
	}
	s.served = true
	s.err = s.handler(ctx)
	if s.err == nil {
		return nil
	}
	if resilience.Refused(s.err) {
		return s.err
	}
	return newStatusError(s.method, s.err, nil)
}

// result returns what the client gets after the policies have returned err.
func (s *service) result(err error) error {
	switch {
	case s.served && s.err == nil:
		return nil
	case s.served:
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
	ctx   context.Context
	limit Admitter // of messages; nil if there is none
	key   string

	mu      sync.Mutex
	refused error // by limit; ends the stream
}

func (s *guardedStream) Context() context.Context { return s.ctx }

// RecvMsg receives a message, and takes what it costs of the limit.
func (s *guardedStream) RecvMsg(m any) error {
	if err := s.refusal(); err != nil {
		return err
	}
	if err := s.ServerStream.RecvMsg(m); err != nil || s.limit == nil {
		return err
	}
	_, err := s.limit.Admit(s.ctx, s.key)
	if err == nil {
		return nil
	}
	err = withStatus(s.ctx, err, true)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = err
	return err
}

func (s *guardedStream) refusal() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused
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
	trusted = slices.Clone(trusted)
	return func(ctx context.Context) string {
		p, ok := peer.FromContext(ctx)
		if !ok || p.Addr == nil {
			return ""
		}
		forwarded := metadata.ValueFromIncomingContext(ctx, "x-forwarded-for")
		return resiliencehttp.ClientAddress(p.Addr.String(), forwarded, trusted...)
	}
}
