package fleet

import (
	"cmp"
	"context"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/go-resilience/resilience/throttle"
)

// A Reservation is what a call has taken. It is safe for concurrent use.
type Reservation struct {
	l       *Limits
	cfg     *Config
	meters  []Meter
	id      string   // empty until it is needed
	keys    []string // of the script's take: the states of the meters first
	sets    []string // those of slots: their states, waiters and polls; empty if there are none
	taken   answer
	alone   []*throttle.Reservation // in an outage, by meter
	settled atomic.Bool

	lost context.Context // ends when a slot is lost; nil if there is none in Redis
	lose context.CancelFunc
	ends *time.Timer // calls giveUp, a twelfth of the lease before its end
}

// name gives r the keys of its meters and, if it needs one by now, its id.
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
	if r.sets != nil { // the script is asked by others, too, whose lease may be shorter
		r.id = r.l.newID() + ":" + strconv.FormatInt(r.cfg.Lease.Microseconds(), 10)
	}
}

func (l *Limits) newID() string { return l.ids + strconv.FormatInt(l.reserved.Add(1), 36) }

// admitted begins the use of what was taken, by an answer to what was sent at began.
func (r *Reservation) admitted(a answer, began time.Time) {
	r.taken = a
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	r.l.stats.Admitted++
	if r.sets == nil {
		return
	}
	r.lost, r.lose = context.WithCancel(context.Background())
	r.ends = time.AfterFunc(r.left(began), r.giveUp)
	r.l.held[r] = true
	r.l.renewIn(r.cfg.Lease / 3)
}

// left returns how long r may use its slots, whose leases were taken or renewed by what was sent at
// began: a twelfth less than the lease, so that this process stops before another has them.
func (r *Reservation) left(began time.Time) time.Duration {
	return time.Until(began.Add(r.cfg.Lease - r.cfg.Lease/12))
}

// giveUp ends r's use of its slots, if it has not been settled.
func (r *Reservation) giveUp() {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if r.l.held[r] {
		delete(r.l.held, r)
		r.l.stats.LostSlots++
		r.lose()
	}
}

// Lost returns a channel that is closed when the reservation is settled, or a slot of it is lost
// because its lease could not be renewed. It is nil if there are no slots in Redis.
func (r *Reservation) Lost() <-chan struct{} {
	if r.lost == nil {
		return nil
	}
	return r.lost.Done()
}

// Settle is [throttle.Reservation.Settle] for each meter whose cost is an [Estimate]. The others
// keep their cost, and slots are free. Without it the reservation has used its estimate. Redis
// is told in the background, again if need be, and counts it once. ctx may have ended.
func (r *Reservation) Settle(_ context.Context, used int) {
	r.settle(func(m *Meter) (int64, bool) { return int64(used), m.estimate })
}

// SettleEach is Settle with a number for each meter that used names, by what follows the first
// slash of its key.
func (r *Reservation) SettleEach(_ context.Context, used map[string]int64) {
	r.settle(func(m *Meter) (int64, bool) {
		n, ok := used[m.name]
		return n, ok
	})
}

// settle corrects the meters of which usedOf returns true.
func (r *Reservation) settle(usedOf func(*Meter) (int64, bool)) {
	if r.settled.Swap(true) {
		return
	}
	if r.lost != nil {
		r.l.mu.Lock()
		delete(r.l.held, r)
		r.l.mu.Unlock()
		r.ends.Stop()
		r.lose() // or what waits for it stays in memory
	}
	corrects := r.lost != nil
	var keys []string
	var args []any
	for i := range r.meters {
		m := &r.meters[i]
		used, ok := usedOf(m)
		if !ok {
			used = m.cost
		}
		if r.alone != nil {
			if m.kind == slots {
				used = 0
			}
			r.alone[i].Settle(context.Background(), int(used))
			continue
		}
		most := m.cost + max(2*m.limit, 1e15/m.unit) // beyond two limits it is forgiven anyway
		more := (min(max(0, used), most) - m.cost) * m.unit
		corrects = corrects || more != 0
		window := r.taken.at(2 + i)
		if m.cost == 0 {
			window = -1 // that of the settlement, since nothing was taken of another
		}
		keys = append(keys, r.keys[i])
		args = append(args, m.code, m.limit*m.unit, m.arg(r), more, window)
	}
	if r.alone == nil && corrects {
		r.tell(keys, args)
	}
}

// leave removes r from the slots and from the calls that wait for them. Otherwise its place would delay the
// calls behind it for two polls, and slots would be taken that it got by an answer that was lost.
func (r *Reservation) leave() {
	r.l.settle(Call{Script: script, Keys: r.sets, Args: []any{"free", r.id}})
}

// tell has Redis told of a settlement of r: of the states that have keys, and what is to be said of each.
func (r *Reservation) tell(keys []string, args []any) {
	if r.id == "" {
		r.id = r.l.newID()
	}
	head := []any{"settle", r.id, r.l.redisNow().UnixMicro(), r.cfg.horizon().Microseconds()}
	r.l.settle(Call{
		Script: script,
		Keys:   append([]string{r.cfg.key(r.meters[0].tag, "s", r.id)}, keys...),
		Args:   append(head, args...),
	})
}

// A settlement is to be told to Redis, until the horizon.
type settlement struct {
	Call
	tries int
}

const (
	maxUnsettled = 100_000
	maxBatch     = 64
	maxRenewed   = 1000 // slots at a time: few enough for Timeout, many because a node that hangs takes it each time
)

