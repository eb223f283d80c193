package fleet

import (
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/reply"
	"github.com/go-resilience/resilience/throttle"
)

// An answer is the list of integers that the script returned. The types of the integers depend on the Redis client.
type answer []any

// at returns the integer at an index.
func (a answer) at(i int) int64 {
	n, _ := reply.Int(a[i])
	return n
}

// parseReply returns the answer in r. It returns an error if the answer has fewer than two integers.
func parseReply(r Reply) (answer, error) {
	a, _ := r.Value.([]any)
	ok := len(a) >= 2
	for _, field := range a {
		_, isInt := reply.Int(field)
		ok = ok && isInt
	}
	if r.Err == nil && !ok {
		r.Err = fmt.Errorf("fleet: script's answer is %T %v: must be integers", r.Value, r.Value)
	}
	return a, r.Err
}

// eval runs the script, and waits for its answer for at most Timeout.
func (l *Limits) eval(ctx context.Context, cfg *Config, keys []string, args ...any) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	value, err := cfg.Eval(ctx, script, keys, args...)
	if err == nil && ctx.Err() != nil {
		err = ctx.Err() // an answer that comes too late admits no call, although Redis has taken the call's tokens
	}
	a, err := parseReply(Reply{value, err})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.RoundTrips++
	if err == nil {
		l.redisTime, l.readAt = time.UnixMicro(a.at(1)), time.Now()
	}
	return a, err
}

// redisNow returns an estimate of the current time of Redis's clock. The time since the last answer is measured with
// this process's monotonic clock. With the wall clock, a settlement could seem to be late after the wall clock was set.
func (l *Limits) redisNow() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.readAt.IsZero() {
		return time.Now()
	}
	return l.redisTime.Add(time.Since(l.readAt))
}

// take sends the request that takes the costs of r. The request contains the calendar periods around the time that
// redisNow returns. If Redis's clock is not within these periods, the answer has Redis's time, and take sends the
// request again.
func (r *Reservation) take(ctx context.Context, ticket int64) (a answer, err error) {
	for range 2 {
		args := append(make([]any, 0, 3+4*len(r.meters)), "take", r.id, ticket)
		for i := range r.meters {
			m := &r.meters[i]
			args = append(args, m.code, m.scriptLimit()*m.unit, m.arg(r), m.scriptCost()*m.unit)
		}
		a, err = r.l.eval(ctx, r.cfg, r.keys, args...)
		if err != nil || a.at(0) != -1 {
			break
		}
	}
	n := len(r.meters)
	valid := err == nil && (r.admits(a) || a.at(0) == 0 && len(a) == 4+3*n)
	if valid && a.at(0) == 0 {
		e, _, _ := r.refusal(a)
		valid = e != nil
	}
	if err == nil && !valid {
		err = fmt.Errorf("fleet: %s: script's answer is %v", r.cfg.Name, a)
	}
	return a, err
}

// admits reports whether a is an answer to take that admits r.
func (r *Reservation) admits(a answer) bool { return len(a) == 2+len(r.meters) && a.at(0) == 1 }

// refusal returns the error and the index of the meter that refuses the call for the longest time. poll is the time
// until the next poll. If calls do not wait for a meter that refuses, poll is -1.
func (r *Reservation) refusal(a answer) (e *throttle.LimitedError, index int, poll time.Duration) {
	for i := range r.meters {
		m, fields := &r.meters[i], a[4+3*i:]
		after := time.Duration(fields.at(1)) * time.Microsecond
		if after < 0 {
			continue
		}
		reason := throttle.OverLimit
		switch {
		case fields.at(2) == 1:
			reason, poll = throttle.CoolingDown, -1
		case m.kind == quotas:
			reason, poll = throttle.OverQuota, -1
		case poll >= 0 && m.kind == slots:
			poll = max(poll, time.Duration(a.at(3))*time.Microsecond)
		case poll >= 0:
			poll = max(poll, after)
		}
		if e == nil || after > e.After {
			e, index = m.refusal(r.cfg, reason), i
			e.Left, e.After = int(fields.at(0)), after
		}
	}
	return e, index, poll
}
