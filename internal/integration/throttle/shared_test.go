// Package throttle_test tests throttle.Shared on real servers.
package throttle_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
)

func client(t testing.TB, addr string) *redis.Client {
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

var prefixes atomic.Int64

// prefix returns one that no other test uses, nor an earlier run.
func prefix(t testing.TB, rdb *redis.Client) string {
	p := fmt.Sprintf("throttle-test:%d:%d:%d:", os.Getpid(), time.Now().UnixNano(), prefixes.Add(1))
	t.Cleanup(func() {
		keys, _ := rdb.Keys(context.Background(), p+"*").Result()
		for _, key := range keys {
			rdb.Del(context.Background(), key)
		}
	})
	return p
}

// patient is longer than any machine takes for an answer.
const patient = 30 * time.Second

// A worker is a process of its own that makes calls.
type worker struct {
	Addr, Prefix string
	Rate         float64
	Burst        int
	Calls        int // to make, one after the other
}

type result struct {
	Stats throttle.SharedStats
}

const workerEnv = "THROTTLE_TEST_WORKER"

func TestMain(m *testing.M) {
	work := os.Getenv(workerEnv)
	if work == "" {
		os.Exit(m.Run())
	}
	var w worker
	if err := json.Unmarshal([]byte(work), &w); err != nil {
		panic(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: w.Addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "fleet", Prefix: w.Prefix, Eval: resilienceredis.Eval(rdb), Rate: w.Rate, Burst: w.Burst,
		Timeout: patient, OnOutage: throttle.RefuseAll,
	})
	var calls sync.WaitGroup
	for range 4 {
		calls.Go(func() {
			for range w.Calls / 4 {
				_ = s.Do(context.Background(), "", func(context.Context) error { return nil })
			}
		})
	}
	calls.Wait()
	if err := json.NewEncoder(os.Stdout).Encode(result{s.Stats()}); err != nil {
		panic(err)
	}
}

// fleet runs n workers at once and returns what each has done, and the time that
// it took by the clock of Redis.
func fleet(t *testing.T, rdb *redis.Client, n int, w worker) ([]throttle.SharedStats, time.Duration) {
	work, err := json.Marshal(w)
	require.NoError(t, err)
	began := rdb.Time(t.Context()).Val()
	all := make([]throttle.SharedStats, n)
	var processes sync.WaitGroup
	for i := range all {
		processes.Go(func() {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), workerEnv+"="+string(work))
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err != nil {
				t.Errorf("worker: %v", err)
				return
			}
			var r result
			if err := json.Unmarshal(out, &r); err != nil {
				t.Errorf("worker: %v: %s", err, out)
			}
			all[i] = r.Stats
		})
	}
	processes.Wait()
	return all, rdb.Time(t.Context()).Val().Sub(began)
}

func TestFourProcessesShareOneLimit(t *testing.T) {
	rdb := client(t, services.Redis(t))
	for name, c := range map[string]struct {
		rate  float64
		burst int
	}{
		"a burst and no more": {rate: 1.0 / 3600, burst: 200},
		"a rate":              {rate: 500, burst: 50},
		"an odd rate":         {rate: 1e4 / 3, burst: 7},
	} {
		t.Run(name, func(t *testing.T) {
			all, took := fleet(t, rdb, 4, worker{
				Addr: services.Redis(t), Prefix: prefix(t, rdb), Rate: c.rate, Burst: c.burst, Calls: 1000,
			})
			var sum throttle.SharedStats
			for _, s := range all {
				sum.Admitted += s.Admitted
				sum.Refused += s.Refused
				sum.Asked += s.Asked
				sum.Failed += s.Failed
			}
			t.Logf("%v: %+v", took, sum)
			require.Zero(t, sum.Failed)
			require.EqualValues(t, 4000, sum.Admitted+sum.Refused)
			require.LessOrEqual(t, float64(sum.Admitted), float64(c.burst)+c.rate*took.Seconds())
			require.GreaterOrEqual(t, sum.Admitted, int64(c.burst))
			if c.rate < 1 {
				require.EqualValues(t, c.burst, sum.Admitted)
			}
			require.EqualValues(t, 4000, sum.Asked, "one round trip a decision")
		})
	}
}

