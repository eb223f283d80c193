// Package fleet has limits for many processes together, kept in Redis: rates, quotas of a
// window, slots for calls at once, and cooldowns. A call takes from all of its meters, or from
// none, in one round trip.
//
//	limits := fleet.New(fleet.Config{
//		Name: "llm",
//		Eval: resilienceredis.Eval(client),
//		Meters: func(ctx context.Context) []fleet.Meter { // of this call
//			t := tenantOf(ctx)
//			return []fleet.Meter{
//				fleet.Rate(t.Key+"/tokens", throttle.PerMinute(float64(t.TPM)), fleet.Estimate(estimate(ctx))).Burst(t.TPM),
//				fleet.Quota(t.Key+"/month", t.Monthly, throttle.Month.From(t.BilledSince), 1),
//				fleet.Slots(t.Key+"/running", t.Parallel),
//			}
//		},
//	})
//	r, err := limits.Reserve(ctx)
//	if err != nil {
//		return err
//	}
//	defer func() { r.Settle(ctx, used) }() // corrects the meters whose cost is an Estimate
//
// All times are those of the clock of Redis. A call whose answer is lost or late may have taken
// its tokens, and is not admitted, unless by [Local]. If Redis loses data, as in a failover, tokens
// that were taken last can be taken again, and a call that had a slot ends. One that evicts keys, as
// a cache does, gives back whole quotas: its maxmemory-policy must be noeviction. If its clock is set
// forward, tokens come back and slots are lost, as if the time had passed. A rate is a token bucket.
package fleet

import (
	"cmp"
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/reply"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/throttle"
)

//go:embed fleet.lua
var script string

// An OutagePolicy says what happens to calls while Redis cannot be reached.
type OutagePolicy string

const (
	Refuse OutagePolicy = "refuse"
	// Local admits calls by 1/Instances of each limit, at least 1, and never tells Redis. In an outage it has
	// room for 100 000 meters, and refuses calls that have others.
	Local OutagePolicy = "local"
)

// A Call is a call of Eval for [Config.EvalEach].
type Call struct {
	Script string
	Keys   []string
	Args   []any
}

// A Reply is the result of a [Call].
type Reply struct {
	Value any
	Err   error
}

// Config says how [Limits] work.
type Config struct {
	// Name begins each key in Redis: processes with the same Name share the limits. Required.
	Name string

	// Eval runs a Lua script, always the same, on Redis 6 or later, and returns a list of
	// integers. It must return when its ctx ends, and not run the script again by itself.
	// Required. For go-redis it is resilienceredis.Eval(client).
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// EvalEach runs scripts in a pipeline. Nil means that settlements and renewals of slots are calls
	// of Eval, eight at once, which a node that hangs holds up for all nodes. For go-redis it is
	// resilienceredis.EvalEach(client).
	EvalEach func(ctx context.Context, calls []Call) []Reply

	// Node returns the node that keeps a key, so that the outage of one leaves the others
	// alone. Nil means that there is one. For go-redis it is resilienceredis.Node(cluster).
	Node func(key string) string

	// Meters returns the meters of a call: 1 to 16, whose keys have the same text before their
	// first slash. Required. If they are invalid, the call returns an error that says why.
	Meters func(context.Context) []Meter

	// MaxWait is how long a call may wait for slots and rates, holding nothing. Zero means
	// that it is refused immediately, negative that it may wait until its ctx ends. For the
	// same slots, who came first is admitted first; for rates alone there is no order. The call
	// keeps its meters: what a limit becomes meanwhile is for calls that begin later.
	MaxWait time.Duration

	// Lease is how long a slot is kept for a process that no longer renews it. Zero means 10
	// seconds; the least is 100 ms. The process takes it for lost a twelfth of it before.
	Lease time.Duration

	// Timeout is how long a call waits for the answer of Redis. Zero means 100 ms. That a Redis hangs
	// is found out by calls whose ctx allows for longer.
	Timeout time.Duration

	// RetryEvery is how often Redis is tried in an outage, and a settlement that could not be
	// told, up to ten times. Zero means a second.
	RetryEvery time.Duration

	// OnOutage says what happens to calls while Redis cannot be reached; they do not wait.
	// Empty means Refuse.
	OnOutage OutagePolicy

	// Instances is the number of processes that share the limits. Local needs it.
	Instances int
}

