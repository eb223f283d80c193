package fleet_test

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

func client(t testing.TB, addrs ...string) redis.UniversalClient {
	t.Helper()
	c := redis.NewUniversalClient(options(addrs))
	t.Cleanup(func() { _ = c.Close() })
	return c
}

var names atomic.Int64

// name returns a name of limits that no other test has.
func name(t testing.TB) string {
	return fmt.Sprintf("%s-%d-%d", t.Name(), time.Now().UnixNano(), names.Add(1))
}

// An oracle is told what Redis has done, by the journal that the script writes, and says what its
// meters must be.
type oracle struct {
	taken, used map[string]int64 // tokens of a reservation, by its id: the estimate, and what was settled
	takes       []int64          // times of Redis, in microseconds
	late        int              // settlements
}

func hear(t *testing.T, journal []string) *oracle {
	o := &oracle{taken: map[string]int64{}, used: map[string]int64{}}
	for _, entry := range journal {
		var op, id string
		var micro, n int64
		_, err := fmt.Sscan(entry, &op, &id, &micro, &n)
		require.NoError(t, err, entry)
		switch _, settled := o.used[id]; {
		case op == "take":
			require.NotContains(t, o.taken, id, "taken once")
			o.taken[id] = micro / 1_000_000
			o.takes = append(o.takes, n)
		case n == 1:
			o.late++
		case !settled:
			o.used[id] = o.taken[id] + micro/1_000_000
		}
	}
	return o
}

// balance returns the tokens that have been spent, after all.
func (o *oracle) balance() (sum int64) {
	for id, n := range o.taken {
		if used, settled := o.used[id]; settled {
			n = used
		}
		sum += n
	}
	return sum
}

// bound requires that no interval has seen more calls than the rate allows and, unless the clock was
// set back, no window more than the quota.
func (o *oracle) bound(t *testing.T, back bool) {
	least := math.Inf(1) // of what was taken before an interval, less what was given by then
	windows, ends, in := 0, int64(0), 0
	for i, at := range o.takes {
		given := float64(at-o.takes[0]) / 1e6 * callRate
		least = min(least, float64(i)-given)
		require.LessOrEqual(t, float64(i+1)-given-least, callBurst+0.001)
		if at >= ends {
			windows, ends, in = windows+1, at+window.Microseconds(), 0
		}
		in++
		require.True(t, in <= perWin || back, "window %d", windows)
	}
}

// atOnce returns how many holds there were at the same moment.
func atOnce(processes []*process) (most int) {
	type change struct {
		at time.Time
		by int
	}
	var changes []change
	for _, p := range processes {
		for _, h := range p.holds {
			changes = append(changes, change{h.from, 1}, change{h.to, -1})
		}
	}
	slices.SortFunc(changes, func(a, b change) int { return cmp.Or(a.at.Compare(b.at), a.by-b.by) })
	now := 0
	for _, c := range changes {
		now += c.by
		most = max(most, now)
	}
	return most
}

// A verdict says how far Redis is off what the oracle knows.
type verdict struct {
	rate, quota int64 // millionths of tokens and tokens that are spent, more than the oracle knows
	atOnce      int   // calls that held slots
}