// An hour off, and more: the clock of a bubble is in the year 2000.
func TestTheClockOfAnInstanceDoesNotMatter(t *testing.T) {
	addr := services.Redis(t)
	rdb := client(t, addr)
	p := prefix(t, rdb)
	cfg := throttle.SharedConfig{
		Name: "clocks", Prefix: p, Rate: 1.0 / 3600, Burst: 10, Timeout: patient, OnOutage: throttle.RefuseAll,
	}
	right := cfg
	right.Eval = resilienceredis.Eval(rdb)
	s := throttle.NewShared(right)
	for range 4 {
		require.True(t, s.Allow(t.Context(), ""))
	}
	synctest.Test(t, func(t *testing.T) {
		rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return net.Dial(network, addr)
		}})
		defer rdb.Close()
		wrong := cfg
		wrong.Eval = resilienceredis.Eval(rdb)
		s := throttle.NewShared(wrong)
		require.Equal(t, 2000, time.Now().Year())
		for left := 5; left >= 0; left-- {
			d := s.Take(t.Context(), "", 1)
			require.True(t, d.OK)
			require.Equal(t, left, d.Remaining)
		}
		require.False(t, s.Allow(t.Context(), ""))
	})
	d := s.Take(t.Context(), "", 1)
	require.False(t, d.OK)
	require.LessOrEqual(t, d.RetryAfter, time.Hour)
	require.Greater(t, d.RetryAfter, 50*time.Minute)
}

// counting counts what is sent to the server.
type counting struct{ commands atomic.Int64 }

func (*counting) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c *counting) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" || cmd.Name() == "eval" {
			c.commands.Add(1)
		}
		return next(ctx, cmd)
	}
}
func (*counting) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestOneRoundTripADecision(t *testing.T) {
	own := services.NewRedis(t) // which does not know the script
	rdb := client(t, own.Addr)
	var sent counting
	rdb.AddHook(&sent)
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "trips", Eval: resilienceredis.Eval(rdb), Rate: 1.0 / 3600, Burst: 50, Timeout: patient, OnOutage: throttle.RefuseAll,
	})
	for i := range 100 {
		require.Equal(t, i < 50, s.Allow(t.Context(), ""))
	}
	require.EqualValues(t, 101, sent.commands.Load(), "and one to tell the script")
	require.EqualValues(t, 100, s.Stats().Asked)
}

func TestOutages(t *testing.T) {
	const rate, burst, instances = 100, 40, 4
	for name, policy := range map[string]throttle.OutagePolicy{
		"LimitLocally": throttle.LimitLocally, "RefuseAll": throttle.RefuseAll, "AdmitAll": throttle.AdmitAll,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			own := services.NewRedis(t)
			s := throttle.NewShared(throttle.SharedConfig{
				Name: "outage", Eval: resilienceredis.Eval(client(t, own.Addr)), Rate: rate, Burst: burst,
				OnOutage: policy, Instances: instances, RetryEvery: time.Millisecond, Timeout: time.Second,
			})
			// What is wrong is not for how long: calls are made until things are so.
			until := func(isDown bool) {
				for s.Allow(t.Context(), ""); s.Stats().Down != isDown; s.Allow(t.Context(), "") {
				}
			}
			until(false)
			for _, fault := range []struct{ off, on func() }{{own.Kill, own.Start}, {own.Pause, own.Resume}} {
				fault.off()
				began := time.Now()
				until(true)
				before := s.Stats()
				for range 200 {
					err := s.Do(t.Context(), "", func(context.Context) error { return nil })
					if policy == throttle.RefuseAll {
						require.ErrorIs(t, err, throttle.ErrOutage)
					}
				}
				after := s.Stats()
				admitted := float64(after.Admitted - before.Admitted)
				switch policy {
				case throttle.LimitLocally:
					require.LessOrEqual(t, admitted, burst/instances+rate/instances*time.Since(began).Seconds()+1)
				case throttle.RefuseAll:
					require.Zero(t, admitted)
				case throttle.AdmitAll:
					require.EqualValues(t, 200, admitted)
				}
				fault.on()
				until(false)
				alone := s.Stats().Alone
				s.Allow(t.Context(), "")
				require.Equal(t, alone, s.Stats().Alone, "decided by Redis again")
			}
		})
	}
}

