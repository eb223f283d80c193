// Package redisstore provides a cacheaside.Store on Redis. Processes share the values of a cacheaside.Cache, and notify
// each other of invalidations.
//
//	store := redisstore.New(redisstore.Config{Prefix: "users", Eval: eval, Subscribe: subscribe})
//	users := cacheaside.New(cacheaside.Config[int, User]{Load: load, Store: store})
//
// The package imports no Redis client. For the client go-redis, use resilienceredis.Eval(client) and
// resilienceredis.Subscribe(client). The server must be Redis 5 or later, or a compatible server that runs the same Lua
// scripts.
//
//   - Each operation is one atomic Lua script. A Get whose value is in the Store takes one round trip. A Get that
//     loads the value takes two round trips.
//   - All times are measured by Redis's clock. Every Redis key expires. After a load has started, its key occupies
//     memory for at least LeaseTTL plus 10 minutes, even if the TTL is shorter, unless the key is invalidated. For this
//     time, the Store records the right to store the loaded value.
//   - Keys are distributed to 64 buckets, whose Redis keys start with {prefix:0} to {prefix:63}. Each bucket is a shard
//     of the Store. In a Redis cluster, all keys of a bucket are in one slot. InvalidateAll takes one round trip for
//     each bucket.
//   - All Redis keys that start with {prefix: belong to the Store, and other programs must not use them.
//
// Run Redis without persistence, because a restored snapshot may have outdated values. Any maxmemory-policy works. A
// fence can be lost by an eviction, and a fence or an invalidation by a failover to a lagging replica. Outdated values
// may then be served. Each outdated value is served for at most its TTL plus the larger of StaleWhileRevalidate and
// StaleIfError.
//
// The leases are described in "Scaling Memcache at Facebook" (NSDI 2013).
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package redisstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Config configures a Store. A duration of zero means the field's default. A negative duration is an error.
type Config struct {
	// Prefix is part of the name of every Redis key of the cache. Prefix is also the name of the cache's Pub/Sub channel.
	// Prefix must not contain { or }. Caches with the same Prefix share their values. Required.
	Prefix string

	// Eval runs a Lua script in Redis and returns the script's reply. Eval returns integers as int64, strings as string
	// or []byte, and arrays as []any. Each of args is a string. The Store uses only a few different scripts, so Eval may
	// cache them. Eval must return when its ctx is done, because callers wait for Eval. The function that
	// resilienceredis.Eval returns meets this requirement. Required.
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// Subscribe subscribes to a Pub/Sub channel. Subscribe calls subscribed when Redis has confirmed the subscription,
	// and then calls message for each message, in order. Subscribe returns when ctx is done or the connection is lost.
	// Subscribe must not reconnect. Otherwise messages could be lost between the two connections. Nil means that a
	// process does not receive the changes of other processes. After such a change, the process may serve the outdated
	// value from its memory, for at most the value's TTL plus the larger of StaleWhileRevalidate and StaleIfError.
	Subscribe func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error

	// Timeout limits the duration of each call to Eval. Zero means 250ms.
	Timeout time.Duration

	// LeaseTTL is the time for which other processes wait for the process that loads a value. After LeaseTTL, another
	// process starts a load of the same value. The result of the first load can still be stored within 10 minutes after
	// the lease has expired. Zero means 3 seconds.
	//
	// Set LeaseTTL to more than the duration of a slow load. If a load takes longer than LeaseTTL, another process starts
	// the same load after each LeaseTTL. A lease is not renewed while a load runs. If leases were renewed, a load that
	// hangs would delay all processes for LoadTimeout (30 seconds by default) instead of LeaseTTL.
	LeaseTTL time.Duration

	// WriteTimeout is the time that the function passed to Write may take before its ctx is done. The fence of a Write
	// expires only after twice WriteTimeout, because a commit may still be in progress after WriteTimeout. Zero means
	// 10 seconds.
	WriteTimeout time.Duration

	// Heartbeat is the time without a message after which the Store publishes a message to test its subscription. Up to a
	// quarter of Heartbeat is added at random. If the test message does not arrive within Timeout plus 1 second, the
	// subscription counts as lost. Zero means 5 seconds.
	Heartbeat time.Duration
}

