// Package fleet shares limits between processes, in Redis: rates, quotas, slots for concurrent calls, and
// cooldowns. A call takes from all of its meters, or from none, in one round trip.
//
//	limits := fleet.New(fleet.Config{
//		Name: "llm",
//		Eval: resilienceredis.Eval(client),
//		Meters: func(ctx context.Context) []fleet.Meter { // of this call
//			t := tenantOf(ctx)
//			return []fleet.Meter{
//				fleet.Rate(t.Key+"/tokens", throttle.PerMinute(t.TPM), estimate(ctx)).Burst(t.Burst).Estimated(),
//				fleet.Quota(t.Key+"/month", t.Monthly, throttle.BillingMonth(t.BilledSince), 1),
//				fleet.Slots(t.Key+"/running", t.Parallel),
//			}
//		},
//	})
//	defer limits.Close(ctx) // frees the slots of this process and flushes its settlements
//	r, err := limits.Reserve(ctx)
//	if err != nil {
//		return err
//	}
//	defer func() { r.Settle(used) }() // corrects the meters that are Estimated
//
// All times are those of Redis's clock. A call whose answer is lost or late is not admitted by Redis, although it
// may have taken its tokens; OnOutage decides about it. If Redis loses data, as in a failover, the latest tokens
// can be taken again, and calls that had a slot end. A Redis that evicts keys gives quotas back: its
// maxmemory-policy must be noeviction. If its memory is full, slots are still freed and renewed, and no further
// call is admitted. If its clock is set forward, tokens return and slots are lost, as if the time had passed. A
// rate is a token bucket.
//
// # When Redis does not answer
//
// If a round trip fails, its node cannot be reached, and an outage of that node begins. Until it ends, no call
// waits for the node; [Config.OnOutage] decides. The node is tried in the background: immediately, after 100, 200
// and 400ms, and then every RetryEvery. Three errors are no outage, because the node answers:
//
//   - An error about the keys of one call, such as TRYAGAIN while a slot of a cluster moves. OnOutage decides
//     about this call, and other calls are not affected.
//   - An error that remains until somebody changes the configuration, such as NOPERM. Calls return it, and the policy's
//     health reports it as "store_rejects".
//   - State that cannot be read, because somebody has written it. It counts as absent.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
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
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/throttle"
)

//go:embed fleet.lua
var script string

// Unlimited, in a field that accepts it, means that there is no limit.
const Unlimited = throttle.Unlimited

var (
	// ErrLost is the cause of the ctx of [Limits.Do] if the lease of its slots could not be renewed, or if Close
	// freed them.
	ErrLost = errors.New("fleet: slot lost")
	// ErrClosed is returned by calls after [Limits.Close].
	ErrClosed error = &closedError{}
)

// A closedError is a refusal: the call was not made.
type closedError struct{}

func (*closedError) Error() string { return "fleet: closed" }
func (*closedError) Refused() bool { return true }

// An OutagePolicy decides about calls while Redis cannot be reached.
type OutagePolicy string

const (
	// Refuse refuses them.
	Refuse OutagePolicy = "refuse"

	// Local admits them by this process's part, 1/Instances of each limit and at least 1, and does not tell Redis
	// later. The parts come on top of what Redis admits. All processes together admit, in each window of a quota, at
	// most its N once more, however many outages there are; and of a rate at most a burst in each outage, and the rate
	// for as long as it lasts. Measured: two processes whose limit is 3 a second with a burst of 5, and to which one
	// answer in 1.5 seconds comes too late, admit 37% more than the limit. A process has room for 100,000 meters; it
	// refuses calls that have others.
	Local OutagePolicy = "local"

	// Admit admits all of them, without a limit.
	Admit OutagePolicy = "admit"
)

// A Call is one script of [Config.EvalEach].
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

