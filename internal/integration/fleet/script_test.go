package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// A clocked is limits on a Redis whose clock is off by a time, in seconds.
type clocked struct {
	t    *testing.T
	name string
	off  atomic.Int64
	eval evalFunc
}

func newClocked(t *testing.T) *clocked {
	c := &clocked{t: t, name: name(t)}
	c.eval = (&line{eval: resilienceredis.Eval(client(t, services.Redis(t))), change: redisAt(t, &c.off)}).Eval
	return c
}

func (c *clocked) limits(meters ...fleet.Meter) *fleet.Limits {
	return fleet.New(fleet.Config{Name: c.name, Eval: c.eval, Timeout: 5 * time.Second, RetryEvery: time.Minute,
		Meters: func(context.Context) []fleet.Meter { return meters }})
}

// reserve reserves, and settles if used is 0 or more. It returns the refusal, or nil.
func (c *clocked) reserve(l *fleet.Limits, used int) *throttle.LimitedError {
	c.t.Helper()
	r, err := l.Reserve(c.t.Context())
	if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
		return limited
	}
	require.NoError(c.t, err)
	if used >= 0 {
		c.settle(l, r, used)
	}
	return nil
}

func (c *clocked) settle(l *fleet.Limits, r *fleet.Reservation, used int) {
	c.t.Helper()
	r.Settle(used)
	require.Eventually(c.t, func() bool { return l.Stats().Unsettled == 0 }, 10*time.Second, time.Millisecond)
}

// More than the estimate is owed, up to one burst or limit: what is beyond is forgiven, and counted.
// A meter of which a call takes nothing refuses nobody.
func TestScriptDebts(t *testing.T) {
	c := newClocked(t)
	month := throttle.Window{Per: throttle.Month}
	for _, m := range []struct{ of, none fleet.Meter }{
		{fleet.Rate("t/rate", 1e-3, 5).Burst(10).Estimated(), fleet.Rate("t/rate", 1e-3, 0).Burst(10)},
		{fleet.Quota("t/month", 10, month, 5).Estimated(), fleet.Quota("t/month", 10, month, 0)},
	} {
		l := c.limits(m.of)
		require.Nil(t, c.reserve(l, 1000))
		require.EqualValues(t, 1000-20, l.Stats().Forgiven)
		e := c.reserve(l, -1)
		require.NotNil(t, e)
		if e.Reason == throttle.OverLimit {
			require.InDelta(t, 15_000, e.RetryAfter().Seconds(), 5, "20 and 5 are 15 more than 10")
		}
		require.Nil(t, c.reserve(c.limits(m.none), -1))
	}
	// To the bounds of what numbers can be.
	l := c.limits(fleet.Rate("t/large", 1e-3, 0).Burst(4e9).Estimated())
	require.Nil(t, c.reserve(l, 7e9))
	require.Zero(t, l.Stats().Forgiven)
	for _, rate := range []float64{1e-3, 1e-12} { // centuries
		e := c.reserve(c.limits(fleet.Rate("t/large", rate, 1).Burst(4e9)), -1)
		require.InDelta(t, 9e9, e.RetryAfter().Seconds(), 1)
	}
	require.Nil(t, c.reserve(c.limits(fleet.Rate("t/slow", 1e-12, 4e9).Burst(4e9)), -1))
}

// A call whose estimate is nothing is charged to the window of its settlement.
func TestScriptChargesAfterwards(t *testing.T) {
	c := newClocked(t)
	for _, window := range []throttle.Window{{Every: time.Hour}, {Per: throttle.Day}} {
		l := c.limits(fleet.Quota("t/"+window.Every.String(), 10, window, 0).Estimated())
		unknown, err := l.Reserve(t.Context())
		require.NoError(t, err)
		c.off.Add(60)
		c.settle(l, unknown, 9)
		e := c.reserve(c.limits(fleet.Quota("t/"+window.Every.String(), 10, window, 2)), -1)
		require.NotNil(t, e)
		require.Equal(t, 1, e.Left)
	}
}

// A settlement corrects the rates even if the clock was set back by days.
func TestScriptSettlesOnAnEarlierDay(t *testing.T) {
	c := newClocked(t)
	rate := fleet.Rate("t/rate", 1e-9, 5).Burst(5).Estimated()
	l := c.limits(fleet.Quota("t/day", 10, throttle.Window{Per: throttle.Day}, 0), rate)
	r, err := l.Reserve(t.Context())
	require.NoError(t, err)
	c.off.Store(-8 * 24 * 3600)
	r.SettleEach(map[string]int{"day": 1, "rate": 0})
	require.Eventually(t, func() bool { return l.Stats().RoundTrips == 2 }, 10*time.Second, time.Millisecond)
	c.off.Store(0)
	require.Nil(t, c.reserve(c.limits(rate), -1))
}

