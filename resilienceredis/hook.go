// Package resilienceredis runs the commands of github.com/redis/go-redis/v9 under policies, and provides the
// functions through which throttle/fleet, redisstore and redislease use Redis.
//
//	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
//	resilienceredis.Hook(rdb, resilienceredis.Config{Node: func(addr string) resilience.Middleware {
//		return resilience.Chain(
//			breakers.By(func(context.Context) string { return addr }), // one breaker for each node
//			slots.Wrap, // one bulkhead for all nodes
//			resilience.Timeout(50*time.Millisecond), // for each command
//		)
//	}})
//	name, err := rdb.Get(ctx, "name").Result()
//
//	bare := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
//	limit := fleet.New(fleet.Config{
//		Name: "api", Meters: meters, Eval: resilienceredis.Eval(bare), EvalEach: resilienceredis.EvalEach(bare),
//	})
//	defer limit.Close(ctx)
//	store := redisstore.New(redisstore.Config{ // on a dedicated server that keeps nothing on disk
//		Prefix: "users", Eval: resilienceredis.Eval(cache), Subscribe: resilienceredis.Subscribe(cache),
//	})
//
// # How replies are classified
//
// A reply of a server that works is an answer for the policies: redis.Nil, WRONGTYPE, NOSCRIPT, an error of a
// script, MOVED, ASK, NOAUTH, NOPERM and so on. A reply of a server that cannot serve the command is a failure:
// LOADING, BUSY, OOM, MISCONF, READONLY, NOREPLICAS, MASTERDOWN, NOMASTERLINK, CLUSTERDOWN, TRYAGAIN, too many
// clients, a blocking command that ended because the server has become a replica, and an EXEC or a script that
// failed with one of these. Network errors are failures. A pool that has no free connection within its
// PoolTimeout, or because of MaxActiveConns, refuses: nothing was sent. If the caller's ctx ends, the call counts
// neither as a success nor as a failure. The caller gets the error of go-redis unchanged, redis.Nil as redis.Nil,
// or the refusal of a policy.
//
// # Servers that hang
//
// A breaker does not count a call whose caller's deadline passes before the Patience of its Config, 0.9s by
// default. So a server that hangs opens no breaker for callers with shorter deadlines, unless the innermost policy
// is a resilience.Timeout that is shorter than these.
//
// A limit of throttle/fleet, a redisstore and a redislease are such callers. They handle outages by themselves:
// give them a client without a Hook.
//
// # Retries
//
// A Client retries by itself, MaxRetries times (3), within the policies: a command counts once, however often it
// was sent. To switch that off, set MaxRetries: -1, and make a Retrier the first policy in Node for commands that
// may be repeated. A ClusterClient resends up to MaxRedirects times, perhaps to other nodes, outside of the
// policies, and a Ring up to MaxRetries times: each attempt counts at its node.
//
// A Client also dials five times, 100 ms apart, within one command, so a server that refuses connections seems to be
// slow. To switch that off, set DialerRetries: 1.
//
// A dial, and the commands that set up a connection, are part of the command that needs the connection, and count
// once, with it. [Subscribe] is under no policy. Of another PubSub, the commands that set up its connection are
// calls, and nothing else is.
//
// # A cluster that changes
//
// go-redis reloads the state of a cluster once a minute, and after a redirect, but not after a refused connection.
// The functions [Eval], [EvalEach] and [Subscribe] have it reloaded after every error that is not a reply. They
// work again within about two seconds after the replica of a dead master has taken over.
//
// docs/protocol.md of the module describes how errors are classified. Replies are documented at
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
)

// A Config configures the policies of a client.
type Config struct {
	// Node returns the policies for a node, by its address. It is called once for a Client and once for each node of a
	// ClusterClient or a Ring, possibly by several goroutines. Required.
	Node func(addr string) resilience.Middleware
}