// Validate returns an error that names each invalid field.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "fleet.Config"}
	f.Need(c.Name != "", "Name", `""`, "set: it names the limits that are shared")
	f.Need(c.Eval != nil, "Eval", "nil", "set")
	f.Need(c.Meters != nil, "Meters", "nil", "set")
	f.Need(c.Lease == 0 || c.Lease >= 100*time.Millisecond, "Lease", c.Lease, "0 (for 10 s), or at least 100 ms")
	f.Need(c.Timeout >= 0, "Timeout", c.Timeout, "0 (for 100 ms) or more")
	f.Need(c.RetryEvery >= 0, "RetryEvery", c.RetryEvery, "0 (for a second) or more")
	f.Need(slices.Contains([]OutagePolicy{"", Refuse, Local}, c.OnOutage), "OnOutage",
		strconv.Quote(string(c.OnOutage)), `"refuse" or "local"`)
	f.Need(c.Instances > 0 || c.OnOutage != Local && c.Instances == 0, "Instances", c.Instances,
		"1 or more where OnOutage is Local")
	return f.Err()
}

func (c Config) withDefaults() Config {
	c.Lease = cmp.Or(c.Lease, 10*time.Second)
	c.Timeout = cmp.Or(c.Timeout, 100*time.Millisecond)
	c.RetryEvery = cmp.Or(c.RetryEvery, time.Second)
	c.OnOutage = cmp.Or(c.OnOutage, Refuse)
	if c.Node == nil {
		c.Node = func(string) string { return "" }
	}
	return c
}

// horizon is for how long a settlement may be repeated.
func (c *Config) horizon() time.Duration { return 10*c.RetryEvery + 11*c.Timeout }

// Limits are limits of a fleet. They are safe for concurrent use.
type Limits struct {
	setting   settings.Setting[Config]
	observers notify.Observers[throttle.Event]

	ids      string       // with which those of its reservations begin
	reserved atomic.Int64 // reservations that have got one

	mu        sync.Mutex
	stats     Stats     // without Down
	redisTime time.Time // what the clock of Redis said last
	readAt    time.Time // when that was, by our clock
	down      map[string]*outage
	local     map[string]*throttle.Limiter // this process's part of a meter, in an outage, by its key in Redis
	due       []settlement                 // to be sent now; others are being sent, or wait to be sent again
	sending   bool
	held      map[*Reservation]bool // that have slots
	renewal   *time.Timer           // calls renew; nil until there are slots
	renewAt   time.Time             // when; zero if it is not to
}

// ErrLost is why the ctx of [Limits.Do] ends if the lease of its slots could not be renewed.
var ErrLost = errors.New("fleet: a slot was lost")

// New panics if cfg is not valid.
func New(cfg Config) *Limits {
	l := &Limits{
		ids: rand.Text() + "-", stats: newStats(),
		down: map[string]*outage{}, local: map[string]*throttle.Limiter{}, held: map[*Reservation]bool{},
	}
	l.setting.Init(cfg, Config.withDefaults)
	return l
}

// Do reserves, runs fn and returns its error. The call has used its estimates then, or nothing
// if a policy within fn refused it. Without a reservation Do returns the error of Reserve. The
// ctx of fn ends with [ErrLost] if its slots are lost. Under a resiliencehttp.Transport they are
// held until the response's body has been read or closed.
func (l *Limits) Do(ctx context.Context, fn func(context.Context) error) error {
	r, err := l.Reserve(ctx)
	if err != nil {
		return err
	}
	inner, cancel := ctx, func() {}
	if r.lost != nil {
		lossy, lose := context.WithCancelCause(ctx)
		stop := context.AfterFunc(r.lost, func() { lose(ErrLost) })
		inner, cancel = lossy, func() { stop(); lose(nil) }
	}
	refused := false
	return linger.WorkOf(ctx).Hold(inner, func(ctx context.Context) error {
		err := fn(ctx)
		refused = behavior.IsRefused(err)
		return err
	}, func(error) { // also if fn panics
		cancel()
		r.settle(func(*Meter) (int64, bool) { return 0, refused })
	}, nil)
}