// A settlement corrects the window from which the reservation took, and no later one.
func TestScriptWindowIsOver(t *testing.T) {
	c := newClocked(t)
	hour := throttle.Window{Every: time.Hour}
	l := c.limits(fleet.Quota("t/hour", 10, hour, 6).Estimated())
	late, err := l.Reserve(t.Context())
	require.NoError(t, err)
	c.off.Store(3601)
	require.Nil(t, c.reserve(l, -1))
	c.settle(l, late, 0)
	require.NotNil(t, c.reserve(l, -1), "6 of 10 are taken of this hour")
	e := c.reserve(l, -1)
	require.Equal(t, 4, e.Left)
	require.InDelta(t, 3600, e.RetryAfter().Seconds(), 30)
}

// A second cooldown never shortens the first.
func TestScriptCooldowns(t *testing.T) {
	c := newClocked(t)
	l := c.limits(fleet.Rate("t/calls", 1, 0))
	for _, d := range []time.Duration{time.Minute, time.Second, time.Hour} {
		require.NoError(t, l.Cooldown(t.Context(), "t/calls", d))
		e := c.reserve(l, -1)
		require.Equal(t, throttle.CoolingDown, e.Reason)
		require.InDelta(t, max(d, time.Minute).Seconds(), e.RetryAfter().Seconds(), 30)
	}
	require.Nil(t, c.reserve(c.limits(fleet.Rate("t/others", 1, 0)), -1))

	for _, key := range []string{"t/rate", "t/day", "t/slots"} { // among others, wherever it stands
		c := newClocked(t)
		l := c.limits(fleet.Rate("t/rate", 5, 1), fleet.Quota("t/day", 5, throttle.Window{Per: throttle.Day}, 1),
			fleet.Slots("t/slots", 5))
		require.Nil(t, c.reserve(l, 0))
		require.NoError(t, l.Cooldown(t.Context(), key, time.Hour))
		e := c.reserve(l, 0)
		require.Equal(t, []any{key, throttle.CoolingDown}, []any{e.Key, e.Reason})
	}
}

// A clock that is set back over midnight forgives nothing of the day that has begun.
func TestScriptClockSetBackOverMidnight(t *testing.T) {
	c := newClocked(t)
	l := c.limits(fleet.Quota("t/day", 6, throttle.Window{Per: throttle.Day}, 1))
	after := int64(time.Until(time.Now().UTC().Truncate(24*time.Hour).Add(24*time.Hour+time.Hour)) / time.Second)
	c.off.Store(after)
	for range 5 {
		require.Nil(t, c.reserve(l, -1))
	}
	c.off.Store(after - 7200) // 23:00 of the day before
	require.Nil(t, c.reserve(l, -1))
	require.NotNil(t, c.reserve(l, -1))
	c.off.Store(after)
	require.NotNil(t, c.reserve(l, -1), "all of the day is taken")
	c.off.Store(after + 86400)
	require.Nil(t, c.reserve(l, -1))
}

// A month from a date ends with the day of that date.
func TestScriptBillingMonth(t *testing.T) {
	c := newClocked(t)
	next := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, 2)
	if next.Day() == 1 {
		next = next.AddDate(0, 0, 1)
	}
	l := c.limits(fleet.Quota("t/month", 1, throttle.BillingMonth(next), 1))
	require.Nil(t, c.reserve(l, -1))
	e := c.reserve(l, -1)
	require.InDelta(t, time.Until(next).Seconds(), e.RetryAfter().Seconds(), 30)
	require.Equal(t, next.Day(), e.Quota.Window.From)
	c.off.Store(int64(time.Until(next)/time.Second) + 60)
	require.Nil(t, c.reserve(l, -1))
}

