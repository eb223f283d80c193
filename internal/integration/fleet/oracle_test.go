package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
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

// An evalFunc is a Config's Eval.
type evalFunc func(ctx context.Context, script string, keys []string, args ...any) (any, error)

func client(t testing.TB, addrs ...string) redis.UniversalClient {
	t.Helper()
	c := redis.NewUniversalClient(&redis.UniversalOptions{
		Addrs: addrs, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1, MaxRedirects: 3,
	})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

var names atomic.Int64

// name returns a name of limits that no other test has.
func name(t testing.TB) string {
	return fmt.Sprintf("%s-%d-%d", t.Name(), time.Now().UnixNano(), names.Add(1))
}

// An oracle knows what Redis has done, whatever the processes have heard of it.
type oracle struct {
	mu     sync.Mutex
	taken  map[string]int64 // by the id of a reservation: its estimate
	used   map[string]int64 // of settlements that were applied, at least once
	faults int
}

// A line is how a process reaches Redis. What goes over it may be lost, or its answer, or
// come late, and the oracle sees what Redis has answered.
type line struct {
	eval   evalFunc
	oracle *oracle
	mu     sync.Mutex
	random *rand.Rand
	often  float64 // of faults
	dead   atomic.Bool
	change func(script string) string
	forged func(l *line, script string, keys []string, args []any) // after a reservation that was lost
}

var errFault = errors.New("a fault")

// draw returns a random number, and the share of calls that are to have a fault.
func (l *line) draw() (random, often float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.random.Float64(), l.often
}

// Eval is a Config's.
func (l *line) Eval(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	if l.change != nil {
		script = l.change(script)
	}
	fault := -1.0
	if chance, often := l.draw(); chance < often {
		fault, _ = l.draw()
		l.oracle.mu.Lock()
		l.oracle.faults++
		l.oracle.mu.Unlock()
	}
	switch {
	case l.dead.Load():
		return nil, errFault
	case fault >= 0 && fault < 0.3: // the request is lost
		if l.forged != nil && args[0] == "take" {
			l.forged(l, script, keys, args)
		}
		return nil, errFault
	}
	value, err := l.eval(context.WithoutCancel(ctx), script, keys, args...)
	if err == nil {
		l.oracle.saw(args, value.([]any))
	}
	switch {
	case l.dead.Load(), fault >= 0.3 && fault < 0.7: // the answer is lost
		return nil, errFault
	case fault >= 0.7: // it comes too late
		<-ctx.Done()
	}
	return value, err
}

// saw notes what the script has done.
func (o *oracle) saw(args, answer []any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch done := answer[0].(int64); {
	case args[0] == "take" && done == 1:
		o.taken[args[1].(string)] = args[6].(int64) / 1_000_000 // of the first meter, a rate
	case args[0] == "settle" && done == 1:
		id := args[1].(string)
		o.used[id] = o.taken[id] + args[7].(int64)/1_000_000
	}
}

// balance returns the tokens that have been spent, after all.
func (o *oracle) balance() (sum int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, n := range o.taken {
		if used, settled := o.used[id]; settled {
			n = used
		}
		sum += n
	}
	return sum
}

const (
	burst    = 100_000_000
	parallel = 5
)

// play has processes reserve and settle over lines that fail, and returns how many tokens
// more than the oracle knows are spent in Redis of the rate and of the quota, how many calls held
// slots at once, and the processes.
func play(t *testing.T, connect func() evalFunc, direct redis.UniversalClient, processes int, often float64, with func(*line)) (rate, quota int64, most int, all []*fleet.Limits) {
	t.Helper()
	o := &oracle{taken: map[string]int64{}, used: map[string]int64{}}
	n := name(t)
	var holding, highest atomic.Int64
	var lines []*line
	cfg := fleet.Config{
		Name: n, Lease: time.Second, Timeout: 100 * time.Millisecond, RetryEvery: 100 * time.Millisecond, MaxWait: 300 * time.Millisecond,
		Meters: func(ctx context.Context) []fleet.Meter {
			estimate := fleet.Estimate(ctx.Value(estimateKey{}).(int64))
			return []fleet.Meter{
				fleet.Rate("t/tokens", 1e-6, estimate).Burst(burst), fleet.Quota("t/month", burst, throttle.Quota{Per: throttle.Month}, estimate),
				fleet.Slots("t/running", parallel), fleet.Rate("t/calls", 1e6, 1),
			}
		},
	}
	stop := time.Now().Add(3 * time.Second)
	var calls sync.WaitGroup
	for p := range processes {
		l := &line{eval: connect(), oracle: o, random: rand.New(rand.NewPCG(uint64(p), 1)), often: often}
		if with != nil {
			with(l)
		}
		lines = append(lines, l)
		c := cfg
		c.Eval = l.Eval
		limits := fleet.New(c)
		all = append(all, limits)
		for i := range 6 {
			calls.Go(func() {
				random := rand.New(rand.NewPCG(uint64(p), uint64(10+i)))
				for time.Now().Before(stop) {
					if p == processes-1 && time.Until(stop) < 2*time.Second {
						l.dead.Store(true) // the process is killed
						return
					}
					r, err := limits.Reserve(context.WithValue(t.Context(), estimateKey{}, random.Int64N(1000)))
					if err != nil {
						time.Sleep(time.Millisecond)
						continue
					}
					now := holding.Add(1)
					for was := highest.Load(); now > was && !highest.CompareAndSwap(was, now); was = highest.Load() {
					}
					select {
					case <-r.Lost():
					case <-time.After(time.Duration(random.IntN(20)) * time.Millisecond):
					}
					holding.Add(-1)
					if random.IntN(10) == 0 {
						r.SettleEach(t.Context(), map[string]int64{"tokens": 0, "month": 0})
					} else {
						r.Settle(t.Context(), random.IntN(2000))
					}
				}
			})
		}
	}
	calls.Wait()
	for _, l := range lines { // all is settled
		l.mu.Lock()
		l.often = 0
		l.mu.Unlock()
	}
	for p, limits := range all[:processes-1] {
		require.Eventually(t, func() bool { return limits.Stats().Unsettled == 0 }, 10*time.Second, 10*time.Millisecond, "process %d", p)
	}
	spent := func(kind, meter string) (n int64) {
		value, err := direct.Get(t.Context(), fmt.Sprintf("%s:{t}:%s:%s", cfg.Name, kind, meter)).Result()
		require.NoError(t, err)
		_, err = fmt.Sscan(value, &n)
		require.NoError(t, err)
		return n
	}
	rate = spent("r", "tokens") - 1_000_000*o.balance()
	refilled := int64(15) // a token in a million seconds: a millionth a second
	if rate <= 0 && rate >= -refilled {
		rate = 0
	}
	quota = spent("q", "month") - o.balance()
	var s fleet.Stats
	for _, l := range all {
		one := l.Stats()
		s.Admitted, s.Asked, s.Failed, s.Outages = s.Admitted+one.Admitted, s.Asked+one.Asked, s.Failed+one.Failed, s.Outages+one.Outages
		s.Dropped, s.Untold, s.Lost = s.Dropped+one.Dropped, s.Untold+one.Untold, s.Lost+one.Lost
	}
	t.Logf("%d processes: %d faults, %d reserved in Redis, %d settled; %+v; at most %d at once; off by %d, %d",
		processes, o.faults, len(o.taken), len(o.used), s, highest.Load(), rate, quota)
	return rate, quota, int(highest.Load()), all
}

type estimateKey struct{}

// servers are where the oracle looks: a Redis and a Redis Cluster.
func servers(t *testing.T) map[string][]string {
	return map[string][]string{"Redis": {services.Redis(t)}, "Cluster": services.NewRedisCluster(t).Addrs()}
}

// Whatever is lost between processes and Redis, or comes late, and when one is killed: never
// more calls at once than slots, and the balance of each meter is exact, to the token.
func TestOracle(t *testing.T) {
	for server, addrs := range servers(t) {
		for _, processes := range []int{2, 4} {
			for _, often := range []float64{0, 0.05, 0.3} {
				t.Run(fmt.Sprintf("%s/%d processes/%v", server, processes, often), func(t *testing.T) {
					direct := client(t, addrs...)
					rate, quota, most, _ := play(t, func() evalFunc { return resilienceredis.Eval(client(t, addrs...)) }, direct, processes, often, nil)
					require.Zero(t, rate, "millionths of tokens")
					require.Zero(t, quota)
					require.LessOrEqual(t, most, parallel)
				})
			}
		}
	}
}

// The oracle finds what it is there to find: a script that forgets the id of a settlement,
// settlements of reservations that were never made, and leases that never end.
func TestOracleFindsItsControls(t *testing.T) {
	addr := services.Redis(t)
	direct := client(t, addr)
	connect := func() evalFunc { return resilienceredis.Eval(client(t, addr)) }
	t.Run("forgets the id", func(t *testing.T) {
		rate, quota, _, _ := play(t, connect, direct, 2, 0.3, func(l *line) {
			l.change = replacing(t, "'SET', KEYS[1], 1, 'NX', 'PX'", "'SET', KEYS[1], 1, 'PX'")
		})
		require.True(t, rate != 0 && quota != 0)
	})
	t.Run("settles before it reserves", func(t *testing.T) {
		rate, quota, _, _ := play(t, connect, direct, 2, 0.3, func(l *line) {
			l.forged = func(l *line, script string, keys []string, args []any) {
				now, _ := direct.Time(context.Background()).Result()
				settle := []any{"settle", args[1], now.UnixMicro(), 1_100_000}
				for i := 3; i < len(args); i += 4 {
					cost, _ := args[i+3].(int64)
					settle = append(settle, args[i], args[i+1], args[i+2], -cost, number(t, direct, keys[2]))
				}
				_, _ = l.eval(context.Background(), script, []string{keys[0] + ":forged:" + args[1].(string), keys[0], keys[2], keys[4], keys[8]}, settle...)
			}
		})
		require.True(t, rate < 0 && quota < 0, "it mints: %d %d", rate, quota)
	})
	t.Run("without a lease", func(t *testing.T) {
		kept := replacing(t, "us / 1000) + 1000", "us / 1000) + 100000") // or the set itself expires
		dropped := replacing(t, "redis.call('ZREMRANGEBYSCORE', m.key, '-inf', text(now))", "")
		require.False(t, freeAfterItsLease(t, addr, func(script string) string { return dropped(kept(script)) }))
	})
}

// number returns the number of the window of a quota, or 0.
func number(t *testing.T, direct redis.UniversalClient, key string) (n int64) {
	value := direct.Get(context.Background(), key).Val()
	_, _ = fmt.Sscan(value, new(int64), new(int64), new(int64), &n)
	return n
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
func TestSlotsOfAKilledProcessAreFreeAfterTheirLease(t *testing.T) {
	require.True(t, freeAfterItsLease(t, services.Redis(t), nil))
}

func freeAfterItsLease(t *testing.T, addr string, change func(string) string) bool {
	o := &oracle{taken: map[string]int64{}, used: map[string]int64{}}
	cfg := fleet.Config{
		Name: name(t), Lease: 500 * time.Millisecond,
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Slots("t/running", 2)} },
	}
	line := func() *line {
		return &line{eval: resilienceredis.Eval(client(t, addr)), oracle: o, random: rand.New(rand.NewPCG(1, 1)), change: change}
	}
	killed, lives := line(), line()
	cfg.Eval = killed.Eval
	a := fleet.New(cfg)
	cfg.Eval = lives.Eval
	b := fleet.New(cfg)
	var held []*fleet.Reservation
	for range 2 {
		r, err := a.Reserve(t.Context())
		require.NoError(t, err)
		held = append(held, r)
	}
	time.Sleep(2 * cfg.Lease)
	_, err := b.Reserve(t.Context())
	require.ErrorIs(t, err, throttle.ErrLimited, "they are renewed")
	killed.dead.Store(true)
	died := time.Now()
	for _, r := range held {
		<-r.Lost()
	}
	_, err = b.Reserve(t.Context())
	lost := time.Since(died)
	for err != nil && time.Since(died) < 20*cfg.Lease {
		_, err = b.Reserve(t.Context())
		time.Sleep(5 * time.Millisecond)
	}
	t.Logf("lost after %v, free after %v of a lease of %v", lost, time.Since(died), cfg.Lease)
	return err == nil
}