// Hook runs the commands and the pipelines of client under policies. A pipeline is one call, and so is a
// transaction. Call Hook before client is used. It panics if client is neither a *redis.Client nor a
// *redis.ClusterClient nor a *redis.Ring.
//
// Every refused command has the error of the policy that refused it, including each command of a pipeline.
func Hook(client redis.UniversalClient, cfg Config) {
	node := func(c *redis.Client) { c.AddHook(&hook{cfg.Node(c.Options().Addr)}) }
	switch c := client.(type) {
	case *redis.Client:
		node(c)
	case *redis.ClusterClient:
		c.OnNewNode(node)
	case *redis.Ring:
		c.OnNewNode(node) // is not called for the shards that exist since NewRing
		for _, shard := range c.GetShardClients() {
			node(shard)
		}
	default:
		panic(fmt.Sprintf("resilienceredis: Hook: a %T, must be a Client, a ClusterClient or a Ring", client))
	}
}

// A hook runs the commands of one node under policies.
type hook struct{ policies resilience.Middleware }

// A call is the ctx of a command or a pipeline in flight. The commands that set up its connection are part of it.
type call struct {
	context.Context
	cmd  redis.Cmder
	cmds []redis.Cmder
	sent bool
}

type callKey struct{}

// Value returns c for callKey.
func (c *call) Value(key any) any {
	if key == (callKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// callOf returns the call that ctx belongs to, or nil.
func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

// DialHook adds no policies: a dial is part of the command that needs it.
func (h *hook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook runs a command under the policies.
func (h *hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	guarded := h.policies(func(ctx context.Context) error {
		c := callOf(ctx)
		if c == nil {
			return errNoCall
		}
		return classified(next(ctx, c.cmd))
	})
	return func(ctx context.Context, cmd redis.Cmder) error {
		if callOf(ctx) != nil {
			return next(ctx, cmd)
		}
		return withoutVerdict(guarded(&call{Context: ctx, cmd: cmd}))
	}
}

// ProcessPipelineHook runs a pipeline under the policies, as one call.
func (h *hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	guarded := h.policies(func(ctx context.Context) error {
		c := callOf(ctx)
		if c == nil {
			return errNoCall
		}
		c.sent = true
		err := next(ctx, c.cmds)
		if i := slices.IndexFunc(c.cmds, failed); err == nil && i >= 0 {
			err = c.cmds[i].Err() // a ClusterClient returns at most the error of the first command
		}
		err = classified(err)
		if v, ok := err.(*verdict); ok && !v.refused && slices.ContainsFunc(c.cmds, failed) {
			v.answered = false // one failed command makes the call a failure
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

// withoutVerdict returns the error of go-redis within a verdict, because callers compare it with redis.Nil and the
// like. It returns other errors unchanged.
func withoutVerdict(err error) error {
	if v, ok := err.(*verdict); ok {
		return v.error
	}
	return err
}

// failed reports whether cmd has an error that is not an answer.
func failed(cmd redis.Cmder) bool {
	err := classified(cmd.Err())
	return err != nil && !resilience.Answered(err)
}

// A verdict is an error of go-redis with the methods by which policies classify errors.
type verdict struct {
	error
	answered, refused bool
}

func (v *verdict) Unwrap() error  { return v.error }
func (v *verdict) Refused() bool  { return v.refused }
func (v *verdict) Answered() bool { return v.answered }

// classified returns err with the methods by which policies classify it.
func classified(err error) error {
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

// cannotServe reports whether an error reply means that the server cannot serve the command now. Other replies are
// about the command or its client.
func cannotServe(err string) bool {
	text := replyText(err)
	code, _, _ := strings.Cut(text, " ")
	switch code {
	case "LOADING", "BUSY", // the server is busy
		"OOM", "MISCONF", // the server has no memory, or cannot write to its disk
		"READONLY", "NOREPLICAS", "MASTERDOWN", "NOMASTERLINK", // the server is a replica, or has none
		"CLUSTERDOWN", "TRYAGAIN": // the slot has no master, or moves
		return true
	case "UNBLOCKED":
		return strings.Contains(text, "instance state changed") // the server has become a replica
	}
	return strings.HasPrefix(text, "max number of clients")
}

var errNoCall = errors.New("resilienceredis: the policies lost the ctx of the command")
