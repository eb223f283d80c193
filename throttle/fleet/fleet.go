// Package fleet shares limits between processes, in Redis. The limits are rates, quotas, slots for concurrent calls,
// and cooldowns. A call takes from all of its meters, or from none, in one round trip.
//
//	limits := fleet.New(fleet.Config{
//		Name: "llm",
//		Eval: resilienceredis.Eval(client),
//		Meters: func(ctx context.Context) []fleet.Meter { // the meters of this call
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
// All times follow Redis's clock. A rate is a token bucket. If Redis's answer to a call is lost or late, OnOutage
// decides about the call, and the call may have taken its tokens nevertheless. If Redis loses data, as in a failover,
// calls can take the latest tokens again, and calls lose their slots; see [ErrLost]. If Redis evicts keys, the tokens
// of quotas return, so the maxmemory-policy of Redis must be noeviction. If Redis has no memory left, slots are still
// freed and renewed, but no call is admitted. If Redis's clock is set forward, tokens return and slots are lost, as if
// that time had passed.
//
// # When Redis does not answer
//
// If a round trip fails, its node counts as unreachable, and an outage of this node begins. During the outage, no
// call waits for the node, and [Config.OnOutage] decides about the calls. The node is tried in the background:
// immediately, after 100, 200 and 400ms, and then every RetryEvery. Three errors are no outage, because the node
// answers:
//
//   - An error about the keys of one call, such as TRYAGAIN while a slot of a cluster moves. OnOutage decides
//     about this call, and other calls are not affected.
//   - An error that remains until the configuration of Redis is changed, such as NOPERM. Calls return the error, and
//     the policy's health reports the error as "store_rejects".
//   - A state that cannot be read, because another program or an operator has written it. Such a state counts as
//     absent.
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
	// ErrLost is the cause of the ctx of [Limits.Do] if the lease of a slot could not be renewed, or if Close freed the
	// slots.
	ErrLost = errors.New("fleet: slot lost")
	// ErrClosed is returned by calls after [Limits.Close].
	ErrClosed error = &closedError{}
)

// A closedError is a refusal, because the call does not run.
type closedError struct{}

func (*closedError) Error() string { return "fleet: closed" }
func (*closedError) Refused() bool { return true }

// An OutagePolicy decides about calls while Redis cannot be reached.
type OutagePolicy string

const (
	// Refuse refuses the calls.
	Refuse OutagePolicy = "refuse"

	// Local admits calls by this process's part of each limit: the limit divided by Instances, but at least 1. Redis
	// is not updated later, so the parts add to the tokens that Redis admits.
	//
	// In each window of a quota, all processes together admit at most N more tokens than Redis does, however many
	// outages there are. Of a rate, they admit at most a burst more in each outage, and the rate during the outage. In
	// a measurement, two processes shared a limit of 3 a second with a burst of 5, and one answer in 1.5 seconds came
	// too late for them. They admitted 37% more than the limit.
	//
	// A process has room for the parts of 100,000 meters. It refuses calls that use other meters.
	Local OutagePolicy = "local"

	// Admit admits all calls, without a limit.
	Admit OutagePolicy = "admit"
)

// A Call is one script that [Config.EvalEach] runs.
type Call struct {
	Script string   // the source of a Lua script
	Keys   []string // KEYS of the script
	Args   []any    // ARGV of the script
}

// A Reply is the result of a [Call].
type Reply struct {
	Value any   // the value that the script returned
	Err   error // why the call has no value, or nil
}