// Config configures [Limits].
type Config struct {
	// Name starts each key in Redis: processes with the same Name share the limits. Required. It cannot change.
	Name string

	// Eval runs a Lua script, always the same one, on Redis 6 or later and returns a list of integers. It must return
	// when its ctx ends, and must not repeat the script by itself. Required. For go-redis, use
	// resilienceredis.Eval(client).
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// EvalEach runs scripts in a pipeline. Nil means calls of Eval, eight at a time, so a node that hangs delays the
	// settlements and renewals on all nodes. For go-redis, use resilienceredis.EvalEach(client).
	EvalEach func(ctx context.Context, calls []Call) []Reply

	// Node returns the node that holds a key, so that an outage of one node does not affect the others. Nil
	// means that there is one node. For go-redis, use resilienceredis.Node(cluster).
	Node func(key string) string

	// Meters returns the meters of a call, from 1 to 16, whose keys are equal up to the first slash. Required.
	// If they are invalid, the call returns an error that names the reason.
	Meters func(context.Context) []Meter

	// MaxWait is how long a call may wait for slots and rates; it holds nothing while it waits. Zero means that it
	// does not wait; [Unlimited] means until its ctx ends. Calls for the same slots are admitted in order; for rates
	// there is no order. A waiting call keeps its meters, even if the limits change.
	MaxWait time.Duration

	// Lease is how long a slot is kept for a process that has died. Zero means 10 seconds; the minimum is
	// 100 ms. A process considers its slot lost a twelfth of Lease before that.
	Lease time.Duration

	// Timeout is how long a call waits for the answer of Redis. Zero means 100 ms. A Redis that hangs is
	// detected only by calls whose deadline is further away.
	Timeout time.Duration

	// RetryEvery is how often Redis is tried during an outage, after the first tries, and how often a settlement that
	// failed is repeated, up to ten times. Zero means a second.
	RetryEvery time.Duration

	// OnOutage decides about calls while Redis cannot be reached; they do not wait. Empty means Refuse.
	OnOutage OutagePolicy

	// Instances is the number of processes that share the limits. Required for Local.
	Instances int
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "fleet.Config"}
	f.Need(c.Name != "", "Name", `""`, "set: it names the limits that are shared")
	f.Need(c.Eval != nil, "Eval", "nil", "set")
	f.Need(c.Meters != nil, "Meters", "nil", "set")
	f.Need(c.MaxWait >= 0 || c.MaxWait == Unlimited, "MaxWait", c.MaxWait, "0 or more, or fleet.Unlimited")
	f.Need(c.Lease == 0 || c.Lease >= 100*time.Millisecond, "Lease", c.Lease, "0 (for 10 s), or at least 100 ms")
	f.Need(c.Timeout >= 0, "Timeout", c.Timeout, "0 (for 100 ms) or more")
	f.Need(c.RetryEvery >= 0, "RetryEvery", c.RetryEvery, "0 (for a second) or more")
	f.Need(slices.Contains([]OutagePolicy{"", Refuse, Local, Admit}, c.OnOutage), "OnOutage",
		strconv.Quote(string(c.OnOutage)), `"refuse", "local" or "admit"`)
	f.Need(c.Instances > 0 || c.OnOutage != Local && c.Instances == 0, "Instances", c.Instances,
		"1 or more where OnOutage is Local")
	return f.Err()
}

// withDefaults returns a valid c with its zero fields filled in.
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

// settleDeadline returns the time during which a settlement may be repeated.
func (c *Config) settleDeadline() time.Duration { return 10*c.RetryEvery + 11*c.Timeout }

// Limits are limits that several processes share. They are safe for concurrent use. Close them before the
// process ends.
type Limits struct {
	setting   settings.Setting[Config]
	observers notify.Observers[throttle.Event]

	ids      string        // prefix of the ids of reservations
	reserved atomic.Int64  // reservations that have an id
	closed   chan struct{} // closed by Close

	mu        sync.Mutex
	stats     Stats         // without Down
	calls     int           // of Reserve and Cooldown, in progress
	quiet     chan struct{} // closed when no call and no settlement is in progress; nil while no Close waits
	redisTime time.Time     // the latest time of Redis's clock
	readAt    time.Time     // when redisTime was read, by our clock
	nodes     map[string]*node
	local     map[string]*localPart // by the key in Redis
	purging   bool                  // a timer will remove local parts that are idle
	due       []settlement          // to be sent now; others are being sent, or wait to be sent again
	sending   bool
	held      map[*Reservation]bool // that have slots
	renewal   *time.Timer           // calls renew; nil until there are slots
	renewAt   time.Time             // of the next renewal; zero if there is none
}

