package resilienceredis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience/throttle/fleet"
)

// Eval returns a function for the field Config.Eval of package fleet, redisstore or redislease. The function runs a
// Lua script on the node that has the keys. The function first sends only the hash of the script, with EVALSHA. If the
// server does not know the hash or does not permit EVALSHA, the function sends the script's text.
//
// The function returns when ctx is done. If client ignores ctx, the function runs each script on a new goroutine. The
// goroutine may continue, and use keys and args, after the function has returned. To avoid the goroutines, set
// ContextTimeoutEnabled in the options of client. Even with ContextTimeoutEnabled, a ClusterClient needs goroutines
// until its first reply. Before the first reply, a ClusterClient queries the commands of its servers, and ignores ctx
// during this query.
//
// Set MaxRetries: -1. Otherwise client runs a script again if the reply was lost. If the connection is lost, a
// ClusterClient nevertheless runs the script again, up to MaxRedirects times. If a script runs twice, a call under a
// limit of package fleet takes its tokens twice.
//
// A call can fail without a reply, for example because a connection is refused. The function then makes a ClusterClient
// reload the state of its cluster in the background. By itself, a ClusterClient reloads the state of its cluster only
// once a minute. So it could call a dead master for a minute after a replica has taken over.
//
// If client sends a value that is too large, Redis closes the connection. The function makes client drop the closed
// connection. Otherwise the next command of client would fail.
//
// Eval panics if client is nil.
func Eval(client redis.Scripter) func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	if client == nil {
		panic("resilienceredis: Eval: client is nil: must be set")
	}
	s := &scripts{client: client}
	return func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
		run := func() (any, error) {
			v, err := s.run(ctx, s.find(script), keys, args)
			reloadAfter(ctx, client, err)
			dropAfter(ctx, client, keys, err)
			if _, isReply := errors.AsType[redis.Error](err); err == nil || isReply {
				s.replied.Store(true)
			}
			return v, err
		}
		if ctx.Done() == nil || s.respectsContext() {
			return run()
		}
		return waitFor(ctx, run)
	}
}

// respectsContext reports whether a command of the client returns when its ctx is done.
func (s *scripts) respectsContext() bool {
	switch c := s.client.(type) {
	case *redis.Client:
		return c.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		return c.Options().ContextTimeoutEnabled && s.replied.Load()
	}
	return false
}

// waitFor calls run on a new goroutine and returns its results. If ctx is done before run returns, waitFor returns an
// error that wraps the cause of ctx.
func waitFor(ctx context.Context, run func() (any, error)) (any, error) {
	type result struct {
		value any
		err   error
	}
	results := make(chan result, 1)
	go func() {
		value, err := run()
		results <- result{value, err}
	}()
	select {
	case r := <-results:
		return r.value, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("resilienceredis: no reply: %w", context.Cause(ctx))
	}
}

// scripts has the scripts that a client has run, with their hashes.
type scripts struct {
	client   redis.Scripter
	textOnly atomic.Bool // the server does not permit EVALSHA
	replied  atomic.Bool // a server has replied

	mu    sync.Mutex
	known []knownScript // only a few; a map would hash a script's whole text in each call
}

type knownScript struct {
	text string
	*redis.Script
}

// find returns the script with the given text.
func (s *scripts) find(text string) *redis.Script {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.known {
		if k.text == text {
			return k.Script
		}
	}
	s.known = append(s.known, knownScript{text, redis.NewScript(text)})
	return s.known[len(s.known)-1].Script
}

// run runs a script by its hash. If the server does not accept the hash, run sends the script's text.
func (s *scripts) run(ctx context.Context, script *redis.Script, keys []string, args []any) (any, error) {
	if s.textOnly.Load() {
		return script.Eval(ctx, s.client, keys, args...).Result()
	}
	v, err := script.EvalSha(ctx, s.client, keys, args...).Result()
	forbidden := withoutHash(err)
	if !forbidden && !redis.HasErrorPrefix(err, "NOSCRIPT") {
		return v, err
	}
	v, err = script.Eval(ctx, s.client, keys, args...).Result()
	if forbidden && !withoutEval(err) {
		s.textOnly.Store(true)
	}
	return v, err
}

// withoutHash reports whether err is the reply of a server that does not permit EVALSHA. Its access rules may forbid
// the command, the command may be renamed or disabled, or a proxy may not know the command.
func withoutHash(err error) bool { return forbids(err, "evalsha") }

// withoutEval reports whether err is the reply of a server that does not permit EVAL.
func withoutEval(err error) bool { return forbids(err, "eval") }

// forbids reports whether err is the reply of a server that does not permit a command.
func forbids(err error, command string) bool {
	var answer redis.Error
	if !errors.As(err, &answer) {
		return false
	}
	text := strings.ToLower(replyText(answer.Error()))
	if !strings.HasPrefix(text, "noperm") && !strings.HasPrefix(text, "unknown command") {
		return false
	}
	for _, quote := range []string{"'", "`", `"`} { // servers put the command's name in one of these quotes
		if strings.Contains(text, quote+command+quote) {
			return true
		}
	}
	return false
}

// dropAfter makes the client drop a connection that the server closes after the reply err. Redis closes the connection
// if an argument is too large. By then, the client has returned the connection to its pool. Its next command would use
// that connection and fail, although the command is valid. So dropAfter sends a read of the script's first key, which
// fails instead of that command: a pool hands out the connection that was returned last.
func dropAfter(ctx context.Context, client any, keys []string, err error) {
	reader, ok := client.(interface {
		Exists(ctx context.Context, keys ...string) *redis.IntCmd
	})
	if ok && len(keys) > 0 && redis.HasErrorPrefix(err, "Protocol error") {
		_ = reader.Exists(ctx, keys[0]).Err()
	}
}