// play has processes reserve and settle over lines that fail. One of them is killed, and another
// takes its place.
func play(t *testing.T, addrs []string, processes int, often float64, back bool, control string) verdict {
	t.Helper()
	direct := client(t, addrs...)
	j := job{Kind: "play", Addrs: addrs, Name: name(t), Often: often, Control: control,
		Until: time.Now().Add(4 * time.Second)}
	var all []*process
	for j.Number = range processes {
		all = append(all, start(t, j))
	}
	killed := all[processes-1]
	require.Eventually(t, func() bool { return killed.held() > 20 || time.Now().After(j.Until) }, time.Minute,
		time.Millisecond)
	killed.kill()
	j.Number = processes
	all = append(all, start(t, j))
	if back {
		require.NoError(t, direct.Set(t.Context(), j.Name+":{t}:back", 7200, 0).Err())
	}
	var s fleet.Stats
	for _, p := range all {
		<-p.ended
		require.True(t, p == killed || p.cmd.ProcessState.Success(), "%v", p.cmd.ProcessState)
		s.Admitted += p.stats.Admitted
		s.RoundTrips += p.stats.RoundTrips
		s.Failed += p.stats.Failed
		s.LateSettled += p.stats.LateSettled
		s.NeverSettled += p.stats.NeverSettled
		s.LostSlots += p.stats.LostSlots
	}
	journal, err := direct.LRange(t.Context(), j.Name+":{t}:journal", 0, -1).Result()
	require.NoError(t, err)
	o := hear(t, journal)
	spent := func(kind, meter string) (n int64) {
		// nothing is kept of 0
		_, _ = fmt.Sscan(direct.Get(t.Context(), fmt.Sprintf("%s:{t}:%s:%s", j.Name, kind, meter)).Val(), &n)
		return n
	}
	v := verdict{rate: spent("r", "tokens") - 1_000_000*o.balance(), quota: spent("q", "month") - o.balance(),
		atOnce: atOnce(all)}
	if v.rate >= -60 && v.rate <= 0 { // it gives a millionth a second
		v.rate = 0
	}
	t.Logf("%d processes: %d reserved in Redis, %d of them by the process that was killed, %d settled, %d late; %+v; %+v",
		processes, len(o.taken), len(killed.holds), len(o.used), o.late, s, v)
	o.bound(t, back)
	return v
}

// Whatever is lost between processes and Redis, or comes late, when its clock is set back and when
// one is killed: no more calls at once than slots, no more calls than the rate and the window
// allow, and the balance of each meter is exact, to the token.
func TestOracle(t *testing.T) {
	t.Parallel()
	for server, addrs := range map[string][]string{"Redis": {services.Redis(t)},
		"Cluster": services.NewRedisCluster(t).Addrs()} {
		for _, processes := range []int{2, 4} {
			for _, often := range []float64{0, 0.05, 0.3} {
				t.Run(fmt.Sprintf("%s/%d processes/%v", server, processes, often), func(t *testing.T) {
					t.Parallel()
					v := play(t, addrs, processes, often, often > 0.1, "")
					require.Zero(t, v.rate, "millionths of tokens")
					require.Zero(t, v.quota)
					require.LessOrEqual(t, v.atOnce, parallel)
				})
			}
		}
	}
}

// The oracle finds what it is there to find: a script that forgets the id of a settlement,
// settlements of reservations that were never made, and leases that never end.
func TestOracleFindsItsControls(t *testing.T) {
	t.Parallel()
	addrs := []string{services.Redis(t)}
	for _, processes := range []int{2, 4} {
		t.Run(fmt.Sprintf("forgets the id/%d processes", processes), func(t *testing.T) {
			t.Parallel()
			v := play(t, addrs, processes, 0.3, false, "forgets the id")
			require.True(t, v.rate != 0 && v.quota != 0)
		})
		t.Run(fmt.Sprintf("settles before it reserves/%d processes", processes), func(t *testing.T) {
			t.Parallel()
			v := play(t, addrs, processes, 0.3, false, "settles before it reserves")
			require.True(t, v.rate < 0 && v.quota < 0, "it mints: %+v", v)
		})
	}
	t.Run("without a lease", func(t *testing.T) {
		t.Parallel()
		require.False(t, freeAfterItsLease(t, addrs[0], "without a lease"))
	})
}

// replacing returns a change of the script, which must change it.
func replacing(t *testing.T, old, other string) func(string) string {
	return func(script string) string {
		changed := strings.Replace(script, old, other, 1)
		if changed == script {
			t.Error("the script has no " + old)
		}
		return changed
	}
}

// Slots of a process that was killed are free after their lease, and no sooner.
func TestSlotsOfAKilledProcessAreFreed(t *testing.T) {
	require.True(t, freeAfterItsLease(t, services.Redis(t), ""))
}

