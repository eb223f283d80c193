// Package redisstore keeps the values of a cacheaside.Cache in Redis, where other
// processes find them, and carries invalidations between processes.
//
//	store := redisstore.New(redisstore.Config{Prefix: "users", Eval: eval, Subscribe: subscribe})
//	users := cacheaside.New(cacheaside.Config[int, User]{Load: load, Store: store})
//
// No Redis client is imported. With github.com/redis/go-redis/v9, and
// ContextTimeoutEnabled among the options of its client, the two functions are
//
//	eval := func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
//		return redis.NewScript(script).Run(ctx, client, keys, args...).Result()
//	}
//	subscribe := func(ctx context.Context, channel string, subscribed func(), message func(string)) error {
//		sub := client.Subscribe(ctx, channel)
//		defer sub.Close()
//		defer context.AfterFunc(ctx, func() { sub.Close() })()
//		if _, err := sub.Receive(ctx); err != nil {
//			return err
//		}
//		subscribed()
//		for {
//			m, err := sub.ReceiveMessage(ctx)
//			if err != nil {
//				return err
//			}
//			message(m.Payload)
//		}
//	}
//
// Redis 5 or later will do, or what speaks its protocol and runs its scripts; a
// cluster too, as each script keeps to one slot.
//
//   - Each key is one hash, which holds the value and how long it is fresh, the
//     lease of whoever is loading it, and the fences of those who are writing.
//   - Each operation is one Lua script, and atomic. A hit is one round trip, a miss
//     two: to take the lease and to fill.
//   - All times are by the clock of Redis. Every key expires.
//   - Keys are spread over 64 buckets, {prefix:0} to {prefix:63}. All that is in a
//     bucket counts only while the bucket's epoch is the one it was loaded in:
//     InvalidateAll changes the epoch of each.
//
// Run Redis without persistence and with an eviction policy of your choice: what
// is lost is loaded anew, except that a lost fence no longer guards against a
// writer that dies before it has invalidated, and the TTL does; a snapshot that is
// restored may hold values from when it was taken.
//
// Sources: leases from "Scaling Memcache at Facebook" (NSDI 2013).
package redisstore

import (
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

// Config says how a [Store] reaches Redis. A zero duration means its default, a
// negative one is an error. Prefix and Eval are required.
type Config struct {
	// Prefix is what the keys of one cache begin with, and the name of its channel.
	// Caches that share it share their values. It may not contain { or }.
	Prefix string

	// Eval runs a Lua script and returns its reply: integers as int64, strings as
	// string or []byte, arrays as []any. It must heed the deadline of its ctx (with
	// go-redis, set ContextTimeoutEnabled). The scripts are constants, a client may
	// send them by their hash.
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// Subscribe subscribes to a channel, calls subscribed when Redis has confirmed
	// it, and then message for each message, in their order. It returns when ctx has
	// ended or the connection is lost: it must not connect again by itself, since
	// what was published meanwhile would be missed. Nil: changes that other
	// processes make are seen when the TTL of what is in memory has passed.
	Subscribe func(ctx context.Context, channel string, subscribed func(), message func(payload string)) error

	// Timeout bounds each call of Eval. 0: 250 ms.
	Timeout time.Duration

	// Lease is for how long others wait for a process that loads a value before one
	// of them loads it as well. 0: 3 s.
	Lease time.Duration

	// Write is for how long the write of an Update may take: its ctx ends then. The
	// fence stands for twice as long, so that a commit that was under way at that
	// time is covered. 0: 10 s.
	Write time.Duration

	// Heartbeat is how long the channel may be silent before it is tested with a
	// message; if that does not arrive within Timeout, and a second more, the
	// subscription counts as lost. 0: 5 s.
	Heartbeat time.Duration
}

// Validate returns an error that names each field whose value cannot mean
// anything, or nil. New panics with that error.
func (cfg Config) Validate() error {
	f := invalid.Fields{Type: "redisstore.Config"}
	f.Need(cfg.Prefix != "" && !strings.ContainsAny(cfg.Prefix, "{}"), "Prefix", strconv.Quote(cfg.Prefix),
		"a name for the keys, without { and }")
	f.Need(cfg.Eval != nil, "Eval", "nil", "a function that runs a script")
	f.Need(cfg.Timeout >= 0, "Timeout", cfg.Timeout, "0 (for 250ms) or more")
	f.Need(cfg.Lease >= 0, "Lease", cfg.Lease, "0 (for 3s) or more")
	f.Need(cfg.Write >= 0, "Write", cfg.Write, "0 (for 10s) or more")
	f.Need(cfg.Heartbeat >= 0, "Heartbeat", cfg.Heartbeat, "0 (for 5s) or more")
	return f.Err()
}

// A Store is a cacheaside.Store on Redis. It is safe for concurrent use and
// serves one Cache. It holds nothing that must be closed.
type Store struct {
	cfg      Config
	origin   string // marks the messages of this Store, which need not hear itself
	previous chan struct{}
}

var _ cacheaside.Store = (*Store)(nil)

// New returns a Store. It panics with the error of cfg.Validate if there is one.
func New(cfg Config) *Store {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 250 * time.Millisecond
	}
	if cfg.Lease == 0 {
		cfg.Lease = 3 * time.Second
	}
	if cfg.Write == 0 {
		cfg.Write = 10 * time.Second
	}
	if cfg.Heartbeat == 0 {
		cfg.Heartbeat = 5 * time.Second
	}
	origin := strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
	return &Store{cfg: cfg, origin: origin}
}

