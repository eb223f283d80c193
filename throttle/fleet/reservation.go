package fleet

import (
	"context"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// A Reservation records the tokens and slots that a call has taken. It is safe for concurrent use.
type Reservation struct {
	l       *Limits
	cfg     *Config
	meters  []Meter
	id      string   // empty until the script or a settlement needs an id
	keys    []string // KEYS for take: the meters' states and cooldowns, then the waiters and polls of slots
	sets    []string // the keys of the states, waiters and polls of slots; empty if r has no slots
	settled atomic.Bool

	taken   answer                  // the answer of Redis that admitted r
	without bool                    // OnOutage admitted r, without Redis
	parts   []*throttle.Reservation // a reservation for each meter, if Local admitted r

	lost context.Context // canceled when a slot is lost; nil if r has no slots in Redis
	lose context.CancelFunc
	ends *time.Timer // calls giveUp a twelfth of the lease before the lease ends
}

// name sets the keys of r. If r has slots, name also sets the id, by which Redis identifies the holder of a slot.
func (r *Reservation) name() {
	n := len(r.meters)
	r.keys = make([]string, 2*n, 4*n)
	for i := range r.meters {
		m := &r.meters[i]
		r.keys[i], r.keys[n+i] = r.cfg.key(m.tag, m.code, m.name), r.cfg.key(m.tag, "c", m.name)
		if m.kind == slots {
			waiters, polls := r.cfg.key(m.tag, "w", m.name), r.cfg.key(m.tag, "p", m.name)
			r.keys, r.sets = append(r.keys, waiters, polls), append(r.sets, r.keys[i], waiters, polls)
		}
	}
	if r.sets != nil { // the id contains the lease, because the script may run with a shorter lease
		r.id = r.l.newID() + ":" + strconv.FormatInt(r.cfg.Lease.Microseconds(), 10)
	}
}

// newID returns an id that no other reservation has.
func (l *Limits) newID() string { return l.ids + strconv.FormatInt(l.reserved.Add(1), 36) }

// cooldown returns the key of the first meter's cooldown. This key identifies the node of r, and a ping may write the
// key.
func (r *Reservation) cooldown() string { return r.keys[len(r.meters)] }

// admitted completes r with the answer to a request that was sent at began. After Close, admitted refunds the tokens of
// r, frees its slots and returns ErrClosed.
func (l *Limits) admitted(r *Reservation, a answer, began time.Time) (*Reservation, error) {
	l.mu.Lock()
	select {
	case <-l.closed:
		l.mu.Unlock()
		r.refund(a)
		return nil, ErrClosed
	default:
	}
	defer l.mu.Unlock()
	r.taken = a
	l.stats.Admitted++
	if r.sets == nil {
		return r, nil
	}
	r.lost, r.lose = context.WithCancel(context.Background())
	r.ends = time.AfterFunc(r.left(began), r.giveUp)
	l.held[r] = true
	l.renewIn(r.cfg.Lease / 3)
	return r, nil
}

// left returns the time for which r may still use its slots. began is the time when the request that took or renewed
// the leases was sent. The time ends a twelfth of the lease before the lease. Thus this process stops before another
// process gets the slots.
func (r *Reservation) left(began time.Time) time.Duration {
	return time.Until(began.Add(r.cfg.Lease - r.cfg.Lease/12))
}

// giveUp makes r lose its slots, because their lease could not be renewed.
func (r *Reservation) giveUp() {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if r.l.held[r] {
		r.l.stats.LostSlots++
		r.l.release(r)
	}
}

// release ends the use of r's slots, if r has slots. The caller holds l.mu.
func (l *Limits) release(r *Reservation) {
	if l.held[r] {
		delete(l.held, r)
		r.ends.Stop()
		r.lose()
	}
}

// Lost returns a channel that is closed when r no longer holds its slots: when r is settled, when the lease of a slot
// could not be renewed, or when [Limits.Close] frees the slots. Lost returns nil if r has no slots in Redis.
func (r *Reservation) Lost() <-chan struct{} {
	if r.lost == nil {
		return nil
	}
	return r.lost.Done()
}

// Settle corrects the reservation to the number of tokens that the call used, and frees the slots of the reservation.
// Settle corrects only meters whose cost is [Meter.Estimated]. For the rules of the correction, see
// [throttle.Reservation.Settle]. If Settle is not called, the call counts as having used its costs, and keeps its slots
// until [Limits.Close] frees them.
//
// The settlement is sent to Redis in the background, several times if necessary, but Redis counts it at most once. At
// most 100,000 settlements are pending. Any further settlement is dropped, and is counted in Stats.NeverSettled. Close
// waits for all settlements.
func (r *Reservation) Settle(used int) {
	r.settle(func(m *Meter) (int64, bool) { return int64(used), m.estimate })
}

// SettleEach is like [Reservation.Settle], but takes a number of tokens for each meter. Each entry of the map corrects
// one meter. The entry's key is the part of the meter's key after the first slash. SettleEach does not correct a
// meter without an entry.
func (r *Reservation) SettleEach(used map[string]int) {
	r.settle(func(m *Meter) (int64, bool) {
		n, ok := used[m.name]
		return int64(n), ok
	})
}

// settle corrects the meters for which usedOf returns true.
func (r *Reservation) settle(usedOf func(*Meter) (used int64, ok bool)) {
	if r.settled.Swap(true) {
		return
	}
	if r.without {
		r.settleLocally(usedOf)
		return
	}
	r.l.mu.Lock()
	r.l.release(r)
	r.l.mu.Unlock()
	if c, ok := r.correction(usedOf); ok {
		r.l.mu.Lock()
		defer r.l.mu.Unlock()
		r.l.enqueue(c)
	}
}

// correction returns the call that settles r. It returns false if r needs no correction and has no slot to free.
func (r *Reservation) correction(usedOf func(*Meter) (used int64, ok bool)) (Call, bool) {
	corrects := r.sets != nil
	keys := make([]string, 1, 1+len(r.meters))
	args := make([]any, 4, 4+5*len(r.meters))
	for i := range r.meters {
		m := &r.meters[i]
		used, ok := usedOf(m)
		if !ok || m.limit == throttle.None || m.limit == throttle.Unlimited {
			used = m.cost
		}
		most := m.cost + max(2*m.limit, 1e15/m.unit) // debt beyond twice the limit is forgiven anyway
		more := (min(max(0, used), most) - m.cost) * m.unit
		corrects = corrects || more != 0
		window := r.taken.at(2 + i)
		if m.cost == 0 {
			window = -1 // the current window, because the call took no tokens of an earlier window
		}
		keys = append(keys, r.keys[i])
		args = append(args, m.code, m.scriptLimit()*m.unit, m.arg(r), more, window)
	}
	if !corrects {
		return Call{}, false
	}
	if r.id == "" {
		r.id = r.l.newID()
	}
	keys[0] = r.cfg.key(r.meters[0].tag, "s", r.id)
	copy(args, []any{"settle", r.id, r.l.redisNow().UnixMicro(), r.cfg.settleDeadline().Microseconds()})
	return Call{Script: script, Keys: keys, Args: args}, true
}

// refund returns the tokens and slots that Redis took for r in the answer a, because the call does not run.
func (r *Reservation) refund(a answer) {
	r.taken = a
	if c, ok := r.correction(func(*Meter) (int64, bool) { return 0, true }); ok {
		r.l.mu.Lock()
		defer r.l.mu.Unlock()
		r.l.enqueue(c)
	}
}

// free returns the call that removes r from the holders of its slots and from the calls that wait for slots.
func (r *Reservation) free() Call {
	return Call{Script: script, Keys: r.sets, Args: []any{"free", r.id}}
}

// leave removes r from the waiting calls and frees its slots. A waiting call that no longer polls would delay the
// calls behind it for more than a second. r may have slots if the answer that gave it the slots was lost.
func (r *Reservation) leave() {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	r.l.enqueue(r.free())
}
