// Package redisstore keeps the values of a cacheaside.Cache in Redis, where other
// processes find them, and carries invalidations between processes.
//
//	store := redisstore.New(redisstore.Config{Prefix: "users", Eval: eval, Subscribe: subscribe})
//	users := cacheaside.New(cacheaside.Config[int, User]{Load: load, Store: store})
//
// It imports no Redis client: with go-redis, the functions are resilienceredis.Eval(client) and
// resilienceredis.Subscribe(client). It needs Redis 5 or later, or what runs its scripts.
//
//   - Each operation is one atomic Lua script. A hit is one round trip, a miss two.
//   - All times are by the clock of Redis, and every key expires.
//   - Keys are spread over 64 buckets, {prefix:0} to {prefix:63}: the shards, and slots of a
//     cluster. InvalidateAll is a round trip for each.
//   - All keys that begin with {prefix: belong to the Store.
//
// Run Redis without persistence, because a restored snapshot may hold old values, and with
// any eviction policy. If a fence or an invalidation is lost, also by a failover to a lagging
// replica, the TTL is the bound, extended by StaleWhileRevalidate and StaleIfError.
//
// Sources: leases from "Scaling Memcache at Facebook" (NSDI 2013).
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

// Config says how a Store reaches Redis. A zero duration means its default, a negative one is an
// error.
type Config struct {
	// Prefix is the beginning of the keys of one cache, without { and }, and the name of its channel.
	// Caches with the same Prefix share their values. Required.
	Prefix string

	// Eval runs a Lua script, one of a few, and returns its reply: integers as int64, strings as string
	// or []byte, arrays as []any. Each of args is a string of bytes. Eval must return when its ctx is done,
	// after Timeout, because callers wait for it. Required.
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// Subscribe subscribes to a channel, calls subscribed when Redis has confirmed it, and then message
	// for each message, in order. It returns when ctx has ended or the connection is lost, and must not
	// reconnect by itself, which would miss messages. Nil means that changes by other processes are seen
	// when the TTL of an entry in memory has passed, extended by StaleWhileRevalidate and StaleIfError.
	Subscribe func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error

	// Timeout bounds each call of Eval. Zero means 250 ms.
	Timeout time.Duration

	// LeaseTTL is how long other processes wait for the one that loads a value. Then one of them loads
	// it too, and the first result is kept, if it comes within another ten minutes. Zero means 3 seconds.
	LeaseTTL time.Duration

	// WriteTimeout is how long the write of a Write may take; its ctx then ends. The fence stands for
	// twice as long, which covers a commit under way. Zero means 10 seconds.
	WriteTimeout time.Duration

	// Heartbeat is how long the channel may be silent before the Store sends a message, which must
	// arrive within Timeout plus one second. Zero means 5 seconds.
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

const longest = time.Duration(1 << 61) // of any time: 73 years, and safe to double

func (cfg Config) withDefaults() Config {
	cfg.Timeout = min(cmp.Or(cfg.Timeout, 250*time.Millisecond), longest)
	cfg.LeaseTTL = min(cmp.Or(cfg.LeaseTTL, 3*time.Second), longest)
	cfg.WriteTimeout = min(cmp.Or(cfg.WriteTimeout, 10*time.Second), longest)
	cfg.Heartbeat = min(cmp.Or(cfg.Heartbeat, 5*time.Second), longest)
	return cfg
}

type store struct {
	cfg           Config
	lease, hold   any           // LeaseTTL, and how long a generation is kept, as scripts read them
	origin        string        // identifies the messages of this Store, which it ignores
	subscriptions chan struct{} // has one element for each call of Subscribe under way
}

var _ cacheaside.Store = (*store)(nil)

// New returns a Store, for one Cache. It panics with the error of cfg.Validate, if there is one.
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

// hold is how long at least the generation of a key outlives a lease. A load that takes
// longer may not be able to fill.
const hold = 10 * time.Minute

func (s *store) Acquire(ctx context.Context, asks ...cacheaside.Request) ([]cacheaside.Response, error) {
	keys := make([]string, 0, len(asks)+1)
	args := make([]any, 0, 5*len(asks)+2)
	args = append(args, s.lease, s.hold)
	for _, ask := range asks {
		keys = append(keys, ask.Key)
		args = append(args, version(ask.Version), ask.Token, flag(ask.Refresh), ask.WaitToken,
			micros(min(ask.Pause, longest)))
	}
	looks := make([]cacheaside.Response, len(asks))
	return looks, s.evalEach(ctx, "acquire", acquire, keys, args, func(i int, reply any) (ok bool) {
		looks[i], ok = lookup(reply)
		return ok
	})
}

func lookup(reply any) (look cacheaside.Response, ok bool) {
	fields, ok := reply.([]any)
	if !ok || len(fields) != 5 {
		return look, false
	}
	state, ok1 := text(fields[0])
	value, ok2 := text(fields[1])
	fresh, ok3 := fields[2].(int64)
	wait, ok4 := fields[3].(int64)
	last, ok5 := text(fields[4])
	if value != "" { // an envelope is never empty
		look.Value = []byte(value)
	}
	look.State = cacheaside.State(state)
	look.Fresh = time.Duration(fresh) * time.Microsecond
	look.Wait = time.Duration(wait) * time.Microsecond
	switch look.State {
	case cacheaside.Leased:
		look.Grant = last
	case cacheaside.Busy:
		look.WaitToken = last
	case cacheaside.Hit, cacheaside.Failed, cacheaside.Fenced:
	default:
		return look, false
	}
	most := longest.Microseconds()
	return look, ok1 && ok2 && ok3 && ok4 && ok5 && max(fresh, wait) <= most && min(fresh, wait) >= -most
}

// text returns a string of a reply.
func text(reply any) (string, bool) {
	if v, ok := reply.([]byte); ok {
		return string(v), true
	}
	v, ok := reply.(string)
	return v, ok
}

func (s *store) Fill(ctx context.Context, values ...cacheaside.Entry) ([]bool, error) {
	keys := make([]string, 0, len(values)+1)
	args := make([]any, 0, 5*len(values))
	for _, v := range values {
		keys = append(keys, v.Key)
		args = append(args, version(v.Version), v.Grant, string(v.Value),
			micros(min(v.Fresh, longest)), micros(min(v.Keep, longest)))
	}
	current := make([]bool, len(values))
	return current, s.evalEach(ctx, "fill", fill, keys, args, func(i int, reply any) bool {
		n, ok := reply.(int64)
		current[i] = n == 1
		return ok
	})
}

func (s *store) Release(ctx context.Context, ask cacheaside.Request, failed bool) error {
	_, err := s.eval(ctx, "release", release, []string{s.hash(ask.Key)}, version(ask.Version), ask.Token, flag(failed))
	return err
}

func (s *store) Invalidate(ctx context.Context, keys ...string) error {
	return s.change(ctx, "invalidate", invalidate, keys)
}

func (s *store) Expire(ctx context.Context, keys ...string) error {
	return s.change(ctx, "expire", expire, keys)
}

func (s *store) change(ctx context.Context, what, script string, keys []string, more ...any) error {
	hashes := make([]string, len(keys))
	args := make([]any, 0, 1+len(keys)+len(more))
	args = append(args, s.cfg.Prefix)
	for i, key := range keys {
		hashes[i] = s.hash(key)
		args = append(args, s.message(key))
	}
	_, err := s.eval(ctx, what, script, hashes, append(args, more...)...)
	return err
}

func (s *store) Fence(ctx context.Context, key, token string) (time.Duration, error) {
	return s.cfg.WriteTimeout, s.write(ctx, "fence", fence, key, token)
}

func (s *store) Unfence(ctx context.Context, key, token string) error {
	return s.write(ctx, "unfence", unfence, key, token)
}

func (s *store) write(ctx context.Context, what, script, key, token string) error {
	return s.change(ctx, what, script, []string{key}, token, micros(2*s.cfg.WriteTimeout))
}

// InvalidateAll makes one round trip for each bucket. If
// it fails, it may have invalidated some of them.
func (s *store) InvalidateAll(ctx context.Context) error {
	for bucket := range uint8(buckets) {
		// Notify other processes last: after the message, a call must not find an old
		// value in any bucket. And first, since their ReplicaLag counts from then.
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

// buckets is the number of cluster slots that the keys are spread over. All processes
// that share a cache must agree on it.
const buckets = 64

func (s *store) Shard(key string) uint8 {
	return uint8(crc32.ChecksumIEEE([]byte(key)) % buckets)
}

// hash and epoch return Redis keys: the hash of key and the epoch of a bucket. The part
// in braces puts a bucket into one slot of a cluster.
func (s *store) hash(key string) string { return s.epoch(s.Shard(key)) + ":" + key }

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

// evalEach runs a script about keys of one bucket. read reads the answer about each.
func (s *store) evalEach(ctx context.Context, what, script string, keys []string, args []any,
	read func(i int, reply any) bool) error {
	epoch := s.epoch(s.Shard(keys[0]))
	for i, key := range keys {
		keys[i] = epoch + ":" + key
	}
	reply, err := s.eval(ctx, what, script, append(keys, epoch), args...)
	if err != nil {
		return err
	}
	answers, ok := reply.([]any)
	ok = ok && len(answers) == len(keys)
	for i := 0; ok && i < len(keys); i++ {
		ok = read(i, answers[i])
	}
	if !ok {
		return fmt.Errorf("redisstore: %s: unexpected reply %T %v", what, reply, reply)
	}
	return nil
}

// eval runs a script for at most Timeout.
func (s *store) eval(ctx context.Context, what, script string, keys []string, args ...any) (reply any, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	if reply, err = s.cfg.Eval(ctx, script, keys, args...); err != nil {
		return nil, fmt.Errorf("redisstore: %s: %w", what, err)
	}
	return reply, nil
}

// message returns what is published about key: the origin and the key, "" for all keys.
// A message without a newline is a heartbeat.
func (s *store) message(key string) string { return s.origin + "\n" + key }

var (
	errSilent = errors.New("redisstore: subscription: the heartbeat did not arrive")
	errEnded  = errors.New("redisstore: subscription ended")
	errStuck  = fmt.Errorf("redisstore: subscription: %d calls of Subscribe do not return", mostSubscriptions)
)

// mostSubscriptions bounds the calls of Subscribe under way. Normally there is one. A
// call whose subscription was lost may not return, for example because its client waits
// for a dead connection. The next one does not wait for it.
const mostSubscriptions = 4

// grace is how long the Store waits for a message that it has sent, and for a Subscribe
// that is to return.
func (s *store) grace() time.Duration { return s.cfg.Timeout + time.Second }

// Watch returns within Timeout plus one second of the end of ctx, even if Subscribe does not.
func (s *store) Watch(ctx context.Context, up func(), heard func(key string)) error {
	if s.cfg.Subscribe == nil {
		up()
		<-ctx.Done()
		return context.Cause(ctx)
	}
	select {
	case s.subscriptions <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(s.grace()):
		return errStuck
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
	lost := s.listen(ctx, up, heard, subscribed, messages, ended)
	cancel()
	if ctx.Err() != nil {
		select { // leave nothing behind, if Subscribe returns
		case <-ended:
		case <-time.After(s.grace()):
		}
		return context.Cause(ctx)
	}
	return lost
}

// listen passes messages on until it may have missed one.
func (s *store) listen(ctx context.Context, up func(), heard func(string),
	subscribed <-chan struct{}, messages <-chan string, ended chan error) error {
	// The process that has been silent first tests the channel; the others hear the test.
	quiet := time.NewTimer(s.cfg.Heartbeat)
	defer quiet.Stop()
	rest := func() { quiet.Reset(s.cfg.Heartbeat + rand.N(s.cfg.Heartbeat/4+1)) }
	bucket := rand.N(uint8(buckets)) // a different one each time, since the master of one may be down
	var lost time.Time               // when the channel is given up; zero while it is not being tested
	var failed error                 // error of the last test
	for {
		select {
		case <-subscribed:
			up()
			rest()
		case payload := <-messages:
			lost, failed = time.Time{}, nil
			rest()
			if origin, key, isChange := strings.Cut(payload, "\n"); isChange && origin != s.origin {
				heard(key)
			}
		case <-quiet.C:
			// A failed test says little about the subscription. Repeat it until the time is
			// up.
			if lost.IsZero() {
				lost = time.Now().Add(s.grace())
			}
			left := time.Until(lost)
			if left <= 0 {
				if failed != nil {
					return failed
				}
				return errSilent
			}
			_, failed = s.eval(ctx, "heartbeat", beat, []string{s.epoch(bucket)}, s.cfg.Prefix, s.origin)
			bucket = (bucket + 1) % buckets
			if failed == nil {
				quiet.Reset(time.Until(lost))
			} else {
				quiet.Reset(min(s.cfg.Timeout/5, time.Until(lost)))
			}
		case err := <-ended:
			ended <- err // also for Watch
			if err != nil {
				return fmt.Errorf("redisstore: subscription: %w", err)
			}
			return errEnded
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