// settle has a settlement told to Redis, in the background.
func (l *Limits) settle(c Call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stats.Unsettled >= maxUnsettled {
		l.stats.NeverSettled++
		return
	}
	l.stats.Unsettled++
	l.send(settlement{Call: c})
}

// send has s sent with the others that are due. l.mu is held.
func (l *Limits) send(s settlement) {
	l.due = append(l.due, s)
	if !l.sending {
		l.sending = true
		go l.sendAll()
	}
}

// sendAll sends what is due until there is nothing.
func (l *Limits) sendAll() {
	for {
		l.mu.Lock()
		n := min(len(l.due), maxBatch)
		batch := l.due[:n]
		l.due = l.due[n:]
		l.sending = n > 0
		l.mu.Unlock()
		if n == 0 {
			return
		}
		calls := make([]Call, n)
		for i, s := range batch {
			calls[i] = s.Call
		}
		cfg := l.setting.Load()
		for i, r := range l.evalEach(cfg, cfg.Timeout, calls) {
			l.sent(cfg, batch[i], r)
		}
	}
}

// sent notes what became of a settlement. One that failed is sent again, up to ten times.
func (l *Limits) sent(cfg *Config, s settlement, r Reply) {
	n, err := answerOf(r)
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.tries++; err != nil && s.tries <= 10 {
		time.AfterFunc(cfg.RetryEvery, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.send(s)
		})
		return
	}
	l.stats.Unsettled--
	switch {
	case err != nil:
		l.stats.NeverSettled++
	case n.at(0) == 0:
		l.stats.LateSettled++
	case n.at(0) == 1 && len(n) > 2:
		l.stats.Forgiven += n.at(2)
	}
}

// evalEach runs calls together, within a time.
func (l *Limits) evalEach(cfg *Config, within time.Duration, calls []Call) []Reply {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	l.mu.Lock()
	l.stats.RoundTrips++
	l.mu.Unlock()
	replies := make([]Reply, len(calls))
	if cfg.EvalEach != nil {
		err := survive("EvalEach", func() error { copy(replies, cfg.EvalEach(ctx, calls)); return nil })
		for i := range replies {
			replies[i].Err = cmp.Or(replies[i].Err, err)
		}
		return replies
	}
	var all errgroup.Group
	all.SetLimit(8)
	for i, c := range calls {
		all.Go(func() error {
			replies[i].Err = survive("Eval", func() (err error) {
				replies[i].Value, err = cfg.Eval(ctx, c.Script, c.Keys, c.Args...)
				return err
			})
			return nil
		})
	}
	_ = all.Wait()
	return replies
}

// renewIn has the leases of all slots renewed in d, if that is not to be sooner. l.mu is held.
func (l *Limits) renewIn(d time.Duration) {
	at := time.Now().Add(d)
	if !l.renewAt.IsZero() && !at.Before(l.renewAt) {
		return
	}
	if l.renewAt = at; l.renewal == nil {
		l.renewal = time.AfterFunc(d, l.renew)
	} else {
		l.renewal.Reset(d)
	}
}

// renew renews the leases of all slots, and again after a third of the shortest lease. If that
// fails it tries sooner. It takes no longer than a quarter of it: else, with a long Timeout, one node that
// hangs would hold up the renewals on others until their slots are lost.
func (l *Limits) renew() {
	calls, holders, lease := l.renewals()
	if calls == nil {
		return
	}
	cfg, end, next, most := l.setting.Load(), time.Now().Add(lease/4), lease/3, maxRenewed
	if cfg.EvalEach == nil {
		most = maxBatch // or eight at a time take longer than Timeout
	}
	for len(calls) > 0 {
		n, began := 0, time.Now()
		for sum := 0; n < len(calls) && sum < most; n++ {
			sum += len(holders[n])
		}
		for i, reply := range l.evalEach(cfg, min(cfg.Timeout, end.Sub(began)), calls[:n]) {
			a, err := answerOf(reply)
			failed := err != nil || len(a) != 1+len(holders[i])
			for j, r := range holders[i] {
				switch {
				case failed:
					next = min(next, r.cfg.Lease/12)
				case a.at(1+j) == 1:
					r.ends.Reset(r.left(began))
				default:
					r.giveUp()
				}
			}
		}
		calls, holders = calls[n:], holders[n:]
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.renewIn(next)
}

// renewals returns the calls that renew all slots, each those of a tag or, of many, some of them, since a
// script that renews thousands takes longer than Timeout; whose slots they are; and the shortest lease.
func (l *Limits) renewals() (calls []Call, holders [][]*Reservation, lease time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lease = math.MaxInt64
	at := map[string]int{} // in calls, the last by tag
	for r := range l.held {
		lease = min(lease, r.cfg.Lease)
		tag := r.meters[0].tag
		i, ok := at[tag]
		if !ok || len(holders[i]) >= maxBatch {
			i = len(calls)
			at[tag] = i
			calls, holders = append(calls, Call{Script: script, Args: []any{"renew"}}), append(holders, nil)
		}
		for j := range r.meters {
			if r.meters[j].kind == slots {
				calls[i].Keys = append(calls[i].Keys, r.keys[j])
				calls[i].Args = append(calls[i].Args, r.id, r.cfg.Lease.Microseconds())
				holders[i] = append(holders[i], r)
			}
		}
	}
	l.renewAt = time.Time{}
	return calls, holders, lease
}
