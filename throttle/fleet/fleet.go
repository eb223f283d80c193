// Package fleet limits calls across several processes, with limits that are stored in Redis. The limits are rates,
// quotas, slots for concurrent calls, and cooldowns. Each limit that a call uses is a [Meter]. A call takes its tokens
// and slots from all of its meters, or from none of them, usually in one round trip to Redis.
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
//	defer func() { // also if ctx is canceled at shutdown
//		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
//		defer cancel()
//		_ = limits.Close(ctx) // frees the slots of this process and sends pending settlements
//	}()
//	r, err := limits.Reserve(ctx)
//	if err != nil {
//		return err
//	}
//	defer func() { r.Settle(used) }() // corrects the meters that are Estimated and frees the slots
//
// The following rules apply to tokens and slots:
//
//   - All times follow Redis's clock. If Redis's clock is set forward, the effect is the same as if the time had
//     passed: rates refill, windows end, and leases end.
//   - If Redis's answer to a call is lost or late, [Config.OnOutage] decides whether the call is admitted. Even if
//     OnOutage refuses the call, Redis may have taken its tokens.
//   - Redis can lose data, for example in a failover. The most recently taken tokens are then available again, and
//     running calls lose their slots; see [ErrLost].
//   - The maxmemory-policy of Redis must be noeviction. If Redis evicts keys, the spent tokens of quotas are available
//     again.
//   - If Redis has no memory left, Redis admits no call, but still frees and renews slots. [Config.OnOutage] then
//     decides whether calls are admitted.
//
// # Outages
//
// If a round trip to a node of Redis fails, an outage of this node starts. During an outage, no call waits for the
// node, and [Config.OnOutage] decides whether calls are admitted. The node is pinged in the background when the outage
// starts. After that, a ping is due 100ms, 200ms, 400ms and so on after the start. The pauses between pings grow up to
// Config.RetryEvery. A ping that is due is sent at the next call, or when Stats or the Health of the policy is read.
//
// In the following cases, no outage starts, because the node answers:
//
//   - An error concerns only the keys of one call. An example is TRYAGAIN, which Redis Cluster returns while it moves a
//     hash slot. OnOutage decides whether this call is admitted. Other calls are not affected.
//   - An error remains until the configuration of Redis is changed. An example is NOPERM. Calls return the error, and
//     the Health of the policy reports "store_rejects".
//   - The script cannot read a value, because another program or an operator has written it. The value counts as
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

// Unlimited means that there is no limit. Unlimited is valid only for fields whose comment mentions Unlimited.
const Unlimited = throttle.Unlimited

var (
	// ErrLost is the cause with which the ctx of a running call is canceled when the call loses its slots. A call loses
	// its slots if the lease of a slot could not be renewed, or if [Limits.Close] frees the slots.
	ErrLost = errors.New("fleet: slot lost")
	// Calls after [Limits.Close] return ErrClosed.
	ErrClosed error = &closedError{}
)

// longest is the maximum of the durations that the script gets. The script cannot represent more than 285 years.
const longest = 140 * 365 * 24 * time.Hour

// A closedError is a refusal, because the call does not run.
type closedError struct{}

func (*closedError) Error() string { return "fleet: closed" }
func (*closedError) Refused() bool { return true }

// An OutagePolicy specifies which calls are admitted while Redis cannot be reached.
type OutagePolicy string

const (
	// Refuse refuses all calls.
	Refuse OutagePolicy = "refuse"

	// Local admits calls up to this process's part of each limit. The part is the limit divided by Instances, but at
	// least 1. The tokens of calls that Local admits are never reported to Redis, so they add to the tokens that Redis
	// admits.
	//
	// All processes together admit at most this number of additional tokens or slots:
	//
	//   - For a quota: in each window, N or Instances, whichever is larger. The number of outages does not matter.
	//   - For a rate: in each outage, the burst or Instances, whichever is larger, plus the rate times the duration of
	//     the outage.
	//   - For slots: N or Instances, whichever is larger, at the same time.
	//
	// In a measurement, two processes shared a rate of 3 tokens a second with a burst of 5, and one answer of Redis was
	// too late every 1.5 seconds. The processes admitted 37% more tokens than the limit allows.
	//
	// A process that holds its parts of 100,000 limits refuses a call that uses another limit.
	Local OutagePolicy = "local"

	// Admit admits all calls, without a limit.
	Admit OutagePolicy = "admit"
)