// A Redis that can only read, as a replica or one that is out of memory, is away until it can write: else
// each call would begin an outage of its own, with all of this process's part.
func TestScriptReadOnlyRedis(t *testing.T) {
	rdb := client(t, services.Redis(t))
	var reads atomic.Bool
	var pings atomic.Int64
	limits := fleet.New(fleet.Config{
		Name: name(t), Timeout: 5 * time.Second, RetryEvery: time.Millisecond, OnOutage: fleet.Local, Instances: 2,
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("t/calls", 1e-6, 1).Burst(4)} },
		Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			if args[0] == "ping" {
				defer pings.Add(1)
			}
			if reads.Load() {
				return rdb.EvalRO(ctx, script, keys, args...).Result()
			}
			return rdb.Eval(ctx, script, keys, args...).Result()
		},
	})
	cool := func(d time.Duration) bool { return limits.Cooldown(t.Context(), "t/cool", d) == nil }
	require.True(t, cool(time.Hour))
	reads.Store(true)
	admitted := 0
	for i := range int64(5) {
		if _, err := limits.Reserve(t.Context()); err == nil {
			admitted++
		}
		pinged := func() bool { _ = cool(time.Second); return pings.Load() > i }
		require.Eventually(t, pinged, 10*time.Second, time.Millisecond)
	}
	require.Equal(t, 2, admitted)
	reads.Store(false)
	require.Eventually(t, func() bool { return cool(time.Second) }, 10*time.Second, time.Millisecond)
	left := rdb.PTTL(t.Context(), limits.Config().Name+":{t}:c:cool").Val()
	require.Greater(t, left, 59*time.Minute, "no ping shortens a cooldown")
}

// Nobody overtakes a call that waits for a slot, whether it waits itself or not, even if a poll takes long to arrive.
func TestScriptKeepsTheOrder(t *testing.T) {
	rdb := client(t, services.Redis(t))
	var us atomic.Int64 // on Redis's clock
	clock := func(script string) string {
		clock := fmt.Sprintf("local clock = {1795000000, %d}\n", us.Load())
		return replacing(t, "local clock = redis.call('TIME')\n", clock)(script)
	}
	eval := (&line{eval: resilienceredis.Eval(rdb), change: clock}).Eval
	cfg := fleet.Config{Name: name(t), Eval: eval, Timeout: time.Minute, Meters: slotsOnly(1)}
	r, err := fleet.New(cfg).Reserve(t.Context())
	require.NoError(t, err)

	waits, goOn, takes, admitted := make(chan struct{}), make(chan struct{}), 0, make(chan error)
	waiter := cfg
	waiter.MaxWait = -1
	waiter.Eval = func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
		if takes++; takes == 2 {
			close(waits)
			<-goOn
		}
		return eval(ctx, script, keys, args...)
	}
	go func() { _, err := fleet.New(waiter).Reserve(t.Context()); admitted <- err }()
	<-waits
	us.Store(900_000)
	r.Settle(0)
	free := func() bool { return rdb.ZCard(t.Context(), cfg.Name+":{t}:s:running").Val() == 0 }
	require.Eventually(t, free, 10*time.Second, time.Millisecond)
	for _, cfg.MaxWait = range []time.Duration{0, time.Nanosecond} {
		_, err = fleet.New(cfg).Reserve(t.Context())
		require.ErrorIs(t, err, throttle.ErrLimited)
	}
	close(goOn)
	require.NoError(t, <-admitted)
}

// Calls that are refused by a quota or a cooldown stand in nobody's way.
func TestScriptRefusedCallsDoNotWait(t *testing.T) {
	rdb := client(t, services.Redis(t))
	cfg := fleet.Config{Name: name(t), Eval: resilienceredis.Eval(rdb), MaxWait: time.Minute, Timeout: 5 * time.Second}
	limits := func(meters ...fleet.Meter) *fleet.Limits {
		c := cfg
		c.Meters = func(context.Context) []fleet.Meter { return meters }
		return fleet.New(c)
	}
	slots, none := fleet.Slots("t/slots", 1), fleet.Quota("t/day", 1, throttle.Window{Per: throttle.Day}, 1)
	r, err := limits(slots, none).Reserve(t.Context())
	require.NoError(t, err)
	require.NoError(t, limits().Cooldown(t.Context(), "t/cool", time.Hour))
	for _, m := range []fleet.Meter{none, fleet.Rate("t/cool", 1, 0)} {
		_, err = limits(slots, m).Reserve(t.Context())
		require.ErrorIs(t, err, throttle.ErrLimited)
		require.Zero(t, rdb.Exists(t.Context(), cfg.Name+":{t}:w:slots").Val())
	}
	r.Settle(0)
}