// Validate returns an error that names each invalid field, or nil.
func (cfg Config) Validate() error {
	f := invalid.Fields{Type: "redisstore.Config"}
	f.Need(cfg.Prefix != "" && !strings.ContainsAny(cfg.Prefix, "{}"), "Prefix", strconv.Quote(cfg.Prefix),
		"a name for the keys, without { and }")
	f.Need(cfg.Eval != nil, "Eval", "nil", "a function that runs a script")
	f.Need(cfg.Timeout >= 0, "Timeout", cfg.Timeout, "0 (for 250ms) or more")
	f.Need(cfg.LeaseTTL >= 0, "LeaseTTL", cfg.LeaseTTL, "0 (for 3s) or more")
	f.Need(cfg.WriteTimeout >= 0, "WriteTimeout", cfg.WriteTimeout, "0 (for 10s) or more")
	f.Need(cfg.Heartbeat >= 0, "Heartbeat", cfg.Heartbeat, "0 (for 5s) or more")
	return f.Err()
}

const longest = time.Duration(1 << 61) // the longest time: 73 years, which can be doubled without overflow

func (cfg Config) withDefaults() Config {
	cfg.Timeout = min(cmp.Or(cfg.Timeout, 250*time.Millisecond), longest)
	cfg.LeaseTTL = min(cmp.Or(cfg.LeaseTTL, 3*time.Second), longest)
	cfg.WriteTimeout = min(cmp.Or(cfg.WriteTimeout, 10*time.Second), longest)
	cfg.Heartbeat = min(cmp.Or(cfg.Heartbeat, 5*time.Second), longest)
	return cfg
}

type store struct {
	cfg           Config
	lease, hold   any           // LeaseTTL, and LeaseTTL plus the constant hold, as arguments of scripts
	origin        string        // marks the messages that this Store publishes; the Store ignores such messages
	subscriptions chan struct{} // has one element for each call to Subscribe in progress
}

var _ cacheaside.Store = (*store)(nil)

// New returns a Store for one Cache. New panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) cacheaside.Store {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg = cfg.withDefaults()
	origin := strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
	return &store{
		cfg: cfg, lease: micros(cfg.LeaseTTL), hold: millis(cfg.LeaseTTL + hold),
		origin: origin, subscriptions: make(chan struct{}, mostSubscriptions),
	}
}

// hold is the minimum time that the generation of a key, the right to store its value, lasts after the lease has
// expired. If a load takes longer than that, its value is possibly not stored.
const hold = 10 * time.Minute

func (s *store) Acquire(ctx context.Context, requests ...cacheaside.Request) ([]cacheaside.Response, error) {
	keys := make([]string, 0, len(requests)+1)
	args := make([]any, 0, 5*len(requests)+2)
	args = append(args, s.lease, s.hold)
	for _, r := range requests {
		keys = append(keys, r.Key)
		args = append(args, version(r.Version), r.Token, flag(r.Refresh), r.WaitToken,
			micros(min(r.Pause, longest)))
	}
	responses := make([]cacheaside.Response, len(requests))
	return responses, s.evalEach(ctx, "acquire", acquire, keys, args, func(i int, reply any) (ok bool) {
		responses[i], ok = response(reply)
		return ok
	})
}

// response decodes the reply about one key.
func response(reply any) (r cacheaside.Response, ok bool) {
	fields, ok := reply.([]any)
	if !ok || len(fields) != 5 {
		return r, false
	}
	state, ok1 := text(fields[0])
	value, ok2 := text(fields[1])
	fresh, ok3 := fields[2].(int64)
	wait, ok4 := fields[3].(int64)
	last, ok5 := text(fields[4])
	if value != "" { // a value is never empty
		r.Value = []byte(value)
	}
	r.State = cacheaside.State(state)
	r.Fresh = time.Duration(fresh) * time.Microsecond
	r.Wait = time.Duration(wait) * time.Microsecond
	switch r.State {
	case cacheaside.Leased:
		r.Grant = last
	case cacheaside.Busy:
		r.WaitToken = last
	case cacheaside.Hit, cacheaside.Failed, cacheaside.Fenced:
	default:
		return r, false
	}
	most := longest.Microseconds()
	return r, ok1 && ok2 && ok3 && ok4 && ok5 && max(fresh, wait) <= most && min(fresh, wait) >= -most
}

// text returns a reply, or a field of a reply, as a string. It returns false if it is not a string.
func text(reply any) (string, bool) {
	if v, ok := reply.([]byte); ok {
		return string(v), true
	}
	v, ok := reply.(string)
	return v, ok
}

