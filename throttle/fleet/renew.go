package fleet

import (
	"math"
	"time"
)

// maxRenewed is the number of slots that are renewed together. It is small enough for the renewal to finish within
// Timeout. It is not smaller, because each round trip to a node that hangs takes the whole Timeout.
const maxRenewed = 1000

// renewIn schedules the renewal of all leases after d, unless an earlier renewal is scheduled. The caller holds l.mu.
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

// renew renews the leases of all slots, and schedules the next renewal after a third of the shortest lease. If a
// renewal fails, the next renewal is earlier. renew sends requests for at most a quarter of the shortest lease.
// Without this bound, and with a long Timeout, a node that hangs would delay the renewals on other nodes until their
// slots are lost.
func (l *Limits) renew() {
	calls, holders, lease := l.renewals()
	if calls == nil {
		return
	}
	cfg, end, next, most := l.setting.Load(), time.Now().Add(lease/4), lease/3, maxRenewed
	if cfg.EvalEach == nil {
		most = maxBatch // a larger batch, eight calls at a time, would take longer than Timeout
	}
	for len(calls) > 0 {
		n, began := 0, time.Now()
		for sum := 0; n < len(calls) && sum < most; n++ {
			sum += len(holders[n])
		}
		for i, reply := range l.evalEach(cfg, min(cfg.Timeout, end.Sub(began)), calls[:n]) {
			a, err := parseReply(reply)
			failed := err != nil || len(a) != 1+len(holders[i])
			for j, r := range holders[i] {
				switch {
				case failed:
					next = min(next, r.cfg.Lease/12)
				case a.at(1+j) == 1:
					r.extend(began)
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

// extend extends the time for which r may use its slots. The request that renewed the lease was sent at began.
func (r *Reservation) extend(began time.Time) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if r.l.held[r] {
		r.ends.Reset(r.left(began))
	}
}

// renewals returns the calls that renew all slots, the reservations whose slots each call renews, and the shortest
// lease. A call renews only slots whose keys have the same tag. The number of slots in a call is limited, because a
// script that renews thousands of slots takes longer than Timeout.
func (l *Limits) renewals() (calls []Call, holders [][]*Reservation, lease time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lease = math.MaxInt64
	last := map[string]int{} // the index of a tag's last call in calls
	for r := range l.held {
		lease = min(lease, r.cfg.Lease)
		tag := r.meters[0].tag
		i, ok := last[tag]
		if !ok || len(holders[i]) >= maxBatch {
			i = len(calls)
			last[tag] = i
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