// EvalEach sends settlements and renewals in pipelines, also to servers that have forgotten the
// script and to all nodes of a cluster, and Node tells which of these is away.
func TestEvalEachAndNode(t *testing.T) {
	cluster := services.NewRedisCluster(t)
	rdb := redis.NewClusterClient(options(cluster.Addrs()).Cluster())
	t.Cleanup(func() { _ = rdb.Close() })
	type tagKey struct{}
	cfg := fleet.Config{
		Name: name(t), Eval: resilienceredis.Eval(rdb), EvalEach: resilienceredis.EvalEach(rdb),
		Node:  resilienceredis.Node(rdb),
		Lease: time.Second, RetryEvery: 50 * time.Millisecond, Timeout: 5 * time.Second,
		Meters: func(ctx context.Context) []fleet.Meter {
			tag := ctx.Value(tagKey{}).(string)
			return []fleet.Meter{fleet.Rate(tag+"/tokens", 1e-9, 10).Burst(100).Estimated(), fleet.Slots(tag+"/slots", 1)}
		},
	}
	l := fleet.New(cfg)
	held := map[string]*fleet.Reservation{}
	on := map[int]int{} // calls by master
	for i := range 12 {
		tag := fmt.Sprint("t", i)
		r, err := l.Reserve(context.WithValue(t.Context(), tagKey{}, tag))
		require.NoError(t, err)
		held[tag] = r
		on[cluster.MasterOf("{"+tag+"}")]++
	}
	require.Len(t, on, 3, "on all masters")
	time.Sleep(2 * cfg.Lease)
	for tag := range held {
		require.ErrorIs(t, l.Do(context.WithValue(t.Context(), tagKey{}, tag), nil), throttle.ErrLimited, "it is renewed")
	}
	require.NoError(t, rdb.ForEachMaster(t.Context(), func(ctx context.Context, c *redis.Client) error {
		return c.ScriptFlush(ctx).Err()
	}))
	for _, r := range held {
		r.Settle(4)
	}
	require.Eventually(t, func() bool { return l.Stats().Unsettled == 0 }, 10*time.Second, time.Millisecond)
	for tag := range held {
		require.Contains(t, rdb.Get(t.Context(), cfg.Name+":{"+tag+"}:r:tokens").Val(), "4000000 ")
		require.Zero(t, rdb.ZCard(t.Context(), cfg.Name+":{"+tag+"}:s:slots").Val())
	}
	require.Zero(t, l.Stats().LostSlots+l.Stats().NeverSettled+l.Stats().LateSettled)

	var outages atomic.Int64
	l.Observe(func(_ context.Context, e throttle.Event) {
		if e.Kind == throttle.EventOutageBegan {
			outages.Add(1)
		}
	})
	down := cluster.MasterOf("{t0}")
	cluster.Masters[down].Kill()
	do := func(tag string) error {
		return l.Do(context.WithValue(t.Context(), tagKey{}, tag), func(context.Context) error { return nil })
	}
	for tag := range held {
		if cluster.MasterOf("{"+tag+"}") == down {
			require.ErrorIs(t, do(tag), throttle.ErrOutage)
		} else {
			require.NoError(t, do(tag))
		}
	}
	require.EqualValues(t, 1, outages.Load())
	cluster.Masters[down].Start()
	require.Eventually(t, func() bool { return do("t0") == nil }, 30*time.Second, 10*time.Millisecond)
}

// replicate has a server replicate that at addr, and waits until it does.
func replicate(t *testing.T, replica *redis.Client, addr string) {
	host, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	require.NoError(t, replica.ReplicaOf(t.Context(), host, port).Err())
	require.Eventually(t, func() bool {
		return strings.Contains(replica.Info(t.Context(), "replication").Val(), "master_link_status:up")
	}, 30*time.Second, 10*time.Millisecond)
}

