package throttle

import (
	"context"
	"sync/atomic"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A Reservation is what a call has taken. One that is never settled has used it all. It is
// safe for concurrent use.
type Reservation struct {
	settled atomic.Bool
	parts   []part
}

// A part is what a Reservation has taken of one limit.
type part struct {
	estimate bool // Settle corrects it
	settle   func(used int)
}

// A Part is what [All] can take from: a [*Limiter], or what [Group.For] returns.
type Part interface {
	reserve(ctx context.Context, n int) (part, error)
}

// reserve takes n tokens, or what their Costs say, from each of parts or from none.
func reserve(ctx context.Context, n int, parts ...Part) (*Reservation, error) {
	r, all := &Reservation{}, false
	defer func() {
		if !all { // or a Cost has panicked
			r.release(ctx)
		}
	}()
	for _, p := range parts {
		taken, err := p.reserve(ctx, n)
		if err != nil {
			return nil, err
		}
		r.parts = append(r.parts, taken)
	}
	all = true
	return r, nil
}

func (l *Limiter) reserve(ctx context.Context, n int) (part, error) {
	h, err := l.hold(ctx, n)
	estimate := n != byCost || l.setting.Load().Cost != nil
	return part{estimate, func(used int) { l.settle(&l.meter, h, used) }}, err
}

// Settle says that used tokens were used: less than was taken is given back; more is charged,
// and the limit in debt refuses calls until that is paid. A debt beyond one Burst, or one N of a
// quota, is forgiven. A window that is over is not corrected; what had reserved nothing is charged
// to the present one. A second Settle does nothing. ctx is not used, and may have ended.
//
// Of what [All] has taken, Settle corrects the limits that have a Cost. If nothing was sent, as
// resilience.Refused(err) says, call SettleEach instead, with a 0 for each.
func (r *Reservation) Settle(_ context.Context, used int) {
	if !r.settled.Swap(true) {
		for _, p := range r.parts {
			if p.estimate {
				p.settle(used)
			}
		}
	}
}

// SettleEach is Settle with a number for each limit, in the order of [All]. A limit without one has
// used what it took.
func (r *Reservation) SettleEach(_ context.Context, used ...int) {
	if !r.settled.Swap(true) {
		for i, p := range r.parts[:min(len(used), len(r.parts))] {
			p.settle(used[i])
		}
	}
}

// release gives back all that was taken.
func (r *Reservation) release(ctx context.Context) { r.SettleEach(ctx, make([]int, len(r.parts))...) }

// Limits are several limits that a call takes from together. See [All].
type Limits struct{ parts []Part }

// All returns a policy that takes what their Costs say from each of parts, or from none. A call that
// waits for one holds the tokens of those before it.
//
//	limits := throttle.All(users.For(userOf), organizations.For(organizationOf))
func All(parts ...Part) *Limits { return &Limits{parts} }

// Reserve takes the tokens of a call, or returns the error of the limit that refused it.
func (l *Limits) Reserve(ctx context.Context) (*Reservation, error) {
	return reserve(ctx, byCost, l.parts...)
}

// Do is [Limiter.Do] for all of them.
func (l *Limits) Do(ctx context.Context, fn func(context.Context) error) error {
	r, err := l.Reserve(ctx)
	if err != nil {
		return err
	}
	err = fn(ctx)
	if behavior.IsRefused(err) {
		r.release(ctx)
	}
	return err
}

func (l *Limits) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}