func (s *store) Fill(ctx context.Context, entries ...cacheaside.Entry) ([]bool, error) {
	keys := make([]string, 0, len(entries)+1)
	args := make([]any, 0, 5*len(entries))
	for _, e := range entries {
		keys = append(keys, e.Key)
		args = append(args, version(e.Version), e.Grant, string(e.Value),
			micros(min(e.Fresh, longest)), micros(min(e.Keep, longest)))
	}
	unchanged := make([]bool, len(entries))
	return unchanged, s.evalEach(ctx, "fill", fill, keys, args, func(i int, reply any) bool {
		n, ok := reply.(int64)
		unchanged[i] = n == 1
		return ok
	})
}

func (s *store) Release(ctx context.Context, r cacheaside.Request, failed bool) error {
	_, err := s.eval(ctx, "release", release, []string{s.hash(r.Key)}, version(r.Version), r.Token, flag(failed))
	return err
}

func (s *store) Invalidate(ctx context.Context, keys ...string) error {
	return s.change(ctx, "invalidate", invalidate, keys)
}

func (s *store) Expire(ctx context.Context, keys ...string) error {
	return s.change(ctx, "expire", expire, keys)
}

func (s *store) change(ctx context.Context, operation, script string, keys []string, more ...any) error {
	hashes := make([]string, len(keys))
	args := make([]any, 0, 1+len(keys)+len(more))
	args = append(args, s.cfg.Prefix)
	for i, key := range keys {
		hashes[i] = s.hash(key)
		args = append(args, s.message(key))
	}
	_, err := s.eval(ctx, operation, script, hashes, append(args, more...)...)
	return err
}

func (s *store) Fence(ctx context.Context, key, token string) (time.Duration, error) {
	return s.cfg.WriteTimeout, s.write(ctx, "fence", fence, key, token)
}

func (s *store) Unfence(ctx context.Context, key, token string) error {
	return s.write(ctx, "unfence", unfence, key, token)
}

func (s *store) write(ctx context.Context, operation, script, key, token string) error {
	return s.change(ctx, operation, script, []string{key}, token, micros(2*s.cfg.WriteTimeout))
}

// InvalidateAll takes one round trip for each bucket. If InvalidateAll fails, it may have invalidated some of the
// buckets.
func (s *store) InvalidateAll(ctx context.Context) error {
	for bucket := range uint8(buckets) {
		// Publish the message with the first bucket and with the last. The first message is for the ReplicaLag of other
		// processes, which counts from the message. The last message is needed because, after a message, a call must not find
		// an outdated value in any bucket.
		message := ""
		if bucket == 0 || bucket == buckets-1 {
			message = s.message("")
		}
		_, err := s.eval(ctx, "invalidate all", raise, []string{s.epoch(bucket)},
			s.cfg.Prefix, message, s.hold)
		if err != nil {
			return err
		}
	}
	return nil
}

// buckets is the number of cluster slots to which the keys are distributed. It must be the same in all processes that
// share a cache.
const buckets = 64

func (s *store) Shard(key string) uint8 {
	return uint8(crc32.ChecksumIEEE([]byte(key)) % buckets)
}

// hash returns the Redis key of the Redis hash that belongs to key. The part in braces is a hash tag, which puts all
// keys of a bucket into the same slot of a cluster.
func (s *store) hash(key string) string { return s.epoch(s.Shard(key)) + ":" + key }

// epoch returns the Redis key of a bucket's epoch, which InvalidateAll changes to end all values of the bucket.
func (s *store) epoch(bucket uint8) string {
	return "{" + s.cfg.Prefix + ":" + strconv.Itoa(int(bucket)) + "}"
}

func flag(is bool) string {
	if is {
		return "1"
	}
	return "0"
}