// redisAt returns a change of the script whose clock is off by a time.
func redisAt(t *testing.T, off *atomic.Int64) func(string) string {
	return func(script string) string {
		changed := strings.Replace(script, "local clock = redis.call('TIME')\n", fmt.Sprintf("local clock = redis.call('TIME')\nclock[1] = clock[1] + %d\n", off.Load()), 1)
		require.NotEqual(t, script, changed)
		return changed
	}
}

// A clock of Redis that is set back neither forgives nor prolongs: not a rate, not the window of
// a quota, and not the lease of a slot.
func TestServerClockSetBack(t *testing.T) {
	var off atomic.Int64
	l := &line{
		eval: resilienceredis.Eval(client(t, services.Redis(t))), random: rand.New(rand.NewPCG(1, 1)), change: redisAt(t, &off),
		oracle: &oracle{taken: map[string]int64{}, used: map[string]int64{}},
	}
	meter := map[string]fleet.Meter{
		"rate": fleet.Rate("t/rate", 1, 1).Burst(5), "window": fleet.Quota("t/window", 5, throttle.Quota{Every: 6 * time.Second}, 1),
		"month": fleet.Quota("t/month", 5, throttle.Quota{Per: throttle.Month}, 1), "slots": fleet.Slots("t/slots", 5),
	}
	n := name(t)
	limits := func(kind string) *fleet.Limits {
		return fleet.New(fleet.Config{Name: n, Eval: l.Eval, Lease: 3 * time.Second, Timeout: 5 * time.Second,
			Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{meter[kind]} }})
	}
	admitted := func(kind string) (calls int) {
		for range 6 {
			if _, err := limits(kind).Reserve(t.Context()); err == nil {
				calls++
			}
		}
		return calls
	}
	for kind := range meter {
		require.Equal(t, 5, admitted(kind), kind)
	}
	off.Store(-7200)
	for kind := range meter {
		require.LessOrEqual(t, admitted(kind), 1, "%s: it forgives nothing, but for what time has given", kind)
	}
	time.Sleep(7 * time.Second)
	require.GreaterOrEqual(t, admitted("rate"), 3, "it is not locked out")
	require.Equal(t, 5, admitted("window"))
	require.Zero(t, admitted("month"))
}