// reloadAfter makes a ClusterClient reload the state of its cluster if err is not nil and not a reply.
func reloadAfter(ctx context.Context, client any, err error) {
	var answer redis.Error
	if c, ok := client.(interface{ ReloadState(context.Context) }); ok && err != nil && !errors.As(err, &answer) {
		c.ReloadState(ctx) // ReloadState returns immediately
	}
}

// EvalEach returns a function for the field Config.EvalEach of package fleet. The function runs several scripts in one
// pipeline or, on a cluster, in one pipeline for each node. Set ContextTimeoutEnabled in the options of client, and set
// the other options as described for [Eval]. Without ContextTimeoutEnabled, the function ignores the deadline of ctx,
// and waits for a node that hangs until the ReadTimeout of client has passed. Settlements and renewals on all nodes are
// then delayed, so running calls may lose their slots.
//
// EvalEach panics if client is nil.
func EvalEach(client redis.UniversalClient) func(ctx context.Context, calls []fleet.Call) []fleet.Reply {
	if client == nil {
		panic("resilienceredis: EvalEach: client is nil: must be set")
	}
	return func(ctx context.Context, calls []fleet.Call) []fleet.Reply {
		replies := make([]fleet.Reply, len(calls))
		all := make([]int, len(calls))
		for i := range all {
			all[i] = i
		}
		pipeline(ctx, client, calls, all, replies, (*redis.Script).EvalSha)
		byText := slices.DeleteFunc(all, func(i int) bool {
			return !redis.HasErrorPrefix(replies[i].Err, "NOSCRIPT") && !withoutHash(replies[i].Err)
		})
		if len(byText) > 0 { // after a restart of the server, or if the server does not permit EVALSHA
			pipeline(ctx, client, calls, byText, replies, (*redis.Script).Eval)
		}
		for _, r := range replies {
			reloadAfter(ctx, client, r.Err)
		}
		return replies
	}
}

// pipeline sends some elements of calls in one pipeline, and stores their replies in replies. The indexes of these
// elements are in which.
func pipeline(
	ctx context.Context, client redis.UniversalClient, calls []fleet.Call, which []int, replies []fleet.Reply,
	eval func(*redis.Script, context.Context, redis.Scripter, []string, ...any) *redis.Cmd,
) {
	pipe := client.Pipeline()
	cmds := make([]*redis.Cmd, len(which))
	for i, j := range which {
		cmds[i] = eval(redis.NewScript(calls[j].Script), ctx, pipe, calls[j].Keys, calls[j].Args...)
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	for i, j := range which {
		replies[j].Value, replies[j].Err = cmds[i].Result()
	}
}

// Node returns a function for the field Config.Node of package fleet. The function returns the address of the master
// that has a key. The function reads the cluster state that client has loaded, and sends nothing to Redis. Pass the
// same client to Node and to [Eval], because the function that Eval returns makes the client load the cluster state.
// Node panics if client is nil.
func Node(client *redis.ClusterClient) func(key string) string {
	if client == nil {
		panic("resilienceredis: Node: client is nil: must be set")
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel() // MasterForKey with an open ctx would wait for a cluster that hangs, longer than the call may
	return func(key string) string {
		master, err := client.MasterForKey(ended, key)
		if err != nil {
			return "" // keys without a known master have the same node "", so they share its outages
		}
		return master.Options().Addr
	}
}

// idleTimeout is the time without a message after which Subscribe pings the server. It is also the maximum time that
// Subscribe waits for the answer to the ping.
const idleTimeout = 10 * time.Second

// Subscribe returns a function for the field Config.Subscribe of package redisstore. The function subscribes to a
// Pub/Sub channel, and calls subscribed after Redis has confirmed the subscription. After that, the function calls
// message for each message until ctx is done or the connection is lost. The function does not reconnect, because its
// caller must be notified that messages may be missing.
//
// The connection counts as lost if the server sends nothing for 10 seconds and does not answer a PING within another
// 10 seconds. If the function fails without a reply from Redis, it makes a ClusterClient reload the state of its
// cluster.
//
// Subscribe panics if client is nil.
func Subscribe(
	client redis.UniversalClient,
) func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error {
	if client == nil {
		panic("resilienceredis: Subscribe: client is nil: must be set")
	}
	return func(ctx context.Context, channel string, subscribed func(), message func(payload string)) (failure error) {
		ctx = &call{Context: ctx} // commands within a call run without policies
		defer func() {
			if ctx.Err() == nil {
				reloadAfter(ctx, client, failure)
			}
		}()
		sub := client.Subscribe(ctx, channel)
		defer sub.Close()
		defer context.AfterFunc(ctx, func() { _ = sub.Close() })()
		for confirmed, pinged := false, false; ; {
			received, err := sub.ReceiveTimeout(ctx, idleTimeout)
			var late net.Error
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case err == nil:
				pinged = false
			case !confirmed || pinged || !errors.As(err, &late) || !late.Timeout():
				return fmt.Errorf("resilienceredis: channel %s: %w", channel, err)
			default:
				pinged = true
				if err := sub.Ping(ctx); err != nil {
					return fmt.Errorf("resilienceredis: channel %s: %w", channel, err)
				}
			}
			switch received := received.(type) {
			case *redis.Subscription:
				if confirmed { // go-redis has reconnected
					return fmt.Errorf("resilienceredis: channel %s: connection was lost", channel)
				}
				confirmed = true
				subscribed()
			case *redis.Message:
				message(received.Payload)
			}
		}
	}
}
