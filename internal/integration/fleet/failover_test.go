package fleet_test

import (
	"context"
	"errors"
	"fmt"
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

// This file has servers of Redis fail while tenants call. Each test logs the calls admitted beside those allowed, slots
// leaked, settlements lost, the time until no call is refused because of an outage, and the refusals of tenants whose
// server did not fail.

// A load is what tenants do, each at a steady pace above its limit, through limits that several processes would share.
type load struct {
	limits  *fleet.Limits
	tenants []string
	began   time.Time

	mu       sync.Mutex
	admitted map[string]int
	refused  map[string]int       // because of an outage
	last     map[string]time.Time // when that was
	first    map[string]time.Time
	other    map[string]int // errors that are no refusal of a limit
	outages  []string       // why they began
}

const (
	tenantRate  = 20 // calls a second
	tenantBurst = 20
	tenantPause = 20 * time.Millisecond // between the calls of a tenant
)

type loadTenant struct{}

// startLoad starts the calls of n tenants. end stops them, closes the limits and waits.
func startLoad(t *testing.T, cfg fleet.Config, n int) (l *load, end func()) {
	l = &load{
		began: time.Now(), admitted: map[string]int{}, refused: map[string]int{}, last: map[string]time.Time{},
		first: map[string]time.Time{}, other: map[string]int{},
	}
	cfg.Name = "load"
	cfg.Meters = func(ctx context.Context) []fleet.Meter {
		tenant := ctx.Value(loadTenant{}).(string)
		return []fleet.Meter{
			fleet.Rate(tenant+"/calls", tenantRate, 1).Burst(tenantBurst),
			fleet.Rate(tenant+"/tokens", 1e6, 10).Estimated(),
			fleet.Slots(tenant+"/running", 2),
		}
	}
	l.limits = fleet.New(cfg)
	l.limits.Observe(func(_ context.Context, e throttle.Event) {
		if e.Kind == throttle.EventOutageBegan {
			l.mu.Lock()
			l.outages = append(l.outages, fmt.Sprintf("%s after %v: %v", e.Key,
				time.Since(l.began).Round(time.Millisecond), e.Err))
			l.mu.Unlock()
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	var calls sync.WaitGroup
	for i := range n {
		tenant := fmt.Sprintf("tenant-%d", i)
		l.tenants = append(l.tenants, tenant)
		calls.Go(func() { l.play(context.WithValue(ctx, loadTenant{}, tenant), tenant) })
	}
	return l, func() {
		t.Helper()
		cancel()
		calls.Wait()
		flush, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		require.NoError(t, l.limits.Close(flush), "settlements lost")
	}
}

func (l *load) play(ctx context.Context, tenant string) {
	for ; ctx.Err() == nil; time.Sleep(tenantPause) {
		r, err := l.limits.Reserve(context.WithoutCancel(ctx))
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		now := time.Now()
		l.mu.Lock()
		switch {
		case err == nil:
			l.admitted[tenant]++
		case limited != nil && limited.Reason == throttle.Outage:
			l.refused[tenant]++
			l.last[tenant] = now
			if l.first[tenant].IsZero() {
				l.first[tenant] = now
			}
		case limited == nil:
			l.other[err.Error()]++
		}
		l.mu.Unlock()
		if err == nil {
			time.Sleep(time.Millisecond)
			r.Settle(7)
		}
	}
}

// well waits until no call was refused because of an outage for a second, and returns how long after a time that began.
func (l *load) well(t *testing.T, since time.Time) time.Duration {
	t.Helper()
	var last time.Time
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		last = since
		for _, at := range l.last {
			if at.After(last) {
				last = at
			}
		}
		return time.Since(last) > time.Second && !l.limits.Stats().Down
	}, time.Minute, 50*time.Millisecond, "never well again")
	return last.Sub(since)
}

// report logs what happened, and checks that what was admitted is at most what is allowed: the limit, and again a burst
// for each of forgiven times that the state of a tenant was lost.
func (l *load) report(
	t *testing.T, rdb redis.UniversalClient, well time.Duration, failed func(tenant string) bool, forgiven int,
) {
	t.Helper()
	elapsed := time.Since(l.began)
	allowed := tenantBurst*(1+forgiven) + int(tenantRate*elapsed.Seconds()) + 1
	sum, most, others, leaked := 0, 0, 0, int64(0)
	for _, tenant := range l.tenants {
		sum, most = sum+l.admitted[tenant], max(most, l.admitted[tenant])
		if !failed(tenant) {
			others += l.refused[tenant]
		}
		leaked += rdb.ZCard(context.Background(), "load:{"+tenant+"}:s:running").Val()
	}
	s := l.limits.Stats()
	t.Logf("admitted %d (at most %d of a tenant, allowed %d), slots leaked %d, slots lost %d, settlements lost %d and "+
		"late %d, well after %v, outages %d, refusals of other tenants %d, without Redis %d, other errors %v",
		sum, most, allowed, leaked, s.LostSlots, s.NeverSettled, s.LateSettled, well.Round(time.Millisecond),
		len(l.outages), others, s.AdmittedLocal, l.other)
	t.Log(strings.Join(l.outages, "\n"))
	require.LessOrEqual(t, most, allowed)
	require.Zero(t, leaked)
	require.Zero(t, s.NeverSettled)
	require.Zero(t, others)
	require.Empty(t, l.other)
}

// failoverClient returns a client of a cluster with the options that the docs of resilienceredis ask for.
func failoverClient(t *testing.T, nodes []*services.RedisServer) *redis.ClusterClient {
	var addrs []string
	for _, s := range nodes {
		addrs = append(addrs, s.Addr)
	}
	c := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: addrs, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1, MaxRedirects: 3,
	})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestClusterFollowsItsReplica kills a master of six nodes. Its tenants are served again soon after
// its replica has taken
// over, and other tenants are not affected.
func TestClusterFollowsItsReplica(t *testing.T) {
	nodes := services.NewFailoverCluster(t, time.Second)
	c := failoverClient(t, nodes)
	node := resilienceredis.Node(c)
	l, end := startLoad(t, fleet.Config{
		Eval: resilienceredis.Eval(c), EvalEach: resilienceredis.EvalEach(c), Node: node, Lease: 3 * time.Second,
		Timeout: 2 * time.Second, // the machine may be busy, which is no failure of a node
	}, 24)
	time.Sleep(time.Second)
	victim := node("load:{tenant-0}:c:calls")
	ofVictim := map[string]bool{}
	for _, tenant := range l.tenants {
		ofVictim[tenant] = node("load:{"+tenant+"}:c:calls") == victim
	}
	killed := time.Now()
	for _, s := range nodes {
		if s.Addr == victim {
			s.Kill()
		}
	}
	leads := leader(t, nodes, victim, "load:{tenant-0}:c:calls")
	time.Sleep(time.Second)
	well := l.well(t, killed)
	end()
	t.Logf("a replica leads %v after its master was killed; its tenants are served %v after that",
		leads.Sub(killed).Round(time.Millisecond), (well - leads.Sub(killed)).Round(time.Millisecond))
	l.report(t, c, well, func(tenant string) bool { return ofVictim[tenant] }, 1)
	require.Less(t, well-leads.Sub(killed), 20*time.Second, "go-redis alone takes up to a minute")
}

// leader waits until another node than victim serves a key, and returns when.
func leader(t *testing.T, nodes []*services.RedisServer, victim, key string) time.Time {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, s := range nodes {
			if s.Addr == victim {
				continue
			}
			c := redis.NewClient(&redis.Options{Addr: s.Addr, MaxRetries: -1, DialerRetries: 1})
			err := c.Set(context.Background(), key+":probe", 1, time.Second).Err()
			_ = c.Close()
			if err == nil {
				return true
			}
		}
		return false
	}, time.Minute, 20*time.Millisecond)
	return time.Now()
}

