// Package redislease provides a [lease.Store] in Redis. If a leader is paused or Redis loses its data, two processes
// may lead at the same time. Use this package only to avoid duplicate work, or with a resource that compares the
// epochs of terms.
//
//	store := redislease.New(redislease.Config{Eval: eval})
//	billing := lease.New(store, lease.Config{Name: "billing"})
//	err := billing.Loop(ctx, func(ctx context.Context, term lease.Term) error {
//		return report(ctx, term.Epoch()) // the resource rejects lower epochs
//	})
//
// If work must not be done twice and the resource cannot compare epochs, use package sqllease and [lease.Term.Fence].
// With a Store of this package, Fence returns [lease.ErrNoFence].
//
// The package imports no Redis client. With github.com/redis/go-redis/v9, eval is resilienceredis.Eval(client).
//
// A lease is one key, so Redis Cluster is supported. Redis may lose the key of a lease in a restart without
// persistence, or in a failover to a replica that lagged. If Redis has lost the key:
//
//   - Another term may start while the previous one continues. The previous leader notices the loss at its next
//     renewal.
//   - The new term's epoch is still greater, unless Redis's clock was set back by more than the time for which Redis
//     was unavailable. Epochs are based on Redis's clock.
//   - The time of the last run of [lease.Candidate.Every] is lost with the key. The next leader restores it if it has
//     seen it.
package redislease

import (
	"context"
	"crypto/rand"
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
	// Prefix is the prefix of each key. A key is the Prefix followed by the lease's name. Empty means "lease:".
	Prefix string

	// Eval runs a Lua script on Redis 5 or later and returns the script's answer: integers as int64, strings as string
	// or []byte, and arrays as []any. Eval always gets the same script. Eval must return when ctx is done. Required.
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "redislease.Config"}
	f.Need(c.Eval != nil, "Eval", "nil", "set")
	return f.Err()
}

type store struct{ cfg Config }

// New returns a [lease.Store] in Redis. The Store is safe for concurrent use, by any number of processes. New sends no
// command to Redis. New panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) lease.Store {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	if cfg.Prefix == "" {
		cfg.Prefix = "lease:"
	}
	return &store{cfg}
}

// Acquire implements [lease.Store].
func (s *store) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	rec, _, err := s.run(ctx, "acquire", req.Name, req.Token, req.Holder, micros(req.TTL))
	return rec, err
}

// Renew implements [lease.Store].
func (s *store) Renew(ctx context.Context, req lease.Request) error {
	rec, renewed, err := s.run(ctx, "renew", req.Name, req.Token,
		micros(req.TTL), strconv.FormatInt(req.Run, 10), rand.Text())
	switch {
	case err != nil:
		return err
	case rec.Token != req.Token:
		return lease.ErrLost
	case !renewed:
		return lease.ErrRunTaken
	}
	return nil
}

// Release implements [lease.Store].
func (s *store) Release(ctx context.Context, name, token string) error {
	_, _, err := s.run(ctx, "release", name, token)
	return err
}

// Load implements [lease.Store].
func (s *store) Load(ctx context.Context, name string) (lease.Record, error) {
	rec, _, err := s.run(ctx, "load", name, "")
	return rec, err
}

func micros(d time.Duration) string { return strconv.FormatInt(d.Microseconds(), 10) }

// run runs the script. It returns the record after the operation, and whether the operation has changed it.
func (s *store) run(
	ctx context.Context, op, name, token string, args ...any,
) (rec lease.Record, changed bool, err error) {
	if ctx.Err() != nil {
		return rec, false, fmt.Errorf("redislease: %s: %w", op, context.Cause(ctx))
	}
	value, err := s.cfg.Eval(ctx, script, []string{s.cfg.Prefix + name}, append([]any{op, token}, args...)...)
	if err != nil {
		return rec, false, fmt.Errorf("redislease: %s: %w", op, err)
	}
	fields, ok := value.([]any)
	ok = ok && len(fields) == 6
	var texts [2]string
	var n [4]int64
	for i := 0; ok && i < 6; i++ {
		if i < 2 {
			texts[i], ok = text(fields[i])
		} else {
			n[i-2], ok = reply.Int(fields[i])
		}
	}
	if !ok {
		return rec, false, fmt.Errorf("redislease: %s: script's answer is %T %v: must be two strings and"+
			" four integers", op, value, value)
	}
	left := max(time.Duration(n[1])*time.Microsecond, 0)
	return lease.Record{
		Name: name, Token: texts[0], Holder: texts[1], Epoch: n[0], Left: left, LastRun: n[2],
	}, n[3] != 0, nil
}

// text returns v as a string. Clients return a string of Redis as a string or a []byte.
func text(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case []byte:
		return string(v), true
	}
	return "", false
}
