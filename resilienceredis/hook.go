// Package resilienceredis runs the commands of github.com/redis/go-redis/v9 under policies,
// and has the functions by which throttle/fleet, redisstore and redislease reach Redis.
//
//	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
//	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(addr string) resilience.Middleware {
//		return resilience.Chain(
//			circuits.By(func(context.Context) string { return addr }), // one for each node
//			slots.Wrap, // one for all
//			resilience.Timeout(50*time.Millisecond), // of each command
//		)
//	}})
//	name, err := rdb.Get(ctx, "name").Result()
//
//	bare := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
//	limit := fleet.New(fleet.Config{
//		Name: "api", Meters: meters, Eval: resilienceredis.Eval(bare), EvalEach: resilienceredis.EvalEach(bare),
//	})
//	store := redisstore.New(redisstore.Config{ // on a server of its own, which keeps nothing on disk
//		Prefix: "users", Eval: resilienceredis.Eval(cache), Subscribe: resilienceredis.Subscribe(cache),
//	})
//
// # What a reply means
//
// The policies read a reply as an answer: redis.Nil, WRONGTYPE, NOSCRIPT, an error of a
// script, MOVED, ASK, NOAUTH, NOPERM and whatever else a server says that works. What says
// that the server cannot serve is a failure: LOADING, BUSY, OOM, MISCONF, READONLY,
// NOREPLICAS, MASTERDOWN, NOMASTERLINK, CLUSTERDOWN, TRYAGAIN, too many clients, a blocking
// command that was ended because the server has become a replica, and an EXEC or a script
// that was given up for one of these. So are errors of the network. A pool that has no
// connection left, in its PoolTimeout or by its MaxActiveConns, refuses: nothing was called.
// The end of a caller's ctx says nothing. The caller gets the error that go-redis has
// returned, redis.Nil as redis.Nil, or the refusal of a policy.
//
// # A server that hangs
//
// A breaker does not count a call whose caller's deadline passes before the Patience of its
// Config, 0.9 s by default. So a server that hangs opens no circuit for callers that allow
// less, unless a resilience.Timeout stands innermost that is shorter than what they allow.
//
// A limit of throttle/fleet, a redisstore and a redislease are such callers. They bear an outage by
// themselves: give them a client without a Hook.
//
// # Retries
//
// A Client retries by itself, MaxRetries times (3), within the policies: a command counts
// once, however often it was sent. Switch that off by MaxRetries: -1 and put a Retrier first
// in Node, for commands that may be repeated. A ClusterClient sends again, up to MaxRedirects
// times and perhaps to other nodes, outside of the policies, and a Ring up to MaxRetries
// times: each counts at its node.
//
// A Client also dials five times, 100 ms apart, within one command: a server that refuses
// connections looks like one that is slow. Switch that off by DialerRetries: 1.
//
// A dial, and what is sent to begin a connection, is part of the command that needs it, and
// counts once, with it. [Subscribe] is under no policy. Of another PubSub, what is sent to
// begin its connection is a call, and nothing else.
//
// The rules of errors are those of docs/protocol.md of the module; replies are those of
// https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors.
package resilienceredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/reply"
)

// A Config configures the policies of a client.
type Config struct {
	// Node returns the policies of a node, by its address. It is called once for a Client
	// and once for each node of a ClusterClient or a Ring, perhaps by several goroutines.
	// It is required.
	Node func(addr string) resilience.Middleware
}

// Hook runs the commands and the pipelines of client under policies: a pipeline, and a
// transaction, is one call. It is called before client is used. It panics if client is
// neither a *redis.Client nor a *redis.ClusterClient nor a *redis.Ring.
//
// Every refused command has the error of the policy that refused it, in a pipeline too.
func Hook(client redis.UniversalClient, cfg Config) {
	node := func(c *redis.Client) { c.AddHook(&hook{cfg.Node(c.Options().Addr)}) }
	switch c := client.(type) {
	case *redis.Client:
		node(c)
	case *redis.ClusterClient:
		c.OnNewNode(node)
	case *redis.Ring:
		c.OnNewNode(node) // is not told of the shards that NewRing has made
		for _, shard := range c.GetShardClients() {
			node(shard)
		}
	default:
		panic(fmt.Sprintf("resilienceredis: Hook: a %T, must be a Client, a ClusterClient or a Ring", client))
	}
}