// New returns Limits. It panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Limits {
	l := &Limits{
		ids: rand.Text() + "-", closed: make(chan struct{}), stats: newStats(),
		nodes: map[string]*node{}, local: map[string]*localPart{}, held: map[*Reservation]bool{},
	}
	l.setting.Init(cfg, Config.withDefaults)
	return l
}

// Do reserves, runs fn and returns its error. The call has then used its estimates, or nothing if a policy
// within fn refused it. If the reservation is refused, Do returns a [*throttle.LimitedError]. The ctx of fn
// ends with [ErrLost] if its slots are lost. Within a resiliencehttp.Transport, slots are held until the
// response has been read or closed.
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
	}, func(error) { // even if fn panics
		cancel()
		r.settle(func(*Meter) (int64, bool) { return 0, refused })
	}, nil)
}

// Wrap returns a function that runs next under Do.
func (l *Limits) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Reserve takes the costs of a call from all of its meters, or returns the [*throttle.LimitedError] of the
// meter that refuses for the longest time. It returns the error of ctx if that has already ended, and [ErrClosed]
// after Close.
func (l *Limits) Reserve(ctx context.Context) (*Reservation, error) {
	cfg := l.setting.Load()
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	if !l.begin() {
		return nil, ErrClosed
	}
	defer l.end()
	r := &Reservation{l: l, cfg: cfg, meters: cfg.Meters(ctx)}
	if err := check(r.meters); err != nil {
		return nil, err
	}
	for i := range r.meters {
		if m := &r.meters[i]; m.refused() != "" {
			return nil, l.refuse(ctx, m.refusal(cfg, m.refused()))
		}
	}
	r.name()
	return l.reserve(ctx, r)
}

// reserve asks Redis for r until it is admitted, refused, or must not wait any longer.
func (l *Limits) reserve(ctx context.Context, r *Reservation) (*Reservation, error) {
	ticket := int64(0)
	if r.cfg.MaxWait != 0 && r.sets != nil {
		ticket = 1
	}
	leaves := false // Redis may have r among the waiting calls, or slots for it
	defer func() {
		if leaves {
			r.leave()
		}
	}()
	start := time.Now()
	for began := start; ; began = time.Now() {
		if err := l.outageOf(r); err != nil {
			return l.reserveWithout(ctx, r, err)
		}
		leaves = r.sets != nil
		a, err := r.take(ctx, ticket)
		if end := endOf(ctx); end != nil {
			return nil, end
		}
		if err != nil {
			if l.failed(ctx, r.cfg, r.cooldown(), err) == nodeWrong {
				return nil, fmt.Errorf("fleet: %s: Redis rejects the script: %w", r.cfg.Name, err)
			}
			return l.reserveWithout(ctx, r, err)
		}
		if a.at(0) == 1 {
			leaves = false
			return l.admitted(r, a, began)
		}
		ticket = a.at(2)
		leaves = ticket > 0
		e, poll := r.refusal(a)
		e.Waited = time.Since(start)
		wait, reason := r.cfg.waitFor(ctx, e, poll)
		if reason != "" {
			e.Reason = reason
			if reason == throttle.DeadlineTooClose {
				e.Err = context.DeadlineExceeded
			}
			return nil, l.refuse(ctx, e)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-l.closed:
			timer.Stop()
			return nil, ErrClosed
		case <-ctx.Done():
			timer.Stop()
			e.Reason, e.Err, e.Waited = throttle.ContextEnded, ended.Error(ctx), time.Since(start)
			return nil, l.refuse(ctx, e)
		}
	}
}

// waitFor returns the time until the next poll of a call that e refuses, or the reason why it does not wait. poll
// is the time that Redis proposes, or -1 if no call waits for the meter that refuses.
func (c *Config) waitFor(
	ctx context.Context, e *throttle.LimitedError, poll time.Duration,
) (time.Duration, throttle.Reason) {
	if c.MaxWait == 0 || poll < 0 {
		return 0, e.Reason
	}
	left := c.MaxWait - e.Waited
	if c.MaxWait == Unlimited {
		left = math.MaxInt64
	}
	deadline, limited := ctx.Deadline()
	switch {
	case left <= 0 || e.After > left:
		return 0, throttle.WaitTooLong
	case limited && e.After > time.Until(deadline):
		return 0, throttle.DeadlineTooClose
	}
	return min(poll, left), "" // the last poll comes with the end of MaxWait
}

