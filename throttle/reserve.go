package throttle

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A Reservation is what a call has taken. If it is never settled, it has used all of that. It is safe for
// concurrent use.
type Reservation struct {
	settled atomic.Bool
	parts   []part
}

// A part is what a Reservation has taken of one limit.
type part struct {
	name     string
	estimate bool // Settle corrects it
	settle   func(used int)
}

// A Part is what [All] combines: a [*Limiter], or the result of [Group.For].
type Part interface {
	reserve(ctx context.Context, n int) (part, error)
}

// reserve takes n tokens, or those that their Costs return, from each of parts, or from none.
func reserve(ctx context.Context, n int, parts ...Part) (*Reservation, error) {
	r, complete := &Reservation{}, false
	defer func() {
		if !complete { // including after a panic of a Cost
			r.release()
		}
	}()
	for _, p := range parts {
		taken, err := p.reserve(ctx, n)
		if err != nil {
			return nil, err
		}
		r.parts = append(r.parts, taken)
	}
	complete = true
	return r, nil
}

func (l *Limiter) reserve(ctx context.Context, n int) (part, error) {
	h, err := l.hold(ctx, n)
	cfg := l.setting.Load()
	estimate := n != byCost || cfg.Cost != nil
	return part{cfg.Name, estimate, func(used int) { l.settle(&l.meter, h, used) }}, err
}

// Settle corrects how many tokens the call used. What it took beyond that is given back; what it used beyond what
// it took is charged, and calls are refused until the debt is paid. Debt beyond a burst or a quota is forgiven. A
// window that is over is not corrected; a call that had taken nothing is charged to the current one. A negative
// number counts as zero. Only the first call of Settle or SettleEach has an effect.
//
// A reservation of [All] settles the limits that have a Cost. If nothing was sent, call SettleEach with a 0
// for each limit.
func (r *Reservation) Settle(used int) {
	r.settleParts(func(p part) (int, bool) { return used, p.estimate })
}

// SettleEach is Settle with a number for each limit, by name. A limit that is not named has used what it took. Names
// that the reservation does not have are ignored.
func (r *Reservation) SettleEach(used map[string]int) {
	r.settleParts(func(p part) (int, bool) {
		n, ok := used[p.name]
		return n, ok
	})
}

// release gives back all tokens.
func (r *Reservation) release() {
	r.settleParts(func(part) (int, bool) { return 0, true })
}

// settleParts settles, once, each part for which usedOf returns true.
func (r *Reservation) settleParts(usedOf func(part) (used int, ok bool)) {
	if r.settled.Swap(true) {
		return
	}
	for _, p := range r.parts {
		if used, ok := usedOf(p); ok {
			p.settle(used)
		}
	}
}

// Limits are several limits that a call takes from together: from all of them, or from none. See [All].
type Limits struct{ parts []Part }

// All returns a policy that takes the Cost of a call from every part, or from none. A call that waits for one
// of them holds the tokens of those before it.
//
//	limits := throttle.All(users.For(userOf), organizations.For(organizationOf))
func All(parts ...Part) *Limits { return &Limits{slices.Clone(parts)} }

// Reserve takes the tokens of a call, or returns the error of the part that refuses it.
func (l *Limits) Reserve(ctx context.Context) (*Reservation, error) {
	return reserve(ctx, byCost, l.parts...)
}

// Do is [Limiter.Do] for all parts.
func (l *Limits) Do(ctx context.Context, fn func(context.Context) error) error {
	r, err := l.Reserve(ctx)
	if err != nil {
		return err
	}
	err = fn(ctx)
	if behavior.IsRefused(err) {
		r.release()
	}
	return err
}

// Wrap returns a function that runs next under Do.
func (l *Limits) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}