// hold is for how long a lease is remembered after its time, unless someone else
// takes it: a load that takes longer cannot fill.
const hold = 10 * time.Minute

// Acquire implements cacheaside.Store.
func (s *Store) Acquire(ctx context.Context, key, token string, renew bool) (cacheaside.Lookup, error) {
	again := 0
	if renew {
		again = 1
	}
	reply, err := s.eval(ctx, "acquire", acquire, s.keys(key),
		token, s.cfg.Lease.Microseconds(), again, (s.cfg.Lease + hold).Milliseconds())
	if err != nil {
		return cacheaside.Lookup{}, err
	}
	look, ok := lookup(reply)
	if !ok {
		return cacheaside.Lookup{}, unexpected("acquire", reply)
	}
	return look, nil
}

func lookup(reply any) (look cacheaside.Lookup, ok bool) {
	fields, ok := reply.([]any)
	if !ok || len(fields) != 4 {
		return look, false
	}
	state, ok1 := fields[0].(int64)
	fresh, ok2 := fields[2].(int64)
	wait, ok3 := fields[3].(int64)
	var value []byte
	switch v := fields[1].(type) {
	case string:
		value = []byte(v)
	case []byte:
		value = v
	default:
		return look, false
	}
	if len(value) > 0 { // an envelope never is empty
		look.Value = value
	}
	look.State = cacheaside.State(state)
	look.Fresh = time.Duration(fresh) * time.Microsecond
	look.Wait = time.Duration(wait) * time.Microsecond
	return look, ok1 && ok2 && ok3
}

// Fill implements cacheaside.Store.
func (s *Store) Fill(ctx context.Context, key, token string, value []byte, fresh, keep time.Duration) (bool, error) {
	reply, err := s.eval(ctx, "fill", fill, s.keys(key), token, value, fresh.Microseconds(), keep.Microseconds())
	if err != nil {
		return false, err
	}
	filled, ok := reply.(int64)
	if !ok {
		return false, unexpected("fill", reply)
	}
	return filled == 1, nil
}

// Release implements cacheaside.Store.
func (s *Store) Release(ctx context.Context, key, token string) error {
	_, err := s.eval(ctx, "release", release, s.keys(key), token)
	return err
}

// Invalidate implements cacheaside.Store.
func (s *Store) Invalidate(ctx context.Context, key string) error {
	_, err := s.eval(ctx, "invalidate", invalidate, s.keys(key), s.cfg.Prefix, s.message(key))
	return err
}

// Expire implements cacheaside.Store.
func (s *Store) Expire(ctx context.Context, key string) error {
	_, err := s.eval(ctx, "expire", expire, s.keys(key), s.cfg.Prefix, s.message(key))
	return err
}

// Fence implements cacheaside.Store.
func (s *Store) Fence(ctx context.Context, key, token string) (time.Duration, error) {
	_, err := s.eval(ctx, "fence", fence, s.keys(key),
		s.cfg.Prefix, s.message(key), token, (2 * s.cfg.Write).Microseconds())
	return s.cfg.Write, err
}