// Callers whose deadlines are shorter than Timeout, or who cancel, do not keep the
// Shared from noticing that Redis hangs.
func TestImpatientCallersOfAHangingRedis(t *testing.T) {
	for name, within := range map[string]func(context.Context) (context.Context, context.CancelFunc){
		"deadlines": func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 5*time.Millisecond)
		},
		"cancels": func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(5*time.Millisecond, cancel)
			return ctx, cancel
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			own := services.NewRedis(t)
			s := throttle.NewShared(throttle.SharedConfig{
				Name: "hang", Eval: resilienceredis.Eval(client(t, own.Addr)), Rate: 1e6,
				OnOutage: throttle.AdmitAll, RetryEvery: time.Hour, Timeout: 200 * time.Millisecond,
			})
			require.True(t, s.Allow(t.Context(), ""))
			own.Pause()
			for !s.Stats().Down { // as long as it takes: it would never be
				ctx, cancel := within(t.Context())
				_ = s.Wait(ctx, "")
				cancel()
			}
			for range 100 {
				require.NoError(t, s.Wait(t.Context(), ""))
			}
			require.GreaterOrEqual(t, s.Stats().Alone, int64(100))
			own.Resume()
		})
	}
}

// One of three servers hangs, or is gone: the keys of the others are decided by
// theirs.
func TestOneShardOfThree(t *testing.T) {
	for name, fault := range map[string]func(*services.RedisServer){
		"hanging": (*services.RedisServer).Pause, "gone": (*services.RedisServer).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var shards [3]func(context.Context, string, []string, ...any) (any, error)
			var servers [3]*services.RedisServer
			for i := range shards {
				servers[i] = services.NewRedis(t)
				shards[i] = resilienceredis.Eval(client(t, servers[i].Addr))
			}
			s := throttle.NewShared(throttle.SharedConfig{
				Name: "shards", Rate: 1.0 / 3600, Burst: 100, Timeout: 2 * time.Second, RetryEvery: time.Hour, OnOutage: throttle.RefuseAll,
				Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
					return shards[int(keys[0][len(keys[0])-1]-'0')](ctx, script, keys, args...)
				},
			})
			fault(servers[1])
			for range 100 {
				require.NoError(t, s.Wait(t.Context(), "0"))
				require.ErrorIs(t, s.Wait(t.Context(), "1"), throttle.ErrOutage)
				require.NoError(t, s.Wait(t.Context(), "2"))
			}
			err := s.Wait(t.Context(), "0")
			require.ErrorIs(t, err, throttle.ErrLimited)
			require.NotErrorIs(t, err, throttle.ErrOutage, "by the limit")
			require.EqualValues(t, 100, s.Stats().Alone)
			require.LessOrEqual(t, s.Stats().Failed, int64(2), "two answers that are late, or one error")
			servers[1].Resume()
		})
	}
}

func TestWhatElseIsUnderTheKey(t *testing.T) {
	rdb := client(t, services.Redis(t))
	for name, put := range map[string]func(key string) error{
		"text":   func(key string) error { return rdb.Set(t.Context(), key, "hello", time.Minute).Err() },
		"a list": func(key string) error { return rdb.LPush(t.Context(), key, "x").Err() },
	} {
		p := prefix(t, rdb)
		require.NoError(t, put(p+"wrong"))
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "wrong", Prefix: p, Eval: resilienceredis.Eval(rdb), Rate: 1, Timeout: patient, OnOutage: throttle.RefuseAll,
		})
		err := s.Do(t.Context(), "", func(context.Context) error { return nil })
		require.ErrorIs(t, err, throttle.ErrOutage, name)
		_, fromRedis := errors.AsType[redis.Error](err)
		require.True(t, fromRedis, name)
	}
}