// After a failover, what was acknowledged and not yet replicated is lost, and no more: the balance
// is off by it, and all else stays exact.
func TestFailoverToAReplica(t *testing.T) {
	primary, replica := services.NewRedis(t), services.NewRedis(t)
	replication, front := faultproxy.New(t, primary.Addr), faultproxy.New(t, primary.Addr)
	next := client(t, replica.Addr).(*redis.Client)
	replicate(t, next, replication.Addr())

	l := fleet.New(fleet.Config{Name: name(t), Eval: resilienceredis.Eval(client(t, front.Addr())),
		RetryEvery: 20 * time.Millisecond, Timeout: 2 * time.Second,
		Meters: func(context.Context) []fleet.Meter {
			return []fleet.Meter{fleet.Rate("t/tokens", 1e-6, 10).Burst(100_000).Estimated()}
		}})
	spent := func(c redis.UniversalClient) (micro int64) {
		_, _ = fmt.Sscan(c.Get(t.Context(), l.Config().Name+":{t}:r:tokens").Val(), &micro)
		return micro
	}
	acknowledged := 0
	use := func(n int) {
		for range n {
			r, err := l.Reserve(t.Context())
			require.NoError(t, err)
			r.Settle(7)
			acknowledged += 7
		}
		require.Eventually(t, func() bool { return l.Stats().Unsettled == 0 }, 10*time.Second, time.Millisecond)
	}
	use(100)
	// The replica hears of a mark after all that came before it. A balance could be the right one by chance.
	require.NoError(t, client(t, primary.Addr).Set(t.Context(), "mark", "x", 0).Err())
	marked := func() bool { return next.Exists(t.Context(), "mark").Val() == 1 }
	require.Eventually(t, marked, 30*time.Second, time.Millisecond)
	replication.Hold(faultproxy.Both)
	use(50) // within the lag
	primary.Kill()
	require.NoError(t, next.ReplicaOf(t.Context(), "NO", "ONE").Err())
	front.Point(replica.Addr)
	front.Reset()
	off := acknowledged - int((spent(next)+999_999)/1_000_000)
	t.Logf("off by %d tokens of %d, that were acknowledged within the lag", off, acknowledged)
	require.Equal(t, 50*7, off)
	reachable := func() bool { _, err := l.Reserve(t.Context()); return err == nil }
	require.Eventually(t, reachable, 30*time.Second, 10*time.Millisecond)
	before := spent(next)
	acknowledged = 0
	use(50)
	require.InDelta(t, before+int64(acknowledged)*1_000_000, spent(next), 100)
}

// Two processes go on with a replica that had not heard all that the primary did. What it had not heard
// is lost, and no more: it never admits more than the limits allow, its balances are those of what it
// knows, to the token, and calls that have lost their slots end within a lease.
func TestFailoverUnderTwoProcesses(t *testing.T) {
	primary, replica := services.NewRedis(t), services.NewRedis(t)
	replication, front := faultproxy.New(t, primary.Addr), faultproxy.New(t, primary.Addr)
	next := client(t, replica.Addr).(*redis.Client)
	replicate(t, next, replication.Addr())

	j := job{Kind: "play", Addrs: []string{front.Addr()}, Name: name(t), Often: 0.05,
		Until: time.Now().Add(6 * time.Second)}
	var all []*process
	for j.Number = range 2 {
		all = append(all, start(t, j))
	}
	held := func() int { return all[0].held() + all[1].held() }
	reaches := func(n int) {
		require.Eventually(t, func() bool { return held() >= n || time.Now().After(j.Until) }, time.Minute, time.Millisecond)
	}
	reaches(100)
	replication.Hold(faultproxy.Both)
	reaches(held() + 100) // within the lag
	primary.Kill()
	require.NoError(t, next.ReplicaOf(t.Context(), "NO", "ONE").Err())
	front.Point(replica.Addr)
	front.Reset()
	promoted := time.Now()
	for _, p := range all {
		<-p.ended
		require.True(t, p.cmd.ProcessState.Success(), "%v", p.cmd.ProcessState)
	}

	journal, err := next.LRange(t.Context(), j.Name+":{t}:journal", 0, -1).Result()
	require.NoError(t, err)
	o := hear(t, journal)
	o.bound(t, false)
	known, unheard := o.balance(), 0
	for id, more := range o.used { // settlements of reservations that the replica has not heard of
		if _, taken := o.taken[id]; !taken {
			known, unheard = known+more, unheard+1
		}
	}
	spent := func(kind, meter string) (n int64) {
		_, _ = fmt.Sscan(next.Get(t.Context(), fmt.Sprintf("%s:{t}:%s:%s", j.Name, kind, meter)).Val(), &n)
		return n
	}
	require.InDelta(t, 1_000_000*known, spent("r", "tokens"), 60, "it gives a millionth a second")
	require.Equal(t, known, spent("q", "month"))

	later := &process{holds: map[string]*hold{}} // those that began when no call had a slot that was lost
	for i, p := range all {
		for id, h := range p.holds {
			if h.from.After(promoted.Add(time.Second)) {
				later.holds[fmt.Sprint(i, id)] = h
			}
		}
	}
	lost := held() - len(o.taken)
	t.Logf("%d admitted, %d of them lost or more, %d settled that were lost; %d after a lease, of which %d at once",
		held(), lost, unheard, len(later.holds), atOnce([]*process{later}))
	require.Positive(t, lost+unheard, "or this shows nothing")
	require.LessOrEqual(t, atOnce(all), 2*parallel)
	require.LessOrEqual(t, atOnce([]*process{later}), parallel)
}