// endOf returns the error of ctx if it has ended. A ctx whose deadline has passed has ended even if it is not
// canceled yet: a connection with the same deadline often returns a moment before, and that is no outage.
func endOf(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ctx.Err() == nil && ok && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return ended.Error(ctx)
}

// refuse counts a refused call and notifies the observers.
func (l *Limits) refuse(ctx context.Context, e *throttle.LimitedError) error {
	l.mu.Lock()
	l.stats.Refusals[e.Reason]++
	l.mu.Unlock()
	l.observers.Tell(ctx, throttle.Event{
		Kind: throttle.EventRefused, Name: e.Name, Key: e.Key, Cost: e.Cost, Waited: e.Waited, Reason: e.Reason, Err: e,
	})
	return e
}

// Cooldown makes all processes refuse calls that use the meter key, even with a cost of 0, for the given time,
// such as the Retry-After of an upstream. It never shortens a cooldown, and does nothing if d is not positive. While
// Redis cannot be reached, the error matches [throttle.ErrOutage].
func (l *Limits) Cooldown(ctx context.Context, key string, d time.Duration) error {
	cfg := l.setting.Load()
	if d <= 0 {
		return nil
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if !l.begin() {
		return ErrClosed
	}
	defer l.end()
	tag, name, _ := strings.Cut(key, "/")
	r := &Reservation{l: l, cfg: cfg, keys: []string{cfg.key(tag, "c", name)}}
	if err := l.outageOf(r); err != nil {
		return fmt.Errorf("%w: %w", throttle.ErrOutage, err)
	}
	_, err := l.eval(ctx, cfg, r.keys, "cool", d.Microseconds())
	if end := endOf(ctx); end != nil {
		return end
	}
	if err == nil {
		return nil
	}
	if t := l.failed(ctx, cfg, r.cooldown(), err); t.isOutage() {
		return fmt.Errorf("%w: %w", throttle.ErrOutage, err)
	}
	return fmt.Errorf("fleet: %s: cooldown of %s: %w", cfg.Name, key, err)
}

// Close refuses further calls with [ErrClosed], frees the slots of reservations that have not been settled, and
// waits until all settlements have reached Redis or ctx ends. The error names how many did not. The ctx of a Do
// that is running ends with [ErrLost] if it has slots, and a reservation can still be settled, without a
// guarantee. Close may be called again, to wait again.
func (l *Limits) Close(ctx context.Context) error {
	l.mu.Lock()
	select {
	case <-l.closed:
	default:
		close(l.closed)
	}
	before := l.stats.NeverSettled
	for r := range l.held {
		l.release(r)
		l.enqueue(r.free())
	}
	for l.calls > 0 || l.stats.Unsettled > 0 {
		if l.quiet == nil {
			l.quiet = make(chan struct{})
		}
		quiet := l.quiet
		l.mu.Unlock()
		select {
		case <-quiet:
			l.mu.Lock()
			continue
		case <-ctx.Done():
		}
		l.mu.Lock()
		break
	}
	missing := l.stats.NeverSettled - before + int64(l.stats.Unsettled)
	l.mu.Unlock()
	if missing == 0 {
		return nil
	}
	err := fmt.Errorf("fleet: %s: %d settlements did not reach Redis", l.setting.Load().Name, missing)
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", err, ended.Error(ctx))
	}
	return err
}

// begin counts a call that begins. It returns false after Close.
func (l *Limits) begin() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return false
	default:
		l.calls++
		return true
	}
}

// end counts a call that ends.
func (l *Limits) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls--
	l.wakeClose()
}

// wakeClose wakes a Close that waits, if nothing is in progress. l.mu is held.
func (l *Limits) wakeClose() {
	if l.quiet != nil && l.calls == 0 && l.stats.Unsettled == 0 {
		close(l.quiet)
		l.quiet = nil
	}
}

// Config returns the configuration with defaults filled in.
func (l *Limits) Config() Config { return l.setting.Config() }

// Update changes the configuration of this process, as [throttle.Limiter.Update] does, for calls that begin
// later.
func (l *Limits) Update(change func(*Config)) error { return l.setting.Update(change, same, nil) }

// same returns an error if an update changes the name.
func same(was, next *Config) error { return invalid.Renamed("fleet.Config", was.Name, next.Name) }