// A server whose clock is set back must not refuse until it is that late again, however many
// calls it refuses meanwhile.
func TestServerClockSetBack(t *testing.T) {
	rdb := client(t, services.Redis(t))
	p := prefix(t, rdb)
	future := rdb.Time(t.Context()).Val().Add(1000 * time.Hour).UnixMicro()
	require.NoError(t, rdb.Set(t.Context(), p+"back", fmt.Sprintf("%d 0 %d 100000|1s 10 %d", future, future-1e6, future), time.Minute).Err())
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "back", Prefix: p, Eval: resilienceredis.Eval(rdb), Rate: 10, Burst: 10, Quotas: []throttle.Quota{{N: 10, Every: time.Second}}, Timeout: patient, OnOutage: throttle.RefuseAll,
	})
	d := s.Take(t.Context(), "", 1)
	require.False(t, d.OK)
	require.LessOrEqual(t, d.ResetAfter, time.Second)
	require.LessOrEqual(t, d.RetryAfter, time.Second)
	require.Eventually(t, func() bool { return s.Allow(t.Context(), "") }, patient, time.Millisecond, "calls do not keep it back")
}

// A clock that is set back makes no window of a quota longer, also if an instance notices that
// knows another quota.
func TestServerClockSetBackInAWindow(t *testing.T) {
	rdb := client(t, services.Redis(t))
	hourly := throttle.Quota{N: 3, Every: time.Hour}
	for _, notices := range []throttle.Quota{hourly, {N: 100, Per: throttle.Day}} {
		var seconds atomic.Int64
		seconds.Store(1_790_000_000)
		p := prefix(t, rdb)
		instance := func(q throttle.Quota) *throttle.Shared {
			return throttle.NewShared(throttle.SharedConfig{
				Name: "back", Prefix: p, Eval: atClock(rdb, &seconds), Quotas: []throttle.Quota{q}, Timeout: patient, OnOutage: throttle.RefuseAll,
			})
		}
		s, other := instance(hourly), instance(notices)
		require.True(t, s.Take(t.Context(), "", 2).OK)
		seconds.Add(50 * 60)
		require.True(t, s.Take(t.Context(), "", 1).OK)
		seconds.Add(-30 * 60)
		other.Allow(t.Context(), "")
		for range 2 {
			require.Equal(t, 10*time.Minute, s.Take(t.Context(), "", 1).RetryAfter)
		}
		seconds.Add(10 * 60)
		require.Equal(t, time.Hour, s.Take(t.Context(), "", 2).ResetAfter, "a new window")
	}
}

