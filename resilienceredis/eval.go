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

// Eval returns the Eval of package fleet, redisstore and redislease: it runs a script on the node that has the keys,
// by its hash if the server knows it, and by its text if the server does not, or does not permit EVALSHA.
//
// client should have ContextTimeoutEnabled, so that ctx bounds the call, and MaxRetries: -1, so that a script
// whose answer was lost does not run again. A ClusterClient still runs it again, up to MaxRedirects times, if the
// connection ends: then a call of a fleet has taken its tokens twice.
//
// After an error that is not a reply, such as a refused connection, a ClusterClient reloads the state of its
// cluster in the background. By itself it does so once a minute, and would call a dead master although its replica
// has taken over.
func Eval(client redis.Scripter) func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	s := &scripts{client: client}
	return func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
		v, err := s.run(ctx, s.find(script), keys, args)
		reloadAfter(ctx, client, err)
		return v, err
	}
}

// scripts are the scripts of a client, with their hashes.
type scripts struct {
	client   redis.Scripter
	textOnly atomic.Bool // the server does not permit EVALSHA

	mu    sync.Mutex
	known []knownScript // a few; a map would read the whole of a text at each call
}

type knownScript struct {
	text string
	*redis.Script
}

// find returns the script with a text.
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

// run runs a script by its hash or, if that is not possible, by its text.
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

// withoutHash reports whether err is the reply of a server that does not permit EVALSHA: by its access rules, because
// the command was renamed or disabled, or because a proxy does not know it.
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
	for _, quote := range []string{"'", "`", `"`} { // in which servers put the name of the command
		if strings.Contains(text, quote+command+quote) {
			return true
		}
	}
	return false
}

// reloadAfter has a ClusterClient reload the state of its cluster if err is not a reply.
func reloadAfter(ctx context.Context, client any, err error) {
	var answer redis.Error
	if c, ok := client.(interface{ ReloadState(context.Context) }); ok && err != nil && !errors.As(err, &answer) {
		c.ReloadState(ctx) // returns immediately
	}
}

// EvalEach returns the EvalEach of package fleet: it runs scripts in one pipeline, or one for each node of a cluster.
// client is as for [Eval].
func EvalEach(client redis.UniversalClient) func(ctx context.Context, calls []fleet.Call) []fleet.Reply {
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
		if len(byText) > 0 { // after a restart of the server, or if it does not permit EVALSHA
			pipeline(ctx, client, calls, byText, replies, (*redis.Script).Eval)
		}
		for _, r := range replies {
			reloadAfter(ctx, client, r.Err)
		}
		return replies
	}
}

// pipeline sends those of calls whose indexes are in which, in one pipeline, and stores their replies.
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

// Node returns the Node of package fleet: the address of the master that has a key. It sends nothing: client must
// be the client of [Eval], whose calls load the state of the cluster.
func Node(client *redis.ClusterClient) func(key string) string {
	ended, cancel := context.WithCancel(context.Background())
	cancel() // otherwise calls would wait here for a cluster that hangs, without their ctx and Timeout
	return func(key string) string {
		master, err := client.MasterForKey(ended, key)
		if err != nil {
			return "" // all keys without a known master share one outage
		}
		return master.Options().Addr
	}
}

// idleTimeout is the time without a message after which Subscribe pings the server, and the time that the answer may
// take.
const idleTimeout = 10 * time.Second

// Subscribe returns the Subscribe of redisstore: it subscribes to a channel, calls subscribed after Redis has
// confirmed that, and message for each message, until ctx ends or the connection is lost. It does not reconnect,
// because its caller must know that messages may be missing. A connection is also lost if the server sends nothing
// for 10 seconds and does not answer a PING within another 10. After an error, a ClusterClient reloads the state
// of its cluster, as for [Eval].
func Subscribe(
	client redis.UniversalClient,
) func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error {
	return func(ctx context.Context, channel string, subscribed func(), message func(payload string)) (failure error) {
		ctx = &call{Context: ctx} // no policies
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
					return fmt.Errorf("resilienceredis: channel %s: the connection was lost", channel)
				}
				confirmed = true
				subscribed()
			case *redis.Message:
				message(received.Payload)
			}
		}
	}
}