type hook struct{ policies resilience.Middleware }

// A call is the ctx of a command or a pipeline that is under way. What begins its connection
// is part of it.
type call struct {
	context.Context
	cmd  redis.Cmder
	cmds []redis.Cmder
	sent bool
}

type callKey struct{}

func (c *call) Value(key any) any {
	if key == (callKey{}) {
		return c
	}
	return c.Context.Value(key)
}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

// DialHook adds no policies: a dial is part of the command that needs it.
func (h *hook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	guarded := h.policies(func(ctx context.Context) error {
		c := callOf(ctx)
		if c == nil {
			return errNoCall
		}
		return judged(next(ctx, c.cmd))
	})
	return func(ctx context.Context, cmd redis.Cmder) error {
		if callOf(ctx) != nil {
			return next(ctx, cmd)
		}
		return withoutVerdict(guarded(&call{Context: ctx, cmd: cmd}))
	}
}

func (h *hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	guarded := h.policies(func(ctx context.Context) error {
		c := callOf(ctx)
		if c == nil {
			return errNoCall
		}
		c.sent = true
		err := next(ctx, c.cmds)
		if i := slices.IndexFunc(c.cmds, failed); err == nil && i >= 0 {
			err = c.cmds[i].Err() // a ClusterClient returns at most that of the first
		}
		err = judged(err)
		if v, ok := err.(*verdict); ok && !v.refused && slices.ContainsFunc(c.cmds, failed) {
			v.answered = false // one failure is that of all
		}
		return err
	})
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if callOf(ctx) != nil {
			return next(ctx, cmds)
		}
		c := &call{Context: ctx, cmds: cmds}
		err := withoutVerdict(guarded(c))
		if !c.sent {
			for _, cmd := range cmds {
				cmd.SetErr(err)
			}
		}
		return err
	}
}

// withoutVerdict returns the error of go-redis that a verdict is about: callers compare it with
// redis.Nil and the like. Any other error is returned as it is.
func withoutVerdict(err error) error {
	if v, ok := err.(*verdict); ok {
		return v.error
	}
	return err
}

// failed reports whether cmd has failed, rather than been answered.
func failed(cmd redis.Cmder) bool {
	err := judged(cmd.Err())
	return err != nil && !resilience.Answered(err)
}

// A verdict is an error of go-redis with what it says of the server.
type verdict struct {
	error
	answered, refused bool
}

func (v *verdict) Unwrap() error  { return v.error }
func (v *verdict) Refused() bool  { return v.refused }
func (v *verdict) Answered() bool { return v.answered }

// judged returns err as the policies read it.
func judged(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) {
		return &verdict{err, false, true}
	}
	var answer redis.Error
	if !errors.As(err, &answer) || cannotServe(answer.Error()) {
		return err
	}
	return &verdict{err, true, false}
}

// cannotServe reports whether a reply says that the server cannot serve the command now,
// rather than what is wrong with the command or with who sends it.
func cannotServe(err string) bool {
	text := reply.Text(err)
	switch reply.Code(err) {
	case "LOADING", "BUSY", // it does something else first
		"OOM", "MISCONF", // it has no memory, or cannot write to its disk
		"READONLY", "NOREPLICAS", "MASTERDOWN", "NOMASTERLINK", // it is a replica, or has none
		"CLUSTERDOWN", "TRYAGAIN": // the slot is nobody's, or moves
		return true
	case "UNBLOCKED":
		return strings.Contains(text, "instance state changed") // it has become a replica
	}
	return strings.HasPrefix(text, "max number of clients")
}

var errNoCall = errors.New("resilienceredis: the policies lost the ctx of the command")