// A Call is one run of a Lua script by [Config.EvalEach].
type Call struct {
	Script string   // the source of a Lua script
	Keys   []string // KEYS of the script
	Args   []any    // ARGV of the script
}

// A Reply is the result of a [Call].
type Reply struct {
	Value any   // the value that the script returned
	Err   error // the reason why there is no value, or nil
}

// Config configures [Limits].
type Config struct {
	// Name is the prefix of each key in Redis. Processes with the same Name share the limits. Required. Update cannot
	// change Name.
	Name string

	// Eval runs a Lua script on Redis 6 or later and returns a list of integers. Eval always gets the same script. Eval
	// must return when its ctx is done, and must not retry the script. Required. For go-redis, use
	// resilienceredis.Eval(client).
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// EvalEach runs several scripts in one pipeline. EvalEach is used for settlements (see [Reservation.Settle]) and for
	// the renewal of slots. Nil means that Eval is called for each script, with at most eight calls in parallel. Without
	// EvalEach, a node that hangs delays the settlements and renewals on all nodes. EvalEach must return when its ctx is
	// done. For go-redis, use resilienceredis.EvalEach(client).
	EvalEach func(ctx context.Context, calls []Call) []Reply

	// Node returns the name of the Redis node that holds a key. With Node, an outage of one node does not affect calls
	// that use other nodes. Nil means that there is one node. For go-redis, use resilienceredis.Node(cluster).
	Node func(key string) string

	// Meters returns the meters of a call, from 1 to 16. All keys of a call's meters must have the same text before the
	// first slash, because all these meters must be on one node. After the first slash, the keys must differ. Required.
	// If the meters are invalid, the call returns an error that names the reason.
	Meters func(context.Context) []Meter

	// MaxWait is the maximum time that a call waits for slots and rates. No call waits for a quota or for the end of a
	// cooldown. A waiting call holds no tokens or slots. Zero means that no call waits. [Unlimited] means that a call
	// waits until its ctx is done. Calls that wait for the same slots are admitted in the order of their arrival. A call
	// that waits for slots sends requests to Redis repeatedly.
	// If one of these requests takes longer than a second to reach Redis, the order may change. If the process of a
	// waiting call dies, calls that arrived later are delayed for up to 1.25 seconds.
	//
	// If calls of one process wait for the same rate, only one of them asks Redis again: the call with the lowest cost
	// or, if costs are equal, the call that arrived first. Apart from this, calls that wait for rates are admitted in
	// no particular order. A new call asks Redis before it waits, so it may overtake waiting calls. A call that also uses
	// slots asks Redis independently of other calls. A call that started before an Update asks Redis independently of
	// calls that started after the Update.
	//
	// Meters is not called again for a waiting call, so the call keeps its meters even if the limits change.
	MaxWait time.Duration

	// Lease is the time after which Redis frees the slots of a process that has died. Zero means 10 seconds. The minimum
	// is 100ms. A running process renews its leases. If the lease of a slot cannot be renewed, the process treats the
	// slot as lost when a twelfth of Lease remains.
	Lease time.Duration

	// Timeout is the maximum time that a call waits for the answer of Redis. Zero means 100ms. If Redis hangs, a call
	// starts an outage only if more than Timeout is left until the call's deadline.
	Timeout time.Duration

	// RetryEvery is the longest pause between two pings of a node during an outage. A settlement that failed is retried
	// after RetryEvery, at most ten times. Zero means 1 second.
	RetryEvery time.Duration

	// OnOutage specifies which calls are admitted while Redis cannot be reached. During an outage, no call starts to
	// wait. A call that already waits continues to wait until it would ask Redis again. OnOutage then decides whether
	// the call is admitted. Empty means Refuse.
	OnOutage OutagePolicy

	// Instances is the number of processes that share the limits. Instances is required if OnOutage is Local. Otherwise
	// it has no effect.
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

// settleDeadline returns the time within which a settlement that failed may be retried.
func (c *Config) settleDeadline() time.Duration {
	return min(10*min(c.RetryEvery, longest/10)+11*min(c.Timeout, longest/11), longest)
}

// Limits holds limits that several processes share. Limits is safe for concurrent use. Call Close before the process
// ends.
type Limits struct {
	setting   settings.Setting[Config]
	observers notify.Observers[throttle.Event]

	ids      string        // the common prefix of the ids of all reservations
	reserved atomic.Int64  // the number of reservations that have an id
	closed   chan struct{} // closed by Close

	mu        sync.Mutex
	stats     Stats         // the metrics, without Down
	calls     int           // the number of calls to Reserve and Cooldown in progress
	quiet     chan struct{} // closed when no call and no settlement is in progress; nil unless a Close waits
	redisTime time.Time     // the latest known time of Redis's clock
	readAt    time.Time     // the time on this process's clock when redisTime was read
	nodes     map[string]*node
	local     map[string]*localPart // the local parts by their meters' keys in Redis
	purger    *time.Timer           // calls purge; nil until an outage has left local parts
	due       []settlement          // the settlements to send now, without the settlements that wait for RetryEvery
	sending   bool
	lines     map[rateID]*line      // the calls that wait for rates
	arrived   int64                 // the number of times that a call has joined a line
	held      map[*Reservation]bool // the reservations that have slots
	renewal   *time.Timer           // calls renew; nil until there are slots
	renewAt   time.Time             // the time of the next renewal; zero if there is none
}

// New returns Limits. It panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Limits {
	l := &Limits{
		ids: rand.Text() + "-", closed: make(chan struct{}), stats: newStats(),
		nodes: map[string]*node{}, local: map[string]*localPart{}, lines: map[rateID]*line{}, held: map[*Reservation]bool{},
	}
	l.setting.Init(cfg, Config.withDefaults)
	return l
}