func freeAfterItsLease(t *testing.T, addr, control string) bool {
	j := job{Kind: "hold", Addrs: []string{addr}, Name: name(t), Control: control}
	killed := start(t, j)
	require.Eventually(t, func() bool { return killed.held() == 2 }, time.Minute, time.Millisecond)
	l := &line{eval: resilienceredis.Eval(client(t, addr))}
	j.prepare(l, client(t, addr))
	lives := fleet.New(fleet.Config{Name: j.Name, Eval: l.Eval, Timeout: 5 * time.Second, Meters: slotsOnly(2)})
	time.Sleep(2 * lease)
	_, err := lives.Reserve(t.Context())
	require.ErrorIs(t, err, throttle.ErrLimited, "they are renewed")
	killed.kill()
	died := time.Now()
	for _, err = lives.Reserve(t.Context()); err != nil &&
		time.Since(died) < 5*lease; _, err = lives.Reserve(t.Context()) {
		time.Sleep(5 * time.Millisecond)
	}
	t.Logf("free %v after it was killed, of a lease of %v", time.Since(died), lease)
	return err == nil
}

// redisAt returns a change of the script whose clock is off by a time, in seconds. As the server's
// own clock would be, that by which keys expire is behind, too: they are kept for two hours longer.
func redisAt(t *testing.T, off *atomic.Int64) func(string) string {
	kept := replacing(t, "'PX', math.max(1,", "'PX', 7200000 + math.max(1,")
	sets := replacing(t, "us / 1000) + 1000", "us / 1000) + 7200000")
	return func(script string) string {
		clock := replacing(t, "local clock = redis.call('TIME')\n",
			fmt.Sprintf("local clock = redis.call('TIME')\nclock[1] = clock[1] + %d\n", off.Load()))
		return clock(sets(kept(script)))
	}
}

// A clock of Redis that is set back neither forgives nor prolongs: not a rate, not the window of
// a quota, not the lease of a slot, not a cooldown, and not the place of a waiter that has gone.
func TestServerClockSetBack(t *testing.T) {
	t.Parallel()
	var off atomic.Int64
	l := &line{eval: resilienceredis.Eval(client(t, services.Redis(t))), change: redisAt(t, &off)}
	meter := map[string]fleet.Meter{
		"rate": fleet.Rate("t/rate", 1, 1).Burst(5), "window": fleet.Quota("t/window", 5,
			throttle.Window{Every: 6 * time.Second}, 1),
		"month": fleet.Quota("t/month", 5, throttle.Window{Per: throttle.Month}, 1), "slots": fleet.Slots("t/slots", 5),
		"cool": fleet.Rate("t/cool", 1, 0),
	}
	n := name(t)
	limits := func(kind string) *fleet.Limits {
		return fleet.New(fleet.Config{Name: n, Eval: l.Eval, Lease: 3 * time.Second, Timeout: 5 * time.Second,
			Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{meter[kind]} }})
	}
	var held []*fleet.Reservation
	admitted := func(kind string) (calls int) {
		for range 6 {
			if r, err := limits(kind).Reserve(t.Context()); err == nil {
				calls++
				held = append(held, r)
			}
		}
		return calls
	}
	for kind := range meter {
		if kind != "cool" {
			require.Equal(t, 5, admitted(kind), kind)
		}
	}
	require.NoError(t, limits("cool").Cooldown(t.Context(), "t/cool", 6*time.Second))
	// One waits for a slot, and goes: its place is lost after a second.
	gone, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	waits := limits("slots")
	require.NoError(t, waits.Update(func(c *fleet.Config) {
		c.MaxWait = -1
		c.Eval = func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			if args[0] == "settle" {
				return nil, errFault // as if it were killed: it does not say that it goes
			}
			return l.Eval(ctx, script, keys, args...)
		}
	}))
	_, err := waits.Reserve(gone)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	off.Store(-7200)
	for kind := range meter {
		require.LessOrEqual(t, admitted(kind), 1, "%s: it forgives nothing, but for what time has given", kind)
	}
	require.Zero(t, admitted("cool"))
	for _, r := range held {
		r.Settle(1)
	}
	time.Sleep(7 * time.Second)
	require.GreaterOrEqual(t, admitted("rate"), 3, "it is not locked out")
	require.Equal(t, 5, admitted("window"))
	require.Zero(t, admitted("month"))
	require.Equal(t, 6, admitted("cool"))
	require.Equal(t, 5, admitted("slots"))
}

