// Package resilienceredis runs the commands of github.com/redis/go-redis/v9 under policies. The package also provides
// the functions that the packages throttle/fleet, redisstore and redislease need to use Redis.
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
//	defer limit.Close(context.WithoutCancel(ctx))
//	store := redisstore.New(redisstore.Config{ // on a dedicated server that keeps nothing on disk
//		Prefix: "users", Eval: resilienceredis.Eval(cache), Subscribe: resilienceredis.Subscribe(cache),
//	})
//
// # How replies are classified
//
// An error reply is an answer if the server works. Policies do not count an answer as a failure. Examples are
// redis.Nil, WRONGTYPE, NOSCRIPT, an error of a script, MOVED, ASK, NOAUTH and NOPERM.
//
// The following replies are failures, because they mean that the server cannot serve the command:
//
//   - LOADING, BUSY, OOM, MISCONF, READONLY, NOREPLICAS, MASTERDOWN, NOMASTERLINK, CLUSTERDOWN and TRYAGAIN
//   - the reply that the server has too many clients
//   - the reply that ends a blocking command because the server has become a replica
//   - the error of an EXEC or a script that failed with a reply of this list
//
// Network errors are failures. If no connection is free within PoolTimeout, or MaxActiveConns permits no new
// connection, the call counts as refused, because nothing was sent. If the caller's ctx is done, the call counts
// neither as a success nor as a failure. The caller gets each error of go-redis unchanged, including redis.Nil. If a
// policy refuses a call, the caller gets the policy's error.
//
// # Servers that hang
//
// If the caller's deadline passes, a breaker counts the call as a failure only if the call had at least the time
// Patience. Patience is a field of the breaker's Config, and is 0.9s by default. So a server that hangs does not open
// the breaker if callers' deadlines are shorter than Patience. To count calls with short deadlines, add a
// resilience.Timeout as the innermost policy. The Timeout must be shorter than the callers' deadlines.
//
// The packages throttle/fleet, redisstore and redislease call Redis with short deadlines, and handle outages without
// policies. Give throttle/fleet, redisstore and redislease a client without a Hook.
//
// # Retries
//
// A Client retries a command up to MaxRetries times, 3 by default. The retries of a Client happen within the policies,
// so the policies count a command once, however often it was sent. To switch the retries off, set MaxRetries: -1. For
// commands that may be repeated, use a Retrier instead of MaxRetries. Place the Retrier outermost among the policies in
// Config.Node.
//
// A ClusterClient retries a command up to MaxRedirects times, and a Ring up to MaxRetries times. A retry may go to
// another node. The retries of a ClusterClient or a Ring happen outside of the policies. Each attempt is a separate
// call under the policies of the node that receives the command.
//
// If a Client cannot connect, it dials up to five times within one command, with pauses of 100ms. So a server that
// refuses connections seems to be slow. To dial only once, set DialerRetries: 1.
//
// A command may need a new connection. The dial and the commands that set up the connection then count as part of that
// command. They are not separate calls. [Subscribe] uses no policies. For any other PubSub of a client with policies,
// only the commands that set up the PubSub's connection run under the policies.
//
// # Failover in a cluster
//
// go-redis reloads the state of a cluster once a minute and after a redirect, but not after a refused connection. The
// functions [Eval], [EvalEach] and [Subscribe] make go-redis reload the state of a cluster after each call that fails
// without a reply from Redis. So Eval, EvalEach and Subscribe work again within about two seconds after a replica has
// taken over for a dead master.
//
// The module's docs/protocol.md describes how policies classify errors. Error replies of Redis are documented at
// https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
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

// A Config configures [Hook].
type Config struct {
	// Node returns the policies for the node with the address addr. For a Client, Node is called once. For a
	// ClusterClient or a Ring, Node is called once for each node, possibly by several goroutines. Required.
	Node func(addr string) resilience.Middleware
}