// Do reserves the call's tokens and slots, calls fn and returns the error of fn. Do does not correct estimated costs.
// If fn returns an error whose method Refused() bool returns true, an inner policy refused the call, and Do refunds the
// tokens. If the reservation is refused, Do returns a [*throttle.LimitedError]. If the call's slots are lost, the ctx
// of fn is canceled with the cause [ErrLost]. Within a resiliencehttp.Transport, slots are held until the response has
// been read or closed.
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

// Wrap returns a function that calls [Limits.Do](ctx, next).
func (l *Limits) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Reserve takes a call's tokens and slots from all of the call's meters. If a meter refuses the call, Reserve returns a
// [*throttle.LimitedError]. If several meters refuse the call, Reserve returns the error of the meter that would refuse
// the call for the longest time. If ctx is already done, Reserve returns an error that matches the error and the cause
// of ctx. If ctx is done before Redis answers, Reserve returns a LimitedError, but Redis may have taken the call's
// tokens. After Close, Reserve returns [ErrClosed], even if the call was already waiting.
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
	w := &waiter{r: r, start: time.Now()}
	leaves := false // true while Redis may count r as a waiting call, or may have given slots to r
	defer func() {
		l.handOver(w)
		if leaves {
			r.leave()
		}
	}()
	e := r.meters[0].refusal(r.cfg, throttle.ContextEnded)
	for began := w.start; ; began = time.Now() {
		if end := endOf(ctx); end != nil { // ctx may have ended in the Meters function, or just as the wait ended
			l.handOver(w)
			e.Reason, e.Err, e.Waited = throttle.ContextEnded, end, time.Since(w.start)
			return nil, l.refuse(ctx, e)
		}
		if lasts, err := l.outageOf(r); err != nil {
			w.turn = w.turn && lasts // at a high rate, calls are due before the first ping has ended the outage
			l.handOver(w)
			return l.reserveWithout(ctx, r, err)
		}
		leaves = r.sets != nil
		a, err := r.take(ctx, ticket)
		if end := endOf(ctx); end != nil {
			l.handOver(w)
			if r.admits(a) { // the answer came, but ctx is done
				leaves = false
				r.refund(a)
			}
			e.Reason, e.Err, e.Waited = throttle.ContextEnded, end, time.Since(w.start)
			return nil, l.refuse(ctx, e)
		}
		if err != nil {
			t := l.failed(ctx, r.cfg, r.cooldown(), err)
			w.turn = w.turn && !t.isOutage() // if only this answer was lost, the outage ends before the next call is due
			l.handOver(w)
			if t == nodeWrong {
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
		m, poll := 0, time.Duration(0)
		e, m, poll = r.refusal(a)
		e.Waited = time.Since(w.start)
		wait, reason := r.cfg.waitFor(ctx, e, poll)
		switch {
		case r.sets == nil && reason != e.Reason: // calls wait for all meters that refuse, so they are rates
			reason, err = l.lineUp(ctx, w, m, e, reason)
		case reason == "":
			err = pause(ctx, l.closed, wait, nil)
		default:
			l.handOver(w)
		}
		switch {
		case err == ErrClosed:
			return nil, err
		case err != nil:
			e.Reason, e.Err, e.Waited = throttle.ContextEnded, err, time.Since(w.start)
		case reason == "":
			continue
		default:
			e.Reason = reason
			if reason == throttle.DeadlineTooClose {
				e.Err = context.DeadlineExceeded
			}
		}
		return nil, l.refuse(ctx, e)
	}
}

// pause waits for d, or until wake receives. It returns the reason why the call must not wait any longer, or nil.
func pause(ctx context.Context, closed <-chan struct{}, d time.Duration, wake <-chan struct{}) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-wake:
	case <-closed:
		return ErrClosed
	case <-ctx.Done():
		return ended.Error(ctx)
	}
	return nil
}