func (l *Limits) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Reserve takes what the meters of a call say from all of them, or returns the
// [*throttle.LimitedError] of the one that refuses for the longest time. If ctx has already
// ended, Reserve returns why.
func (l *Limits) Reserve(ctx context.Context) (*Reservation, error) {
	cfg := l.setting.Load()
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	r := &Reservation{l: l, cfg: cfg, meters: cfg.Meters(ctx)}
	if err := check(r.meters); err != nil {
		return nil, err
	}
	for i := range r.meters {
		if m := &r.meters[i]; m.cost > m.limit {
			return nil, l.refuse(ctx, m.refusal(cfg, throttle.TooCostly))
		}
	}
	r.name()
	cool := r.keys[len(r.meters)] // which a ping writes
	ticket := int64(0)
	if cfg.MaxWait != 0 && r.sets != nil {
		ticket = 1
	}
	leaves := false // it may stand in line, or have slots of which it does not know
	defer func() {
		if leaves {
			r.leave()
		}
	}()
	start := time.Now()
	for began := start; ; began = time.Now() {
		if err := l.outageOf(cfg, cool); err != nil {
			return l.reserveAlone(ctx, r, err)
		}
		leaves = r.sets != nil
		a, err := r.take(ctx, ticket)
		if end := endOf(ctx); end != nil {
			return nil, end
		}
		if err != nil {
			l.fails(ctx, cfg, cool, err)
			return l.reserveAlone(ctx, r, err)
		}
		if a.at(0) == 1 {
			leaves = false
			r.admitted(a, began)
			return r, nil
		}
		ticket = a.at(2)
		leaves = ticket > 0
		e, wait := r.refusal(a)
		if cfg.MaxWait == 0 || wait < 0 {
			return nil, l.refuse(ctx, e)
		}
		e.Waited = time.Since(start)
		left := cfg.MaxWait - e.Waited
		if cfg.MaxWait < 0 {
			left = math.MaxInt64
		}
		switch deadline, limited := ctx.Deadline(); {
		case left <= 0 || e.After > left:
			e.Reason = throttle.WaitTooLong
		case limited && e.After > time.Until(deadline):
			e.Reason, e.Err = throttle.DeadlineTooClose, context.DeadlineExceeded
		default:
			timer := time.NewTimer(min(wait, left)) // the last poll comes with the end of MaxWait
			select {
			case <-timer.C:
				continue
			case <-ctx.Done():
				timer.Stop()
				e.Reason, e.Err, e.Waited = throttle.ContextEnded, ended.Error(ctx), time.Since(start)
			}
		}
		return nil, l.refuse(ctx, e)
	}
}

// endOf returns why ctx has ended, or nil: also if its deadline has passed and it is not canceled yet,
// since a connection with the same deadline often returns a moment before. That is no outage.
func endOf(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ctx.Err() == nil && ok && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return ended.Error(ctx)
}

// take asks Redis to take what the meters say. If the times of a calendar were not those of its clock, it
// says so, and is asked again.
func (r *Reservation) take(ctx context.Context, ticket int64) (a answer, err error) {
	for range 2 {
		args := append(make([]any, 0, 3+4*len(r.meters)), "take", r.id, ticket)
		for i := range r.meters {
			m := &r.meters[i]
			args = append(args, m.code, m.limit*m.unit, m.arg(r), m.cost*m.unit)
		}
		a, err = r.l.eval(ctx, r.cfg, r.keys, args...)
		if err != nil || a.at(0) != -1 {
			break
		}
	}
	n := len(r.meters)
	valid := err == nil && (a.at(0) == 1 && len(a) == 2+n || a.at(0) == 0 && len(a) == 4+3*n)
	if valid && a.at(0) == 0 {
		e, _ := r.refusal(a)
		valid = e != nil
	}
	if err == nil && !valid {
		err = fmt.Errorf("fleet: %s: the script's answer is %v", r.cfg.Name, a)
	}
	return a, err
}

// An answer is what the script has returned: integers, in whatever form the client has them.
type answer []any

