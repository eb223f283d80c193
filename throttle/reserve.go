package throttle

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// A Reservation records the tokens that a call has taken. If a Reservation is never settled, the call counts as having
// used all tokens that it took. A Reservation is safe for concurrent use.
type Reservation struct {
	settled atomic.Bool
	parts   []part
}

// A part records the tokens that a Reservation has taken from one limit.
type part struct {
	name     string
	estimate bool // the number of tokens is an estimate, and Settle corrects it
	settle   func(used int)
}

// A Part is a limit that [All] combines with other limits: a [*Limiter], or the result of [Group.For].
type Part interface {
	reserve(ctx context.Context, n int) (part, error)
}

// reserve takes n tokens from each of parts, or from none. If n is byCost, reserve takes from each part the number of
// tokens that the part's Cost returns.
func reserve(ctx context.Context, n int, parts ...Part) (*Reservation, error) {
	if len(parts) == 0 && ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	r, complete := &Reservation{}, false
	defer func() {
		if !complete { // even if a Cost panicked
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

// Settle corrects the reservation to the number of tokens that the call used. If the call took more tokens than it
// used, the difference is refunded. If the call used more tokens than it took, the difference is charged. If a charge
// causes a debt, calls wait or are refused until the rate has paid off the debt. The part of a debt that exceeds a
// burst or a quota is forgiven. Only the first call to Settle or SettleEach has an effect. A negative value of used
// counts as zero.
//
// For a quota, Settle corrects the window from which the call took its tokens. If this window has ended, Settle does
// not correct it. If the call took no tokens, Settle charges the current window.
//
// If the reservation comes from [Limits.Reserve], Settle corrects only the limits that have a [Config].Cost. If the
// call was not sent, use SettleEach with 0 for each limit.
func (r *Reservation) Settle(used int) {
	r.settleParts(func(p part) (int, bool) { return used, p.estimate })
}

// SettleEach is like [Reservation.Settle], but takes a number of tokens for each limit. Each entry of the map corrects
// one limit, whose name is the entry's key. SettleEach does not correct a limit without an entry. SettleEach ignores a
// name if the reservation has no limit of that name.
func (r *Reservation) SettleEach(used map[string]int) {
	r.settleParts(func(p part) (int, bool) {
		n, ok := used[p.name]
		return n, ok
	})
}

// release refunds all tokens.
func (r *Reservation) release() {
	r.settleParts(func(part) (int, bool) { return 0, true })
}

// settleParts settles each part for which usedOf returns true. Only the first call to settleParts has an effect.
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

// Limits combines several limits. A call takes its tokens from all of the limits, or from none. See [All].
type Limits struct{ parts []Part }

// All returns a policy that takes a call's tokens from every part, or from none. Each part's Cost determines the
// number of its tokens. While a call waits for one part, it already holds the tokens of the parts that come earlier in
// the list.
//
//	limits := throttle.All(users.For(userOf), organizations.For(organizationOf))
func All(parts ...Part) *Limits { return &Limits{slices.Clone(parts)} }

// Reserve takes the tokens of a call from every part. If a part refuses the call, Reserve returns that part's error.
func (l *Limits) Reserve(ctx context.Context) (*Reservation, error) {
	return reserve(ctx, byCost, l.parts...)
}

// Do is like [Limiter.Do], but takes tokens from all parts.
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

// Wrap returns a function that calls [Limits.Do](ctx, next).
func (l *Limits) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}
