package fleet

import (
	"cmp"
	"context"
	"crypto/rand"
	"sync"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

// A Reservation is what a call has taken, until it is settled. It is safe for concurrent use.
type Reservation struct {
	l     *Limits
	cfg   *Config
	plan  *plan
	id    string
	a     answer
	alone []*throttle.Reservation // in an outage, by meter; nil for slots
	lost  context.Context         // ends when a slot is lost; nil if it has none in Redis

	lose  context.CancelFunc
	until time.Time // the end of the leases; guarded by l.mu

	mu      sync.Mutex
	settled bool
}

func newID() string { return rand.Text() }

// admitted returns the reservation of a call that was admitted by an answer to what was sent
// at began.
func (l *Limits) admitted(cfg *Config, p *plan, id string, a answer, began time.Time) *Reservation {
	r := &Reservation{l: l, cfg: cfg, plan: p, id: id, a: a}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.Admitted++
	for _, m := range p.meters {
		if m.kind == 's' && r.lost == nil {
			r.lost, r.lose = context.WithCancel(context.Background())
			r.until = began.Add(cfg.Lease)
			l.held[r] = true
			if !l.renewing {
				l.renewing = true
				go l.renew()
			}
		}
	}
	return r
}

// Lost returns a channel that is closed when a slot of the reservation is lost, since its lease
// could not be renewed: others may have it.
func (r *Reservation) Lost() <-chan struct{} {
	if r.lost == nil {
		return nil
	}
	return r.lost.Done()
}

// Settle says that used tokens were used, after all, of each meter whose cost is an [Estimate]:
// what is less than was taken is given back, and what is more is owed, so that the meter refuses
// until it is paid. What is owed beyond one burst, or one limit of a quota, is forgiven, and
// counted in the Stats. The other meters keep their cost, slots are free, and a quota whose
// window is over is not corrected. A second Settle does nothing.
//
// Settle does not wait: it is told to Redis in the background. ctx may have ended, so that
// `defer r.Settle(ctx, used)` is right in every way in which a handler can end.
func (r *Reservation) Settle(_ context.Context, used int) {
	r.settle(func(m *Meter) (int64, bool) {
		_, estimate := m.cost.tokens()
		return int64(used), estimate
	})
}

// SettleEach is [Reservation.Settle] with a number for each meter that used names, by what
// follows the first slash of its key. The others keep their cost.
func (r *Reservation) SettleEach(_ context.Context, used map[string]int64) {
	r.settle(func(m *Meter) (int64, bool) {
		_, name := split(m.key)
		n, ok := used[name]
		return n, ok
	})
}

// end settles what Do has reserved: nothing was used if the call was refused further in.
func (r *Reservation) end(refused bool) {
	r.settle(func(*Meter) (int64, bool) { return 0, refused })
}

func (r *Reservation) settle(usedOf func(*Meter) (int64, bool)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.settled {
		return
	}
	r.settled = true
	if r.lost != nil {
		r.l.mu.Lock()
		delete(r.l.held, r)
		r.l.mu.Unlock()
		r.lose() // or the end of its ctx stays in memory
	}
	now := r.l.redisNow()
	s := settlement{
		tag:  r.plan.tag,
		keys: []string{r.cfg.key(r.plan.tag, "s") + r.id},
		args: []any{"settle", r.id, now.UnixMicro(), r.cfg.horizon().Microseconds()},
	}
	corrects := r.lost != nil
	for i := range r.plan.meters {
		m := &r.plan.meters[i]
		n, _ := m.cost.tokens()
		used, ok := usedOf(m)
		more := max(0, used) - n
		if !ok || m.kind == 's' {
			more = 0
		}
		if r.alone != nil {
			if r.alone[i] != nil {
				r.alone[i].Settle(context.Background(), int(n+more))
			} else {
				r.l.freeAlone(m.key)
			}
			continue
		}
		corrects = corrects || more != 0
		s.keys = append(s.keys, r.plan.keys[r.plan.states[i]])
		more = min(more, 1e15/m.unit()) // beyond a limit it is forgiven anyway
		s.args = append(s.args, string(m.kind), m.limit*m.unit(), m.arg(r.cfg.Lease, now), more*m.unit(), r.a.meters[i].number)
	}
	if r.alone == nil && corrects {
		r.l.send(s)
	}
}

// A settlement is to be told to Redis, until the horizon.
type settlement struct {
	tag   string
	keys  []string
	args  []any
	tries int
	next  time.Time
}

const (
	maxUnsent = 100_000
	maxBatch  = 64
)

// send has s told to Redis, in the background.
func (l *Limits) send(s settlement) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.unsent) >= maxUnsent {
		l.stats.Untold++
		return
	}
	l.unsent = append(l.unsent, s)
	if !l.sending {
		l.sending = true
		go l.sendAll()
	}
}

