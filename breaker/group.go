package breaker

import (
	"context"
	"errors"
	"iter"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
)

// GroupConfig says what the breakers of a [Group] are like.
type GroupConfig[K comparable] struct {
	// Config is that of every breaker in the group. The Name of one is
	// "<Name>/<key>" in errors and events.
	Config Config
	// For, if not nil, returns the Config of the breaker of a key in the place of
	// Config. It must be valid: a call for a key panics otherwise. An empty Name
	// means that of Config. It may be called more than once for a key, by several
	// goroutines.
	For func(K) Config
	// MaxKeys is the most breakers held at once. Zero means 10 000. See [Group] for
	// what happens at the bound.
	MaxKeys int
	// IdleAfter is how long a breaker must have had no call to be forgotten; longer
	// than its Window, or what the window holds is forgotten too early. Zero means
	// 10 minutes; negative: breakers are forgotten to make room only.
	IdleAfter time.Duration
}

// Validate returns an error that names each field whose value cannot mean
// anything.
func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "breaker.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 10000) or more")
	return errors.Join(f.Err(), c.Config.Validate())
}

// A Group holds one [Breaker] for each shard, host or tenant, so that a bad one is
// left alone and the others are not. It is safe for concurrent use. Breakers are
// made when their key first comes and forgotten when it no longer does.
//
// A breaker is never forgotten while a call of it is under way, while it has time
// left to stay open, while it is forced open or disabled, or while it pings. Where
// MaxKeys breakers are held and a few that are looked at are all of that kind, a
// new key gets no breaker of its own: all such keys share one, named
// "<Name>/(other keys)". So the memory is bounded whatever keys come, every call
// has a breaker, and every key with a breaker of its own keeps it; among those
// that share one, a bad key can shut out good ones. MaxKeys well above the number
// of keys that fail at the same time avoids that.
type Group[K comparable] struct {
	cfg     GroupConfig[K]
	members *keyed.Map[K, *Breaker]
	rest    *Breaker
	done    atomic.Bool
}

// NewGroup returns an empty Group. It panics with the error of cfg.Validate if that
// is not nil.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	orDefault(&cfg.MaxKeys, 10_000)
	orDefault(&cfg.IdleAfter, 10*time.Minute)
	g := &Group[K]{cfg: cfg}
	g.members = keyed.New(keyed.Config[K, *Breaker]{
		Make: g.newMember,
		Max:  cfg.MaxKeys,
		Idle: cfg.IdleAfter,
		Keep: (*Breaker).keep,
	})
	rest := cfg.Config
	rest.Name = keyed.Name(rest.Name, "(other keys)")
	g.rest = New(rest)
	return g
}

func (g *Group[K]) newMember(key K) *Breaker {
	cfg := g.cfg.Config
	if g.cfg.For != nil {
		cfg = g.cfg.For(key)
		orDefault(&cfg.Name, g.cfg.Config.Name)
	}
	cfg.Name = keyed.Name(cfg.Name, key)
	b := New(cfg)
	b.groupDone = &g.done
	return b
}

// Do calls fn under the breaker of key, as [Breaker.Do] does.
func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	e := g.members.Pin(key)
	if e == nil {
		return g.rest.Do(ctx, fn)
	}
	defer e.Unpin()
	return e.Value.Do(ctx, fn)
}

// Wrap returns a function that calls next under the breaker that key has at the time.
func (g *Group[K]) Wrap(key K, next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return g.Do(ctx, key, next) }
}

// Allow asks the breaker of key for a call, as [Breaker.Allow] does. The breaker
// is not forgotten until done is called.
func (g *Group[K]) Allow(ctx context.Context, key K) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	e := g.members.Pin(key)
	if e == nil {
		return g.rest.Allow(ctx)
	}
	held := false // stays so if a hook panics
	defer func() {
		if !held {
			e.Unpin()
		}
	}()
	report, err := e.Value.Allow(ctx)
	if err != nil {
		return nil, err
	}
	held = true
	var over atomic.Bool
	return func(err error) {
		if !over.Swap(true) {
			defer e.Unpin()
			report(err)
		}
	}, nil
}

// With calls f with the breaker of key, which is made if there is none, to look at it or
// to force it open: the breaker is not forgotten while f runs, and f does not keep it.
// With returns false, and does not call f, if the key has no breaker of its own because
// the group is full.
func (g *Group[K]) With(key K, f func(*Breaker)) bool {
	e := g.members.Pin(key)
	if e == nil {
		return false
	}
	defer e.Unpin()
	f(e.Value)
	return true
}

// All returns the breakers that the group holds, in no order, without the one that
// keys share. A breaker is not forgotten while it is yielded. Looking at breakers does
// not keep them from being forgotten after that.
func (g *Group[K]) All() iter.Seq2[K, *Breaker] { return g.members.All() }

// Close does for each breaker of the group, and those to come, what
// [Breaker.Close] does. It returns nil.
func (g *Group[K]) Close() error {
	g.done.Store(true)
	for _, b := range g.members.All() {
		_ = b.Close()
	}
	return g.rest.Close()
}

// keep reports whether forgetting a breaker that has no call would forget more
// than counts.
func (b *Breaker) keep() bool {
	switch p := b.phase.Load(); p.state {
	case Closed:
		return false
	case ForcedOpen, Disabled:
		return true
	default: // without traffic a probe may never come
		return b.now() < p.until || b.pingDue.Load() != 0
	}
}
