package resilienceredis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-resilience/resilience/throttle/fleet"
)

// Eval returns the Eval of package fleet, redisstore and redislease: it runs a script on
// the node that has the keys, by its hash if the server knows it. client has
// ContextTimeoutEnabled, so that ctx bounds the call, and MaxRetries: -1, so that a script
// whose answer was lost does not run again. A ClusterClient runs it again all the same, up to MaxRedirects
// times, if the connection ends: then a call of a fleet has taken its tokens twice.
func Eval(client redis.Scripter) func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	type known struct {
		text          string
		*redis.Script // has its hash
	}
	var mu sync.Mutex
	var scripts []known // a few; a map would read all of a text at each call
	find := func(text string) *redis.Script {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range scripts {
			if s.text == text {
				return s.Script
			}
		}
		scripts = append(scripts, known{text, redis.NewScript(text)})
		return scripts[len(scripts)-1].Script
	}
	return func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
		return find(script).Run(ctx, client, keys, args...).Result()
	}
}

// EvalEach returns the EvalEach of package fleet: it runs scripts in one pipeline, or one for
// each node of a cluster. client is as for [Eval].
func EvalEach(client redis.UniversalClient) func(ctx context.Context, calls []fleet.Call) []fleet.Reply {
	run := func(
		ctx context.Context, calls []fleet.Call, which []int, replies []fleet.Reply,
		eval func(*redis.Script, redis.Scripter, fleet.Call) *redis.Cmd,
	) {
		pipe := client.Pipeline()
		cmds := make([]*redis.Cmd, len(which))
		for i, j := range which {
			cmds[i] = eval(redis.NewScript(calls[j].Script), pipe, calls[j])
		}
		_, _ = pipe.Exec(ctx) // each command has its error
		for i, j := range which {
			replies[j].Value, replies[j].Err = cmds[i].Result()
		}
	}
	return func(ctx context.Context, calls []fleet.Call) []fleet.Reply {
		replies := make([]fleet.Reply, len(calls))
		all := make([]int, len(calls))
		for i := range all {
			all[i] = i
		}
		run(ctx, calls, all, replies, func(s *redis.Script, pipe redis.Scripter, c fleet.Call) *redis.Cmd {
			return s.EvalSha(ctx, pipe, c.Keys, c.Args...)
		})
		unknown := slices.DeleteFunc(all, func(i int) bool { return !redis.HasErrorPrefix(replies[i].Err, "NOSCRIPT") })
		if len(unknown) > 0 { // the server has been restarted
			run(ctx, calls, unknown, replies, func(s *redis.Script, pipe redis.Scripter, c fleet.Call) *redis.Cmd {
				return s.Eval(ctx, pipe, c.Keys, c.Args...)
			})
		}
		return replies
	}
}

// Node returns the Node of package fleet: the address of the master that keeps a key. It asks no
// server: client is that of [Eval], which finds out what masters there are.
func Node(client *redis.ClusterClient) func(key string) string {
	ended, cancel := context.WithCancel(context.Background())
	cancel() // or calls would wait here for a cluster that hangs, without their ctx and Timeout
	return func(key string) string {
		master, err := client.MasterForKey(ended, key)
		if err != nil {
			return "" // nobody knows, so there is one outage for all of these
		}
		return master.Options().Addr
	}
}

// silence is after how long without a message the server is asked for a sign of life, and how
// long that may take.
const silence = 10 * time.Second

// Subscribe returns the Subscribe of redisstore: it subscribes to a channel,
// calls subscribed once Redis has confirmed it, and message for each message, until ctx ends
// or the connection is lost. It does not connect again, since its caller must know that
// messages may be missing. A server that is silent for ten seconds, and does not answer a PING
// within another ten, is lost too.
func Subscribe(
	client redis.UniversalClient,
) func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error {
	return func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error {
		ctx = &call{Context: ctx} // no policies
		sub := client.Subscribe(ctx, channel)
		defer sub.Close()
		defer context.AfterFunc(ctx, func() { _ = sub.Close() })()
		for confirmed, asked := false, false; ; {
			reply, err := sub.ReceiveTimeout(ctx, silence)
			var late net.Error
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case err == nil:
				asked = false
			case !confirmed || asked || !errors.As(err, &late) || !late.Timeout():
				return fmt.Errorf("resilienceredis: channel %s: %w", channel, err)
			default:
				asked = true
				if err := sub.Ping(ctx); err != nil {
					return fmt.Errorf("resilienceredis: channel %s: %w", channel, err)
				}
			}
			switch reply := reply.(type) {
			case *redis.Subscription:
				if confirmed { // it has connected again by itself
					return fmt.Errorf("resilienceredis: channel %s: the connection was lost", channel)
				}
				confirmed = true
				subscribed()
			case *redis.Message:
				message(reply.Payload)
			}
		}
	}
}