// waitFor returns the time until the next poll of a call that e refuses, or the reason why the call must not wait.
// poll is the time that Redis proposes, or -1 if calls do not wait for the meter that refuses.
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
	return min(poll, left), "" // a call that waits for slots polls for the last time when MaxWait ends
}

// endOf returns the error of ctx if ctx is done. A ctx whose deadline has expired counts as done even if it is not
// canceled yet. A connection with the same deadline often returns an error a moment before ctx is canceled. That error
// must not start an outage.
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

// Cooldown starts a cooldown for the meter with the given key. For the time d, all processes refuse each call that uses
// the meter, even a call with a cost of 0. For example, d is the Retry-After that an upstream service has sent. During
// an outage, [Config.OnOutage] decides without regard to cooldowns. If a longer cooldown is in effect, Cooldown does
// not shorten it. Cooldown does nothing if d is not positive. If Redis cannot be reached, the error matches
// [throttle.ErrOutage]. After Close, Cooldown returns [ErrClosed].
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
	if _, err := l.outageOf(r); err != nil {
		return fmt.Errorf("%w: %w", throttle.ErrOutage, err)
	}
	_, err := l.eval(ctx, cfg, r.keys, "cool", min(d, longest).Microseconds())
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

// Close makes further calls return [ErrClosed] and frees the slots of reservations that have not been settled. Then
// Close waits until all settlements have reached Redis or until ctx is done. If some settlements have not reached
// Redis, Close returns an error with their number. If a running Do has slots, Close cancels the ctx of its fn with the
// cause [ErrLost]. A reservation can still be settled after Close, but the settlement may not reach Redis. If Close is
// called again, it waits again. If ctx is already canceled, as often at a shutdown, Close does not wait.
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

// wakeClose wakes a waiting Close if no call and no settlement is in progress. The caller holds l.mu.
func (l *Limits) wakeClose() {
	if l.quiet != nil && l.calls == 0 && l.stats.Unsettled == 0 {
		close(l.quiet)
		l.quiet = nil
	}
}

// Config returns the configuration with defaults filled in.
func (l *Limits) Config() Config { return l.setting.Config() }

// Update changes the configuration of this process; see [throttle.Limiter.Update]. A change applies only to calls that
// start after the update.
func (l *Limits) Update(change func(*Config)) error { return l.setting.Update(change, same, nil) }

// same returns an error if an update changes the Name.
func same(was, next *Config) error { return invalid.Renamed("fleet.Config", was.Name, next.Name) }
