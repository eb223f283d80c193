package bulkhead

import (
	"context"
	"errors"
	"iter"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/linger"
)

// GroupConfig says what the bulkheads of a [Group] are like.
type GroupConfig[K comparable] struct {
	// Config is that of every bulkhead in the group. The Name of one is
	// "<Name>/<key>" in errors and events.
	Config Config

	// For, if not nil, returns the Config of the bulkhead of a key in the place of
	// Config. It must be valid: a call for a key panics otherwise. An empty Name
	// means that of Config. It may be called more than once for a key, by several
	// goroutines.
	For func(K) Config

	// MaxKeys is the most bulkheads held at once. Zero means 10 000. See [Group]
	// for what happens at the bound.
	MaxKeys int

	// IdleAfter is how long a bulkhead must have had no call to be forgotten, with
	// what it has counted and the limit that it has found. Zero means 10 minutes;
	// negative: bulkheads are forgotten to make room only.
	IdleAfter time.Duration
}

// Validate returns an error that says which fields cannot mean anything, or nil.
func (c GroupConfig[K]) Validate() error {
	f := invalid.Fields{Type: "bulkhead.GroupConfig"}
	f.Need(c.MaxKeys >= 0, "MaxKeys", c.MaxKeys, "0 (for 10000) or more")
	return errors.Join(f.Err(), c.Config.Validate())
}

// A Group holds one [Bulkhead] for each tenant or dependency, so that none of them
// can take the slots of another. It is safe for concurrent use. Bulkheads are made
// when their key first comes, and forgotten when it no longer does.
//
// A bulkhead is never forgotten while it has a call, running or waiting. Where
// MaxKeys bulkheads are held and all of the few that are looked at have a call, a
// new key gets no bulkhead of its own: all such keys share one, named
// "<Name>/(other keys)" and made from Config. So what runs is bounded whatever keys
// come. So do keys that are not equal to themselves, such as NaN.
type Group[K comparable] struct {
	cfg     GroupConfig[K]
	members *keyed.Map[K, *Bulkhead]
	rest    *Bulkhead
}

// NewGroup returns an empty Group. It panics with the error of cfg.Validate, if
// there is one.
func NewGroup[K comparable](cfg GroupConfig[K]) *Group[K] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	if cfg.MaxKeys == 0 {
		cfg.MaxKeys = 10_000
	}
	if cfg.IdleAfter == 0 {
		cfg.IdleAfter = 10 * time.Minute
	}
	rest := cfg.Config
	rest.Name = keyed.Name(rest.Name, "(other keys)")
	g := &Group[K]{cfg: cfg, rest: New(rest)}
	g.members = keyed.New(keyed.Config[K, *Bulkhead]{
		Make: g.make,
		Max:  cfg.MaxKeys,
		Idle: cfg.IdleAfter,
	})
	return g
}

func (g *Group[K]) make(key K) *Bulkhead {
	cfg := g.cfg.Config
	if g.cfg.For != nil {
		cfg = g.cfg.For(key)
		if cfg.Name == "" {
			cfg.Name = g.cfg.Config.Name
		}
	}
	cfg.Name = keyed.Name(cfg.Name, key)
	return New(cfg)
}

// Do runs fn in the bulkhead of key, as [Bulkhead.Do] does.
func (g *Group[K]) Do(ctx context.Context, key K, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	e := g.members.Pin(key)
	if e == nil {
		return g.rest.Do(ctx, fn)
	}
	if work := linger.Of(ctx); work != nil {
		return work.Hold(ctx, e.Value.Wrap(fn), e.Unpin)
	}
	defer e.Unpin()
	return e.Value.Do(ctx, fn)
}

// Begin takes a slot in the bulkhead of key, as [Bulkhead.Begin] does.
func (g *Group[K]) Begin(ctx context.Context, key K) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	e := g.members.Pin(key)
	if e == nil {
		return g.rest.Begin(ctx)
	}
	begun := false // stays so if a hook panics
	defer func() {
		if !begun {
			e.Unpin()
		}
	}()
	end, err := e.Value.Begin(ctx)
	if err != nil {
		return nil, err
	}
	begun = true
	var over atomic.Bool
	return func(err error) {
		if over.CompareAndSwap(false, true) {
			defer e.Unpin()
			end(err)
		}
	}, nil
}

// All returns the bulkheads that the group holds, in no order, without the one that
// keys share. A bulkhead is not to be kept: after the loop, the group may forget it
// and make another for its key. Looking at them does not keep them from that.
func (g *Group[K]) All() iter.Seq2[K, *Bulkhead] { return g.members.All() }