// Config configures [Limits].
type Config struct {
	// Name is the start of each key in Redis. Processes with the same Name share the limits. Required. Name cannot
	// change.
	Name string

	// Eval runs a Lua script on Redis 6 or later and returns a list of integers. The script is always the same. Eval
	// must return when its ctx ends, and must not repeat the script. Required. For go-redis, use
	// resilienceredis.Eval(client).
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// EvalEach runs scripts in a pipeline. Nil means that Eval is called for each script, for eight scripts at a
	// time. Then a node that hangs delays the settlements and renewals on all nodes. For go-redis, use
	// resilienceredis.EvalEach(client).
	EvalEach func(ctx context.Context, calls []Call) []Reply

	// Node returns the name of the node that holds a key. It keeps an outage of one node from affecting the other
	// nodes. Nil means that there is one node. For go-redis, use resilienceredis.Node(cluster).
	Node func(key string) string

	// Meters returns the meters of a call, from 1 to 16. The keys of these meters must be equal up to the first
	// slash. Required. If the meters are invalid, the call returns an error that names the reason.
	Meters func(context.Context) []Meter

	// MaxWait is the maximum time that a call waits for slots and rates. A waiting call holds nothing. Zero means that
	// no call waits. [Unlimited] means that a call waits until its ctx ends. Calls that wait for the same slots are
	// admitted in the order of their arrival. Calls that wait for rates have no order. A waiting call keeps its meters,
	// even if the limits change.
	MaxWait time.Duration

	// Lease is the time for which Redis keeps the slots of a process that has died. Zero means 10 seconds. The
	// minimum is 100 ms. A process considers its slot lost a twelfth of Lease before the lease ends.
	Lease time.Duration

	// Timeout is the maximum time that a call waits for the answer of Redis. Zero means 100 ms. A hanging Redis is
	// detected only by a call whose deadline is more than Timeout away.
	Timeout time.Duration

	// RetryEvery is the time between two tries to reach a node during an outage, after the first tries. It is also
	// the time after which a settlement that failed is sent again, up to ten times. Zero means a second.
	RetryEvery time.Duration

	// OnOutage decides about calls while Redis cannot be reached. Such calls do not wait. Empty means Refuse.
	OnOutage OutagePolicy

	// Instances is the number of processes that share the limits. It is required if OnOutage is Local.
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

// withDefaults returns c with its zero fields filled in. c must be valid.
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

// settleDeadline returns the time within which a settlement may be sent again.
func (c *Config) settleDeadline() time.Duration { return 10*c.RetryEvery + 11*c.Timeout }

// Limits are limits that several processes share. They are safe for concurrent use. Close them before the
// process ends.
type Limits struct {
	setting   settings.Setting[Config]
	observers notify.Observers[throttle.Event]

	ids      string        // the common prefix of the ids of all reservations
	reserved atomic.Int64  // the number of reservations that have an id
	closed   chan struct{} // closed by Close

	mu        sync.Mutex
	stats     Stats         // the metrics, without Down
	calls     int           // the number of calls of Reserve and Cooldown in progress
	quiet     chan struct{} // closed when no call and no settlement is in progress; nil while no Close waits
	redisTime time.Time     // the latest known time of Redis's clock
	readAt    time.Time     // the time on our clock when redisTime was read
	nodes     map[string]*node
	local     map[string]*localPart // the local parts by their meters' keys in Redis
	purging   bool                  // whether a timer will remove idle local parts
	due       []settlement          // the settlements to send now, without those that wait for RetryEvery
	sending   bool
	held      map[*Reservation]bool // the reservations that have slots
	renewal   *time.Timer           // calls renew; nil until there are slots
	renewAt   time.Time             // the time of the next renewal; zero if there is none
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

// Do reserves the call's tokens and slots, runs fn and returns the error of fn. The call has then used its estimates,
// or nothing if a policy within fn refused the call. If the reservation is refused, Do returns a
// [*throttle.LimitedError]. If the call's slots are lost, the ctx of fn ends with the cause [ErrLost]. Within a
// resiliencehttp.Transport, slots are held until the response has been read or closed.
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
	}, func(error) { // runs even if fn panics
		cancel()
		r.settle(func(*Meter) (int64, bool) { return 0, refused })
	}, nil)
}

// Wrap returns a function that runs next under Do.
func (l *Limits) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Reserve takes the costs of a call from all of its meters. If meters refuse the call, Reserve returns the
// [*throttle.LimitedError] of the meter that refuses for the longest time. If ctx has already ended, Reserve returns
// the error of ctx. After Close, it returns [ErrClosed].
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

// reserve polls Redis until r is admitted, r is refused, or r must not wait any longer.
func (l *Limits) reserve(ctx context.Context, r *Reservation) (*Reservation, error) {
	ticket := int64(0)
	if r.cfg.MaxWait != 0 && r.sets != nil {
		ticket = 1
	}
	leaves := false // Redis may count r as a waiting call, or may have given slots to r
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

// waitFor returns the time until the next poll of a call that e refuses, or the reason why the call must not wait.
// poll is the time that Redis proposes, or -1 if no call waits for the meter that refuses.
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
	return min(poll, left), "" // the last poll is sent when MaxWait ends
}

// endOf returns the error of ctx if ctx has ended. If the deadline of ctx has passed, ctx counts as ended even if it
// is not canceled yet. A connection with the same deadline often returns an error a moment before ctx is canceled,
// and that error is no outage.
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

// Cooldown makes all processes refuse, for the time d, all calls that use the meter key, even calls with a cost of 0.
// For example, d is the Retry-After of an upstream. Cooldown never shortens a cooldown. It does nothing if d is not
// positive. If Redis cannot be reached, the error matches [throttle.ErrOutage].
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

// Close refuses further calls with [ErrClosed] and frees the slots of reservations that have not been settled. Then
// Close waits until all settlements have reached Redis or ctx ends. If settlements did not reach Redis, the error has
// their number. If a running Do has slots, its ctx ends with the cause [ErrLost]. A reservation can still be settled
// after Close, but the settlement may not reach Redis. Close may be called again, to wait again.
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

// begin counts a call that starts. It returns false after Close.
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

// wakeClose wakes the Close that waits if no call and no settlement is in progress. l.mu is held.
func (l *Limits) wakeClose() {
	if l.quiet != nil && l.calls == 0 && l.stats.Unsettled == 0 {
		close(l.quiet)
		l.quiet = nil
	}
}

// Config returns the configuration with defaults filled in.
func (l *Limits) Config() Config { return l.setting.Config() }

// Update changes the configuration of this process in the same way as [throttle.Limiter.Update]. The change applies
// to calls that start later.
func (l *Limits) Update(change func(*Config)) error { return l.setting.Update(change, same, nil) }

// same returns an error if an update changes the Name.
func same(was, next *Config) error { return invalid.Renamed("fleet.Config", was.Name, next.Name) }