// sendAll sends what is to be told until there is nothing.
func (l *Limits) sendAll() {
	for {
		cfg := l.setting.Load()
		batch, wait := l.batch()
		switch {
		case batch == nil && wait < 0:
			return
		case batch == nil:
			time.Sleep(wait)
			continue
		}
		calls := make([]Call, len(batch))
		for i, s := range batch {
			calls[i] = Call{script, s.keys, s.args}
		}
		for i, r := range l.evalEach(cfg, calls) {
			l.told(cfg, batch[i], r)
		}
	}
}

// batch returns settlements that are due or, if none is, the time until the first is; -1 if
// there are none.
func (l *Limits) batch() (due []settlement, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	wait = -1
	var later []settlement
	for _, s := range l.unsent {
		switch in := s.next.Sub(now); {
		case in <= 0 && len(due) < maxBatch:
			due = append(due, s)
		default:
			later = append(later, s)
			if wait < 0 || in < wait {
				wait = max(0, in)
			}
		}
	}
	l.unsent = later
	l.flying = len(due)
	if len(due) == 0 && len(later) == 0 {
		l.sending = false
	}
	return due, wait
}

// told notes what became of a settlement.
func (l *Limits) told(cfg *Config, s settlement, r Reply) {
	n, err := []int64(nil), r.Err
	if err == nil {
		n, err = integers(cfg, r.Value)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flying--
	switch {
	case err != nil && s.tries >= 10:
		l.stats.Untold++
	case err != nil:
		s.tries++
		s.next = time.Now().Add(cfg.RetryEvery)
		l.unsent = append(l.unsent, s)
	case n[0] == 0:
		l.stats.Dropped++
	case n[0] == 1 && len(n) > 2:
		l.stats.Forgiven += n[2]
	}
}

// evalEach runs calls together, within Timeout.
func (l *Limits) evalEach(cfg *Config, calls []Call) (replies []Reply) {
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout)
	defer cancel()
	defer func() {
		l.mu.Lock()
		l.stats.Asked++
		l.mu.Unlock()
	}()
	replies = make([]Reply, len(calls))
	if cfg.EvalEach != nil {
		survive(func() { copy(replies, cfg.EvalEach(ctx, calls)) }, func(err error) {
			for i := range replies {
				replies[i].Err = cmp.Or(replies[i].Err, err)
			}
		})
		return replies
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for i, c := range calls {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			survive(func() { replies[i].Value, replies[i].Err = cfg.Eval(ctx, c.Script, c.Keys, c.Args...) },
				func(err error) { replies[i].Err = err })
		})
	}
	wg.Wait()
	return replies
}

// renew renews the leases of all slots, each third of a lease, until there are none. If that
// fails it tries sooner, and gives up a slot before its lease ends, so that no two have it.
func (l *Limits) renew() {
	cfg := l.setting.Load()
	again := cfg.Lease / 3
	for {
		time.Sleep(again)
		cfg = l.setting.Load()
		again = cfg.Lease / 3
		calls, holders := l.renewals(cfg)
		if calls == nil {
			return
		}
		began := time.Now()
		for i, reply := range l.evalEach(cfg, calls) {
			n, err := []int64(nil), reply.Err
			if err == nil {
				n, err = integers(cfg, reply.Value)
			}
			if err != nil || len(n) != 1+len(holders[i]) {
				again = cfg.Lease / 12
			}
			l.renewed(cfg, holders[i], n, began)
		}
	}
}

// renewals returns the calls that renew all slots, one for each tag, and whose slots they are.
func (l *Limits) renewals(cfg *Config) (calls []Call, holders [][]*Reservation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := map[string]int{}
	for r := range l.held {
		i, ok := at[r.plan.tag]
		if !ok {
			i = len(calls)
			at[r.plan.tag] = i
			calls, holders = append(calls, Call{Script: script, Args: []any{"renew"}}), append(holders, nil)
		}
		for j, m := range r.plan.meters {
			if m.kind == 's' {
				calls[i].Keys = append(calls[i].Keys, r.plan.keys[r.plan.states[j]])
				calls[i].Args = append(calls[i].Args, r.id, r.cfg.Lease.Microseconds())
				holders[i] = append(holders[i], r)
			}
		}
	}
	l.renewing = calls != nil
	return calls, holders
}

// renewed notes the answer to a call of renewals: after the time of Redis, 1 for each slot that
// is still held. Without an answer the slots are held until their leases end.
func (l *Limits) renewed(cfg *Config, holders []*Reservation, n []int64, began time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, r := range holders {
		answered := len(n) == 1+len(holders)
		switch {
		case !l.held[r]: // settled meanwhile
		case answered && n[1+i] == 1:
			r.until = began.Add(r.cfg.Lease)
		case answered, time.Until(r.until) <= cfg.Lease/12:
			delete(l.held, r)
			l.stats.Lost++
			r.lose()
		}
	}
}