// While a change of a limit is on its way, processes admit together at most what the larger
// limit would.
func TestUpdateInProgress(t *testing.T) {
	addr := services.Redis(t)
	n := name(t)
	limits := func(rate float64, burst int) *fleet.Limits {
		return fleet.New(fleet.Config{Name: n, Eval: resilienceredis.Eval(client(t, addr)), Timeout: 5 * time.Second,
			Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("t/calls", rate, 1).Burst(burst)} }})
	}
	high, low := limits(10, 60), limits(0.01, 1)
	start, admitted := time.Now(), 0
	for time.Since(start) < 2*time.Second {
		for _, l := range []*fleet.Limits{high, low} {
			if l.Do(t.Context(), func(context.Context) error { return nil }) == nil {
				admitted++
			}
		}
	}
	require.LessOrEqual(t, float64(admitted), 61+10*time.Since(start).Seconds())
	require.GreaterOrEqual(t, admitted, 60)
}

// A waiter that was killed at the head of the line delays the next by a poll and a second.
func TestWaiterThatIsKilledAtTheHead(t *testing.T) {
	addr := services.Redis(t)
	direct, n := client(t, addr), name(t)
	cfg := fleet.Config{Name: n, Eval: resilienceredis.Eval(direct), MaxWait: time.Minute, Timeout: 5 * time.Second,
		Meters: slotsOnly(1)}
	r, err := fleet.New(cfg).Reserve(t.Context())
	require.NoError(t, err)
	killed := start(t, job{Kind: "wait", Addrs: []string{addr}, Name: n})
	waiting := func() []string { return direct.ZRange(t.Context(), n+":{t}:w:running", 0, -1).Val() }
	require.Eventually(t, func() bool { return len(waiting()) == 1 }, time.Minute, time.Millisecond)
	head := waiting()[0]
	admitted := make(chan error, 1)
	go func() { _, err := fleet.New(cfg).Reserve(t.Context()); admitted <- err }()
	require.Eventually(t, func() bool { w := waiting(); return len(w) == 2 && w[0] == head }, time.Minute,
		time.Millisecond)
	killed.kill()
	now, err := direct.Time(t.Context()).Result()
	require.NoError(t, err)
	until := direct.ZScore(t.Context(), n+":{t}:p:running", head).Val()
	require.LessOrEqual(t, until, float64(now.UnixMicro()+1_010_000),
		"a poll of 10 ms and a second, or it was gone before")
	r.Settle(0)
	require.NoError(t, <-admitted)
}

// Calls that wait for slots of several meters stand behind all that wait for any of them.
func TestWaitersOfSeveralSlots(t *testing.T) {
	rdb := client(t, services.Redis(t))
	organization, user := fleet.Slots("t/all", 1), fleet.Slots("t/user", 1)
	cfg := fleet.Config{Name: name(t), Eval: resilienceredis.Eval(rdb), MaxWait: time.Minute, Timeout: 5 * time.Second}
	reserve := func(meters ...fleet.Meter) *fleet.Reservation {
		c := cfg
		c.Meters = func(context.Context) []fleet.Meter { return meters }
		r, err := fleet.New(c).Reserve(t.Context())
		require.NoError(t, err)
		return r
	}
	first := reserve(organization)
	order := make(chan int, 4)
	for i, meters := range [][]fleet.Meter{{organization}, {organization}, {user, organization}, {organization}} {
		go func() {
			r := reserve(meters...)
			order <- i
			r.Settle(0)
		}()
		waiting := func() bool { return rdb.ZCard(t.Context(), cfg.Name+":{t}:w:all").Val() == int64(i+1) }
		require.Eventually(t, waiting, time.Minute, time.Millisecond)
	}
	first.Settle(0)
	for i := range 4 {
		require.Equal(t, i, <-order)
	}
}