func (a answer) at(i int) int64 {
	n, _ := reply.Int(a[i])
	return n
}

// answerOf returns what the script has answered: at least two integers.
func answerOf(r Reply) (answer, error) {
	a, _ := r.Value.([]any)
	ok := len(a) >= 2
	for _, field := range a {
		_, isInt := reply.Int(field)
		ok = ok && isInt
	}
	if r.Err == nil && !ok {
		r.Err = fmt.Errorf("fleet: the script's answer is %T %v: must be integers", r.Value, r.Value)
	}
	return a, r.Err
}

// eval runs the script, within Timeout.
func (l *Limits) eval(ctx context.Context, cfg *Config, keys []string, args ...any) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	value, err := cfg.Eval(ctx, script, keys, args...)
	if err == nil && ctx.Err() != nil {
		err = ctx.Err() // an answer that comes late has taken its tokens, and admits nobody
	}
	a, err := answerOf(Reply{value, err})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.RoundTrips++
	if err == nil {
		l.redisTime, l.readAt = time.UnixMicro(a.at(1)), time.Now()
	}
	return a, err
}

// redisNow returns what the clock of Redis says, as far as it is known. It goes on by our steady
// clock, because a settlement would seem too late if our wall clock was set.
func (l *Limits) redisNow() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.readAt.IsZero() {
		return time.Now()
	}
	return l.redisTime.Add(time.Since(l.readAt))
}

// refusal returns the error of the meter that refuses for the longest time, and the time until
// the next try; -1 if no call waits for what refuses.
func (r *Reservation) refusal(a answer) (e *throttle.LimitedError, wait time.Duration) {
	for i := range r.meters {
		m, fields := &r.meters[i], a[4+3*i:]
		after := time.Duration(fields.at(1)) * time.Microsecond
		if after < 0 {
			continue
		}
		reason := throttle.OverLimit
		switch {
		case fields.at(2) == 1:
			reason, wait = throttle.CoolingDown, -1
		case m.kind == quotas:
			reason, wait = throttle.OverQuota, -1
		case wait >= 0 && m.kind == slots:
			wait = max(wait, time.Duration(a.at(3))*time.Microsecond)
		case wait >= 0:
			wait = max(wait, after)
		}
		if e == nil || after > e.After {
			e = m.refusal(r.cfg, reason)
			e.Left, e.After = int(fields.at(0)), after
		}
	}
	return e, wait
}

// refusal returns the error of a call that m refuses.
func (m *Meter) refusal(cfg *Config, reason throttle.Reason) *throttle.LimitedError {
	return &throttle.LimitedError{
		Name: cfg.Name, Key: m.key, Reason: reason, Limit: int(m.limit), Quota: m.window, Cost: int(m.cost),
	}
}

// refuse counts a refused call, and tells the observers.
func (l *Limits) refuse(ctx context.Context, e *throttle.LimitedError) error {
	l.mu.Lock()
	l.stats.Refusals[e.Reason]++
	l.mu.Unlock()
	l.observers.Tell(ctx, throttle.Event{
		Kind: throttle.EventRefused, Name: e.Name, Key: e.Key, Cost: e.Cost, Waited: e.Waited, Reason: e.Reason, Err: e,
	})
	return e
}

// Cool refuses whoever has a meter of key, also one of cost 0, in all processes, until a time,
// such as that of an upstream's Retry-After; what counts is how long it is from now. A second
// Cool never shortens it. While Redis cannot be reached, the error matches [throttle.ErrOutage].
func (l *Limits) Cool(ctx context.Context, key string, until time.Time) error {
	cfg := l.setting.Load()
	d := time.Until(until)
	if d <= 0 {
		return nil
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	tag, name, _ := strings.Cut(key, "/")
	keys := []string{cfg.key(tag, "c", name)}
	err := l.outageOf(cfg, keys[0])
	if err == nil {
		_, err = l.eval(ctx, cfg, keys, "cool", d.Microseconds())
		if end := endOf(ctx); end != nil {
			return end
		}
		if err == nil {
			return nil
		}
		l.fails(ctx, cfg, keys[0], err)
	}
	return fmt.Errorf("%w: %w", throttle.ErrOutage, err)
}