// Unfence implements cacheaside.Store.
func (s *Store) Unfence(ctx context.Context, key, token string) error {
	_, err := s.eval(ctx, "unfence", unfence, s.keys(key), s.cfg.Prefix, s.message(key), token)
	return err
}

// InvalidateAll implements cacheaside.Store. It is one round trip for each of the
// buckets; if it fails, some may have been invalidated.
func (s *Store) InvalidateAll(ctx context.Context) error {
	for bucket := range buckets {
		// Others are told when all is done: whoever asks after the message is to
		// find none of the old values.
		message := ""
		if bucket == buckets-1 {
			message = s.message("")
		}
		_, err := s.eval(ctx, "invalidate all", raise, []string{s.epochOf(bucket)},
			s.cfg.Prefix, message, (s.cfg.Lease + hold).Milliseconds())
		if err != nil {
			return err
		}
	}
	return nil
}

// buckets is how many slots of a cluster the keys are spread over. Processes that
// share a cache must agree on it.
const buckets = 64

// keys returns the hash of key and the epoch of its bucket, which have a slot of
// a cluster in common.
func (s *Store) keys(key string) []string {
	epoch := s.epochOf(int(crc32.ChecksumIEEE([]byte(key)) % buckets))
	return []string{epoch + ":" + key, epoch}
}

func (s *Store) epochOf(bucket int) string {
	return "{" + s.cfg.Prefix + ":" + strconv.Itoa(bucket) + "}"
}

func (s *Store) eval(ctx context.Context, what, script string, keys []string, args ...any) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	reply, err := s.cfg.Eval(ctx, script, keys, args...)
	if err != nil {
		return nil, fmt.Errorf("redisstore: %s: %w", what, err)
	}
	return reply, nil
}

func unexpected(what string, reply any) error {
	return fmt.Errorf("redisstore: %s: unexpected reply %T %v", what, reply, reply)
}

// message is what is published for key: who did it, and the key; "" is for all.
// A message without a newline is a heartbeat.
func (s *Store) message(key string) string { return s.origin + "\n" + key }

var (
	errSilent = errors.New("redisstore: subscription: the heartbeat did not arrive")
	errEnded  = errors.New("redisstore: subscription ended")
)

// Watch implements cacheaside.Store. It is not for concurrent calls.
func (s *Store) Watch(ctx context.Context, up func(), heard func(key string)) error {
	if s.cfg.Subscribe == nil {
		up()
		<-ctx.Done()
		return context.Cause(ctx)
	}
	if s.previous != nil { // a subscription that was lost, and may still be ending
		<-s.previous
	}
	subscribed := make(chan struct{}, 1)
	messages := make(chan string)
	ended := make(chan struct{})
	s.previous = ended
	var err error
	subCtx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(ended)
		err = s.cfg.Subscribe(subCtx, s.cfg.Prefix, func() {
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
		<-ended // nothing is left behind
		return context.Cause(ctx)
	}
	if lost == errEnded && err != nil {
		return fmt.Errorf("redisstore: subscription: %w", err)
	}
	return lost
}

// listen passes messages on until there may be one that it missed.
func (s *Store) listen(ctx context.Context, up func(), heard func(string),
	subscribed <-chan struct{}, messages <-chan string, ended <-chan struct{}) error {
	// One process tests the channel for all: whoever is silent first. The others
	// hear the test.
	quiet := time.NewTimer(s.cfg.Heartbeat)
	defer quiet.Stop()
	rest := func() { quiet.Reset(s.cfg.Heartbeat + rand.N(s.cfg.Heartbeat/4+1)) }
	tested := false
	for {
		select {
		case <-subscribed:
			up()
			rest()
		case payload := <-messages:
			tested = false
			rest()
			if origin, key, isChange := strings.Cut(payload, "\n"); isChange && origin != s.origin {
				heard(key)
			}
		case <-quiet.C:
			if tested {
				return errSilent
			}
			tested = true
			if _, err := s.eval(ctx, "heartbeat", beat, []string{s.epochOf(0)}, s.cfg.Prefix, s.origin); err != nil {
				return err
			}
			quiet.Reset(s.cfg.Timeout + time.Second)
		case <-ended:
			return errEnded
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