// A process with a shorter Lease does not shorten the leases of others.
func TestSlotOutlastsTheShorterLeaseOfAnother(t *testing.T) {
	rdb := client(t, services.Redis(t))
	cfg := fleet.Config{Name: name(t), Eval: resilienceredis.Eval(rdb), Lease: time.Hour, Timeout: 5 * time.Second,
		Meters: slotsOnly(2)}
	r, err := fleet.New(cfg).Reserve(t.Context())
	require.NoError(t, err)
	defer r.Settle(0)
	cfg.Lease = 10 * time.Second
	short := fleet.New(cfg)
	require.NoError(t, short.Do(t.Context(), func(ctx context.Context) error {
		require.ErrorIs(t, short.Do(ctx, nil), throttle.ErrLimited)
		return nil
	}))
	require.Eventually(t, func() bool { return short.Stats().Unsettled == 0 }, 10*time.Second, time.Millisecond)
	kept := rdb.PTTL(t.Context(), cfg.Name+":{t}:s:running").Val()
	require.Greater(t, kept, 59*time.Minute, "or the slot is free for others when the set expires")
	slot := rdb.ZRangeWithScores(t.Context(), cfg.Name+":{t}:s:running", 0, -1).Val()
	require.Len(t, slot, 1)
	now, err := rdb.Time(t.Context()).Result()
	require.NoError(t, err)
	require.Greater(t, slot[0].Score, float64(now.Add(59*time.Minute).UnixMicro()))
}

// A settlement that comes after the horizon is dropped and counted.
func TestSettlementAfterTheHorizon(t *testing.T) {
	eval := resilienceredis.Eval(client(t, services.Redis(t)))
	limits := fleet.New(fleet.Config{Name: name(t), Timeout: 5 * time.Second, RetryEvery: 10 * time.Millisecond,
		Meters: func(context.Context) []fleet.Meter {
			return []fleet.Meter{fleet.Rate("t/tokens", 1e-6, 5).Burst(9).Estimated()}
		},
		Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			if args[0] == "settle" {
				args[2] = args[2].(int64) - time.Hour.Microseconds()
			}
			return eval(ctx, script, keys, args...)
		}})
	r, err := limits.Reserve(t.Context())
	require.NoError(t, err)
	r.Settle(0)
	require.Eventually(t, func() bool { return limits.Stats().LateSettled == 1 }, 5*time.Second, time.Millisecond)
	_, err = limits.Reserve(t.Context())
	require.ErrorIs(t, err, throttle.ErrLimited, "it has used its estimate")
}

// After Redis has lost its data, as in a failover, the balance is off by what was lost, and
// the slots that were lost end their calls.
func TestRedisLosesItsData(t *testing.T) {
	server := services.NewRedis(t)
	limits := fleet.New(fleet.Config{Name: name(t), Eval: resilienceredis.Eval(client(t, server.Addr)),
		Lease: 300 * time.Millisecond, RetryEvery: 20 * time.Millisecond,
		Timeout: 2 * time.Second, Meters: func(context.Context) []fleet.Meter {
			return []fleet.Meter{fleet.Rate("t/tokens", 1e-6, 10).Burst(100), fleet.Slots("t/slots", 2)}
		}})
	err := limits.Do(t.Context(), func(ctx context.Context) error {
		server.Kill()
		server.Start()
		<-ctx.Done()
		return context.Cause(ctx)
	})
	require.ErrorIs(t, err, fleet.ErrLost)
	again := 0
	for range 100 {
		if limits.Do(t.Context(), func(context.Context) error { return nil }) == nil {
			again++
		}
		time.Sleep(time.Millisecond)
	}
	t.Logf("off by 10 tokens: %d calls of 10 were admitted again, where 9 were left", again)
	require.Equal(t, 10, again)
}