// TestMovingSlotAffectsItsTenantOnly has a slot of a cluster move for two seconds.
func TestMovingSlotAffectsItsTenantOnly(t *testing.T) {
	cluster := services.NewRedisCluster(t)
	var addrs []string
	addrs = append(addrs, cluster.Addrs()...)
	c := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: addrs, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1, MaxRedirects: 3,
	})
	t.Cleanup(func() { _ = c.Close() })
	l, end := startLoad(t, fleet.Config{
		Eval: resilienceredis.Eval(c), EvalEach: resilienceredis.EvalEach(c), Node: resilienceredis.Node(c),
		Timeout: time.Second,
	}, 24)
	time.Sleep(time.Second)
	key := "load:{tenant-0}:r:calls"
	slot := cluster.Slot(key)
	moved := map[string]bool{}
	for _, tenant := range l.tenants {
		moved[tenant] = cluster.Slot("load:{"+tenant+"}:r:calls") == slot
	}
	from := cluster.MasterOf(key)
	began := time.Now()
	cluster.Move(key, (from+1)%3, func() { time.Sleep(2 * time.Second) })
	well := l.well(t, began)
	end()
	l.report(t, c, well, func(tenant string) bool { return moved[tenant] }, 1)
	require.Empty(t, l.outages)
	require.Less(t, well, 20*time.Second)
}