// While an Update reaches one instance after the other, the old limit and the new one are in
// use side by side: together they admit what the larger of them would. What was owed before is
// owed in tokens, so a new rate counts at once.
func TestAnUpdateThatIsOnItsWay(t *testing.T) {
	rdb := client(t, services.Redis(t))
	for _, c := range []struct{ old, next throttle.Limit }{
		{throttle.Limit{Rate: 1, Burst: 60}, throttle.Limit{Rate: 60, Burst: 60}},
		{throttle.Limit{Rate: 60, Burst: 60}, throttle.Limit{Rate: 1, Burst: 60}},
		{throttle.Limit{Rate: 10, Burst: 100}, throttle.Limit{Rate: 10, Burst: 10}},
		{throttle.Limit{Rate: 1.0 / 3600, Burst: 20}, throttle.Limit{Rate: 20, Burst: 20}},
		{throttle.Limit{Rate: 3, Burst: 7}, throttle.Limit{Rate: 1000.0 / 7, Burst: 11}},
		{throttle.Limit{Rate: 5, Burst: 30}, throttle.Limit{Quotas: []throttle.Quota{{N: 30, Every: time.Hour}}}},
	} {
		t.Run(fmt.Sprint(c.old, c.next), func(t *testing.T) {
			var seconds atomic.Int64
			seconds.Store(1_790_000_000)
			p := prefix(t, rdb)
			instance := func(l throttle.Limit) *throttle.Shared {
				return throttle.NewShared(throttle.SharedConfig{
					Name: "roll", Prefix: p, Eval: atClock(rdb, &seconds), Rate: l.Rate, Burst: l.Burst, Quotas: l.Quotas, Timeout: patient, OnOutage: throttle.RefuseAll,
				})
			}
			old, next := instance(c.old), instance(c.next)
			burst, rate := max(c.old.Burst, c.next.Burst), max(c.old.Rate, c.next.Rate)
			if c.next.Quotas != nil {
				burst += c.next.Quotas[0].N // the old limit does not count what only the new one has
			}
			admitted := 0
			for second := range 4 {
				for range 300 {
					for _, s := range []*throttle.Shared{old, next} {
						if s.Allow(t.Context(), "") {
							admitted++
						}
					}
				}
				require.LessOrEqual(t, float64(admitted), float64(burst)+rate*float64(second))
				seconds.Add(1)
			}
			if c.next.Rate == 0 {
				return
			}
			// The last of them is updated.
			require.NoError(t, old.Update(func(cfg *throttle.SharedConfig) { cfg.Rate, cfg.Burst = c.next.Rate, c.next.Burst }))
			old.Allow(t.Context(), "")
			seconds.Add(int64(float64(burst)/c.next.Rate) + 1)
			require.Equal(t, c.next.Burst, old.Peek(t.Context(), "").Remaining, "the debt is repaid at the new rate")
			require.Zero(t, old.Stats().Failed+next.Stats().Failed)
		})
	}
}

// However many tokens are owed, a limit under which they take ages is one that Redis can keep.
func TestADebtOfAges(t *testing.T) {
	rdb := client(t, services.Redis(t))
	p := prefix(t, rdb)
	instance := func(rate float64, burst int) *throttle.Shared {
		return throttle.NewShared(throttle.SharedConfig{
			Name: "ages", Prefix: p, Eval: resilienceredis.Eval(rdb), Rate: rate, Burst: burst, Timeout: patient, OnOutage: throttle.RefuseAll,
		})
	}
	require.True(t, instance(1e9, 1e15).Take(t.Context(), "", 1e15).OK)
	slow := instance(1, 5)
	require.NoError(t, limited(t, slow.Wait(t.Context(), "")).Err)
	require.Zero(t, slow.Stats().Failed)
	require.NoError(t, slow.Reset(t.Context(), ""))
	require.True(t, slow.Allow(t.Context(), ""))
}

func TestKeysLevelsAndWhatStays(t *testing.T) {
	rdb := client(t, services.Redis(t))
	p := prefix(t, rdb)
	type level struct{}
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "api", Prefix: p, Eval: resilienceredis.Eval(rdb), Rate: 1.0 / 3600, Burst: 10, Timeout: patient, OnOutage: throttle.RefuseAll,
		Levels: 2, Reserve: []float64{0.5}, Priority: func(ctx context.Context) int { return ctx.Value(level{}).(int) },
	})
	admitted := func(key string, at int) (n int) {
		for s.Allow(context.WithValue(t.Context(), level{}, at), key) {
			n++
		}
		return n
	}
	require.Equal(t, 5, admitted("a", 1), "half is for the level above")
	require.Equal(t, 5, admitted("a", 0))
	require.Equal(t, 10, admitted("b", 0))
	ttl := rdb.PTTL(t.Context(), p+"api/a").Val()
	require.LessOrEqual(t, ttl, 10*time.Hour+2*time.Millisecond, "the key goes when it says nothing any more")
	require.Greater(t, ttl, 9*time.Hour)
}