// While a change of a limit is on its way, processes admit together at most what the larger
// limit would.
func TestAnUpdateThatIsOnItsWay(t *testing.T) {
	addr := services.Redis(t)
	n := name(t)
	limits := func(rate float64, burst int64) *fleet.Limits {
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

// A waiter that was killed at the head of the line delays the next by two polls.
func TestWaiterThatIsKilledAtTheHead(t *testing.T) {
	addr := services.Redis(t)
	cfg := fleet.Config{Name: name(t), Eval: resilienceredis.Eval(client(t, addr)), MaxWait: time.Minute, Timeout: 5 * time.Second,
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Slots("t/slots", 1)} }}
	holder, killed := fleet.New(cfg), fleet.New(cfg)
	r, err := holder.Reserve(t.Context())
	require.NoError(t, err)
	gone, kill := context.WithCancel(t.Context())
	dead := make(chan struct{})
	go func() { defer close(dead); _, _ = killed.Reserve(gone) }()
	time.Sleep(100 * time.Millisecond)
	admitted := make(chan time.Time)
	go func() {
		_, err := fleet.New(cfg).Reserve(t.Context())
		if err == nil {
			admitted <- time.Now()
		}
	}()
	time.Sleep(200 * time.Millisecond)
	kill()
	<-dead
	freed := time.Now()
	r.Settle(t.Context(), 0)
	after := (<-admitted).Sub(freed)
	t.Logf("admitted %v after the slot was free", after)
	require.Less(t, after, time.Second)
}

