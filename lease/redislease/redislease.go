// Package redislease keeps the leases of package lease in Redis. It saves work, but does not
// exclude two leaders: if a leader is paused, or Redis loses its data, two processes may lead
// at the same time, unless the resource compares the epochs of their terms.
//
//	store := redislease.New(redislease.Config{Eval: eval})
//	err := lease.Run(ctx, store, lease.Config{Name: "billing"},
//		func(ctx context.Context, term lease.Term) error {
//			return report(ctx, term.Epoch()) // a resource that refuses lower epochs
//		})
//
// For work that must not be done twice, and whose resource cannot compare epochs, use
// package sqllease and [lease.Term.Fence], which here returns [lease.ErrNoFence].
//
// No Redis client is imported. With github.com/redis/go-redis/v9, eval is
// resilienceredis.Eval(client).
//
// A lease is one key, so that a Redis Cluster will do. If Redis loses it, in a restart without
// persistence or a failover to a replica that lagged, another term may begin while the last one
// still holds. Its epoch is higher all the same, as it includes the time by the clock of Redis,
// unless that was set back further than Redis was away. The last leader learns of it by its next
// renewal.
package redislease

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/reply"
	"github.com/go-resilience/resilience/lease"
)

//go:embed lease.lua
var script string

// A Config configures a Store.
type Config struct {
	// Prefix begins each key, before the name of the lease. Empty means "lease:".
	Prefix string

	// Eval runs a Lua script, always the same one, on Redis 5 or later and returns its answer:
	// integers as int64, strings as string or []byte, arrays as []any. It is required, and must
	// heed the end of its ctx.
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "redislease.Config"}
	f.Need(c.Eval != nil, "Eval", "nil", "set")
	return f.Err()
}

type store struct{ cfg Config }

// New returns a [lease.Store] in Redis, for concurrent use by many processes. It does not talk to
// Redis yet, and panics with the error of cfg.Validate.
func New(cfg Config) lease.Store {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	if cfg.Prefix == "" {
		cfg.Prefix = "lease:"
	}
	return &store{cfg}
}

func (s *store) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	return s.record(ctx, "acquire", req.Name, req.Token, req.Holder, micros(req.TTL))
}

func (s *store) Renew(ctx context.Context, req lease.Request) error {
	run := "0"
	if req.Run {
		run = "1"
	}
	rec, err := s.record(ctx, "renew", req.Name, req.Token, micros(req.TTL), run)
	if err == nil && rec.Token != req.Token {
		err = lease.ErrLost
	}
	return err
}

func (s *store) Release(ctx context.Context, name, token string) error {
	_, err := s.record(ctx, "release", name, token)
	return err
}

func (s *store) Load(ctx context.Context, name string) (lease.Record, error) {
	return s.record(ctx, "load", name, "")
}

func micros(d time.Duration) string { return strconv.FormatInt(d.Microseconds(), 10) }

// record runs the script, and reads the record that it returns.
func (s *store) record(ctx context.Context, op, name, token string, args ...any) (lease.Record, error) {
	if ctx.Err() != nil {
		return lease.Record{}, fmt.Errorf("redislease: %s: %w", op, context.Cause(ctx))
	}
	value, err := s.cfg.Eval(ctx, script, []string{s.cfg.Prefix + name}, append([]any{op, token}, args...)...)
	if err != nil {
		return lease.Record{}, fmt.Errorf("redislease: %s: %w", op, err)
	}
	fields, ok := value.([]any)
	ok = ok && len(fields) == 7
	var texts [2]string
	var n [5]int64
	for i := 0; ok && i < 7; i++ {
		if i < 2 {
			texts[i], ok = text(fields[i])
		} else {
			n[i-2], ok = reply.Int(fields[i])
		}
	}
	if !ok {
		return lease.Record{}, fmt.Errorf("redislease: %s: the script's answer is %T %v: must be two strings and"+
			" five integers", op, value, value)
	}
	return lease.Record{
		Name: name, Token: texts[0], Holder: texts[1], Epoch: n[0],
		Since: moment(n[1]), Until: moment(n[2]), Now: moment(n[3]), Ran: moment(n[4]),
	}, nil
}

func moment(micros int64) time.Time {
	if micros == 0 {
		return time.Time{}
	}
	return time.UnixMicro(micros)
}

// text reads a string of Redis, as clients return it.
func text(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case []byte:
		return string(v), true
	}
	return "", false
}
