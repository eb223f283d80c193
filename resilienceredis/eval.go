package resilienceredis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Eval returns the Eval of throttle.Shared, redisstore and redislease: it runs a script on
// the node that has the keys, by its hash if the server knows it. client has
// ContextTimeoutEnabled, so that ctx bounds the call, and MaxRetries: -1, so that a script
// whose answer was lost does not run again.
func Eval(client redis.Scripter) func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	var scripts sync.Map // *redis.Script, by the text: each has its hash
	return func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
		known, ok := scripts.Load(script)
		if !ok {
			known, _ = scripts.LoadOrStore(script, redis.NewScript(script))
		}
		return known.(*redis.Script).Run(ctx, client, keys, args...).Result()
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
func Subscribe(client redis.UniversalClient) func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error {
	return func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error {
		ctx = &call{Context: ctx} // no policies
		sub := client.Subscribe(ctx, channel)
		defer sub.Close()
		defer context.AfterFunc(ctx, func() { _ = sub.Close() })()
		for told, asked := false, false; ; {
			reply, err := sub.ReceiveTimeout(ctx, silence)
			var late net.Error
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case err == nil:
				asked = false
			case !told || asked || !errors.As(err, &late) || !late.Timeout():
				return fmt.Errorf("resilienceredis: channel %s: %w", channel, err)
			default:
				asked = true
				if err := sub.Ping(ctx); err != nil {
					return fmt.Errorf("resilienceredis: channel %s: %w", channel, err)
				}
			}
			switch reply := reply.(type) {
			case *redis.Subscription:
				if told { // it has connected again by itself
					return fmt.Errorf("resilienceredis: channel %s: the connection was lost", channel)
				}
				told = true
				subscribed()
			case *redis.Message:
				message(reply.Payload)
			}
		}
	}
}