func version(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

func micros(d time.Duration) string { return strconv.FormatInt(d.Microseconds(), 10) }
func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// evalEach runs a script for keys of one bucket. read decodes the reply for each key.
func (s *store) evalEach(ctx context.Context, operation, script string, keys []string, args []any,
	read func(i int, reply any) bool) error {
	epoch := s.epoch(s.Shard(keys[0]))
	for i, key := range keys {
		keys[i] = epoch + ":" + key
	}
	reply, err := s.eval(ctx, operation, script, append(keys, epoch), args...)
	if err != nil {
		return err
	}
	answers, ok := reply.([]any)
	ok = ok && len(answers) == len(keys)
	for i := 0; ok && i < len(keys); i++ {
		ok = read(i, answers[i])
	}
	if !ok {
		return fmt.Errorf("redisstore: %s: unexpected reply %T %v", operation, reply, reply)
	}
	return nil
}

// eval runs a script for at most Timeout.
func (s *store) eval(ctx context.Context, operation, script string, keys []string, args ...any) (reply any, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	if reply, err = s.cfg.Eval(ctx, script, keys, args...); err != nil {
		return nil, fmt.Errorf("redisstore: %s: %w", operation, err)
	}
	return reply, nil
}

// message returns the message about a change of key, or of all keys if key is "". A message without a newline is a
// heartbeat.
func (s *store) message(key string) string { return s.origin + "\n" + key }

var (
	errNoHeartbeat    = errors.New("redisstore: subscription: the heartbeat did not arrive")
	errEnded          = errors.New("redisstore: subscription ended")
	errSubscribeHangs = fmt.Errorf("redisstore: subscription: %d calls to Subscribe did not return", mostSubscriptions)
)

// mostSubscriptions is the maximum number of concurrent calls to Subscribe. Normally there is one. But a call may hang
// after its subscription was lost, for example because its client waits for a dead connection. The next call does not
// wait for such a call.
const mostSubscriptions = 4

// grace is the maximum time that the Store waits for a message that it has published, and for Subscribe to return.
func (s *store) grace() time.Duration { return s.cfg.Timeout + time.Second }

// Watch returns at most Timeout plus 1 second after ctx is done, even if Subscribe does not return.
func (s *store) Watch(ctx context.Context, ready func(), changed func(key string)) error {
	if s.cfg.Subscribe == nil {
		ready()
		<-ctx.Done()
		return context.Cause(ctx)
	}
	select {
	case s.subscriptions <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(s.grace()):
		return errSubscribeHangs
	}
	subscribed := make(chan struct{}, 1)
	messages := make(chan string)
	ended := make(chan error, 1)
	subCtx, cancel := context.WithCancel(ctx)
	go func() {
		defer func() { <-s.subscriptions }()
		ended <- s.cfg.Subscribe(subCtx, s.cfg.Prefix, func() {
			select {
			case subscribed <- struct{}{}:
			default:
			}
		}, func(payload string) {
			select {
			case messages <- payload:
			case <-subCtx.Done():
			}
		})
	}()
	lost := s.listen(ctx, ready, changed, subscribed, messages, ended)
	cancel()
	if ctx.Err() != nil {
		select { // wait for the end of the goroutine, if Subscribe returns
		case <-ended:
		case <-time.After(s.grace()):
		}
		return context.Cause(ctx)
	}
	return lost
}

// listen calls ready and changed until it may have missed a message.
func (s *store) listen(ctx context.Context, ready func(), changed func(string),
	subscribed <-chan struct{}, messages <-chan string, ended chan error) error {
	// The process whose timer fires first publishes a heartbeat. The other processes receive it, and need not publish a
	// heartbeat.
	quiet := time.NewTimer(s.cfg.Heartbeat)
	defer quiet.Stop()
	rest := func() { quiet.Reset(s.cfg.Heartbeat + rand.N(s.cfg.Heartbeat/4+1)) }
	bucket := rand.N(uint8(buckets)) // changes with each heartbeat, because a bucket's master may be down
	var lost time.Time               // time at which the subscription counts as lost; zero if no heartbeat is awaited
	var failed error                 // the error of the last heartbeat
	for {
		select {
		case <-subscribed:
			ready()
			rest()
		case payload := <-messages:
			lost, failed = time.Time{}, nil
			rest()
			if origin, key, isChange := strings.Cut(payload, "\n"); isChange && origin != s.origin {
				changed(key)
			}
		case <-quiet.C:
			// The subscription may work even if a heartbeat cannot be published. Repeat the heartbeat until grace has
			// elapsed.
			if lost.IsZero() {
				lost = time.Now().Add(s.grace())
			}
			left := time.Until(lost)
			if left <= 0 {
				if failed != nil {
					return failed
				}
				return errNoHeartbeat
			}
			_, failed = s.eval(ctx, "heartbeat", beat, []string{s.epoch(bucket)}, s.cfg.Prefix, s.origin)
			bucket = (bucket + 1) % buckets
			if failed == nil {
				quiet.Reset(time.Until(lost))
			} else {
				quiet.Reset(min(s.cfg.Timeout/5, time.Until(lost)))
			}
		case err := <-ended:
			ended <- err // Watch may wait for ended
			if err != nil {
				return fmt.Errorf("redisstore: subscription: %w", err)
			}
			return errEnded
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