// Hook makes client run its commands and pipelines under policies. A pipeline or a transaction counts as one call. Call
// Hook before client is used. Hook panics if cfg has no Node, or if client is not a *redis.Client, a
// *redis.ClusterClient or a *redis.Ring.
//
// If a policy refuses a command, the error of the command is the policy's error. If a policy refuses a pipeline, each
// command of the pipeline has the policy's error.
func Hook(client redis.UniversalClient, cfg Config) {
	if cfg.Node == nil {
		panic("resilienceredis.Config.Node is nil: must be a function that returns policies")
	}
	node := func(c *redis.Client) { c.AddHook(&hook{cfg.Node(c.Options().Addr)}) }
	switch c := client.(type) {
	case *redis.Client:
		node(c)
	case *redis.ClusterClient:
		c.OnNewNode(node)
	case *redis.Ring:
		c.OnNewNode(node) // OnNewNode does not call node for the shards that NewRing has created
		for _, shard := range c.GetShardClients() {
			node(shard)
		}
	default:
		panic(fmt.Sprintf("resilienceredis: Hook: client is a %T: must be a Client, a ClusterClient or a Ring", client))
	}
}

// A hook runs the commands of one node's client under policies.
type hook struct{ policies resilience.Middleware }

// A call is the ctx of a command or a pipeline in flight. If a connection must be set up for it, the commands of the
// setup also have this ctx, and so run without the policies of the same hook.
type call struct {
	context.Context
	hook *hook // nil means that the commands of the setup run without the policies of any hook
	cmd  redis.Cmder
	cmds []redis.Cmder
	sent bool
}

type callKey struct{ *hook }

// Value returns c if key is the callKey of c's hook. Otherwise, Value returns the value in the wrapped ctx.
func (c *call) Value(key any) any {
	if k, ok := key.(callKey); ok && (c.hook == nil || c.hook == k.hook) {
		return c
	}
	return c.Context.Value(key)
}

// callOf returns h's call from which ctx is derived, or nil if there is none.
func (h *hook) callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{h}).(*call)
	return c
}

// DialHook adds no policies, because a dial is part of the command that needs the connection.
func (h *hook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook runs a command under the policies.
func (h *hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	guarded := h.policies(func(ctx context.Context) error {
		c := h.callOf(ctx)
		if c == nil {
			return errNoCall
		}
		return classified(next(ctx, c.cmd))
	})
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.callOf(ctx) != nil {
			return next(ctx, cmd)
		}
		return withoutVerdict(guarded(&call{Context: ctx, hook: h, cmd: cmd}))
	}
}

// ProcessPipelineHook runs a pipeline under the policies. The pipeline is one call.
func (h *hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	guarded := h.policies(func(ctx context.Context) error {
		c := h.callOf(ctx)
		if c == nil {
			return errNoCall
		}
		c.sent = true
		err := next(ctx, c.cmds)
		if i := slices.IndexFunc(c.cmds, failed); err == nil && i >= 0 {
			err = c.cmds[i].Err() // a ClusterClient returns no error, or the first command's error
		}
		err = classified(err)
		if v, ok := err.(*verdict); ok && !v.refused && slices.ContainsFunc(c.cmds, failed) {
			v.answered = false // the call is a failure if one command has failed
		}
		return err
	})
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if h.callOf(ctx) != nil {
			return next(ctx, cmds)
		}
		c := &call{Context: ctx, hook: h, cmds: cmds}
		err := withoutVerdict(guarded(c))
		if !c.sent {
			for _, cmd := range cmds {
				cmd.SetErr(err)
			}
		}
		return err
	}
}

// withoutVerdict returns the error of go-redis that a verdict contains, because callers compare errors with redis.Nil
// and other variables. It returns other errors unchanged.
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

// A verdict is an error of go-redis with the methods that policies use to classify errors.
type verdict struct {
	error
	answered, refused bool
}

func (v *verdict) Unwrap() error  { return v.error }
func (v *verdict) Refused() bool  { return v.refused }
func (v *verdict) Answered() bool { return v.answered }

// classified returns err with the methods that policies use to classify errors.
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

// cannotServe reports whether an error reply means that the server cannot serve the command now. Other error replies
// mean that the command or its client is at fault.
func cannotServe(err string) bool {
	text := replyText(err)
	code, _, _ := strings.Cut(text, " ")
	switch code {
	case "LOADING", "BUSY", // the server is busy
		"OOM", "MISCONF", // the server has no memory, or cannot write to its disk
		"READONLY", "NOREPLICAS", "MASTERDOWN", "NOMASTERLINK", // the server is a replica, lost its master, or lacks replicas
		"CLUSTERDOWN", "TRYAGAIN": // the hash slot of the key has no master, or is moving to another node
		return true
	case "UNBLOCKED":
		return strings.Contains(text, "instance state changed") // the server has become a replica
	}
	return strings.HasPrefix(text, "max number of clients")
}

var errNoCall = errors.New("resilienceredis: policies lost the ctx of the command")