// TestSentinelFollowsThePrimary kills a primary, and stops one, whose connections stay open.
func TestSentinelFollowsThePrimary(t *testing.T) {
	for name, fail := range map[string]func(*services.RedisServer){
		"killed": (*services.RedisServer).Kill, "stopped": (*services.RedisServer).Pause,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			primary, sentinels := services.NewSentinels(t, time.Second)
			c := redis.NewFailoverClient(&redis.FailoverOptions{
				MasterName: "m", SentinelAddrs: sentinels, ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1,
			})
			t.Cleanup(func() { _ = c.Close() })
			l, end := startLoad(t, fleet.Config{Eval: resilienceredis.Eval(c), EvalEach: resilienceredis.EvalEach(c),
				Lease: 2 * time.Second}, 8)
			time.Sleep(time.Second)
			began := time.Now()
			fail(primary)
			time.Sleep(2 * time.Second)
			well := l.well(t, began)
			end()
			l.report(t, c, well, func(string) bool { return true }, 1)
			require.Less(t, well, 30*time.Second)
		})
	}
}

// TestServerWithoutEvalSha has an access rule that permits EVAL only, and one that permits neither.
func TestServerWithoutEvalSha(t *testing.T) {
	server := services.NewRedis(t)
	admin := client(t, server.Addr)
	require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all",
		"-evalsha").Err())
	c := redis.NewClient(&redis.Options{
		Addr: server.Addr, Username: "app", Password: "secret", ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1,
	})
	t.Cleanup(func() { _ = c.Close() })
	l, end := startLoad(t, fleet.Config{Eval: resilienceredis.Eval(c), EvalEach: resilienceredis.EvalEach(c)}, 4)
	time.Sleep(time.Second)
	end()
	l.report(t, admin, 0, func(string) bool { return false }, 0)
	require.Empty(t, l.outages)

	require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", "app", "-eval").Err())
	limits := limitsOn(c, fleet.Config{OnOutage: fleet.Admit}, fleet.Rate("a", 10, 1))
	err := limits.Do(t.Context(), func(context.Context) error { return nil })
	require.ErrorContains(t, err, "NOPERM")
	require.NotErrorIs(t, err, throttle.ErrOutage)
	require.Equal(t, "store_rejects", limits.Describe().Health(t.Context()).State)
}

// TestShortOutagesForgiveNothing has two processes with Local meet ten pauses of 250 ms within an hour's quota of 10.
func TestShortOutagesForgiveNothing(t *testing.T) {
	server := services.NewRedis(t)
	c := client(t, server.Addr)
	var processes []*fleet.Limits
	for range 2 {
		processes = append(processes, limitsOn(c, fleet.Config{OnOutage: fleet.Local, Instances: 2},
			fleet.Quota("tenant/hour", 10, throttle.Window{Every: time.Hour}, 1)))
	}
	var admitted atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var calls sync.WaitGroup
	for _, l := range processes {
		calls.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
				if l.Do(context.WithoutCancel(ctx), func(context.Context) error { return nil }) == nil {
					admitted.Add(1)
				}
			}
		})
	}
	for range 10 {
		server.Pause()
		time.Sleep(250 * time.Millisecond)
		server.Resume()
		time.Sleep(500 * time.Millisecond)
	}
	cancel()
	calls.Wait()
	t.Logf("admitted %d, of 10 by Redis and at most 10 by the parts of both processes", admitted.Load())
	require.LessOrEqual(t, admitted.Load(), int64(20))
	require.Positive(t, processes[0].Stats().AdmittedLocal)
}

// TestJobsThatExitLeaveNoSlot has four jobs run one after another, each as a process whose main returns after its work.
func TestJobsThatExitLeaveNoSlot(t *testing.T) {
	c := client(t, services.NewRedis(t).Addr)
	for run := range 4 {
		l := limitsOn(c, fleet.Config{Lease: time.Minute}, fleet.Slots("jobs/running", 1),
			fleet.Rate("jobs/tokens", 1e-6, 10).Burst(100).Estimated())
		r, err := l.Reserve(t.Context())
		require.NoError(t, err, "run %d", run)
		if run%2 == 0 {
			r.Settle(5)
		} // otherwise it forgets the reservation
		require.NoError(t, l.Close(t.Context()))
		require.Zero(t, c.ZCard(t.Context(), "limits:{jobs}:s:running").Val())
	}
	require.True(t, strings.HasPrefix(c.Get(t.Context(), "limits:{jobs}:r:tokens").Val(), "30000000 "),
		"5, 10, 5 and 10 tokens")
}