// A settlement that comes after the horizon is dropped and counted.
func TestSettlementAfterTheHorizon(t *testing.T) {
	l := &line{
		eval: resilienceredis.Eval(client(t, services.Redis(t))), random: rand.New(rand.NewPCG(1, 1)),
		oracle: &oracle{taken: map[string]int64{}, used: map[string]int64{}},
	}
	limits := fleet.New(fleet.Config{Name: name(t), Timeout: 5 * time.Second, RetryEvery: 10 * time.Millisecond,
		Meters: func(context.Context) []fleet.Meter {
			return []fleet.Meter{fleet.Rate("t/tokens", 1e-6, fleet.Estimate(5)).Burst(9)}
		},
		Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			if args[0] == "settle" {
				args[2] = args[2].(int64) - time.Hour.Microseconds()
			}
			return l.Eval(ctx, script, keys, args...)
		}})
	r, err := limits.Reserve(t.Context())
	require.NoError(t, err)
	r.Settle(t.Context(), 0)
	require.Eventually(t, func() bool { return limits.Stats().Dropped == 1 }, 5*time.Second, time.Millisecond)
	_, err = limits.Reserve(t.Context())
	require.ErrorIs(t, err, throttle.ErrLimited, "it has used its estimate")
}

// After Redis has lost its data, as in a failover, the balance is off by what was lost, and
// the slots that were lost end their calls.
func TestRedisLosesItsData(t *testing.T) {
	server := services.NewRedis(t)
	limits := fleet.New(fleet.Config{Name: name(t), Eval: resilienceredis.Eval(client(t, server.Addr)), Lease: 300 * time.Millisecond, RetryEvery: 20 * time.Millisecond,
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
