package bulkhead_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

type shareKey struct{}

// ofShare returns ctx for a call of a share, by shareOf.
func ofShare(ctx context.Context, share string) context.Context {
	return context.WithValue(ctx, shareKey{}, share)
}

func shareOf(ctx context.Context) string {
	share, _ := ctx.Value(shareKey{}).(string)
	return share
}

func TestTurnsOfShares(t *testing.T) {
	for _, test := range []struct {
		name    string
		waiting []bulkhead.Waiting
		want    string
	}{
		{"one after the other", []bulkhead.Waiting{{"a", 0, 9}, {"b", 0, 9}, {"c", 0, 9}}, "abcabcabc"},
		{"a share with slots waits behind", []bulkhead.Waiting{{"a", 4, 9}, {"b", 0, 9}}, "bbb"},
		{"more slots", []bulkhead.Waiting{{"a", 8, 9}, {"b", 3, 9}}, "bbb"},
		{"each has as many", []bulkhead.Waiting{{"a", 4, 9}, {"b", 4, 9}}, "abab"},
		{"a share that does not wait", []bulkhead.Waiting{{"a", 5, 9}, {"b", 5, 9}, {"c", 1, 0}}, "abab"},
		{"a share that waits no more", []bulkhead.Waiting{{"a", 0, 3}, {"b", 0, 1}, {"c", 0, 2}}, "abcaca"},
	} {
		t.Run(test.name, func(t *testing.T) {
			require.Equal(t, test.want, bulkhead.Turns(len(test.want), test.waiting))
		})
	}
}

// A load sends calls of one share at random: a Poisson process.
type load struct {
	share string
	rate  float64 // calls a second
	cost  int
	level int
}

// lognormal draws from the log-normal distribution with a coefficient of variation of 0.5.
func lognormal(mean time.Duration) func(*rand.Rand) time.Duration {
	sigma := math.Sqrt(math.Log(1.25))
	return func(r *rand.Rand) time.Duration {
		return time.Duration(float64(mean) * math.Exp(sigma*r.NormFloat64()-sigma*sigma/2))
	}
}

// A result is what became of the calls of a share.
type result struct {
	made, served int
	slots        time.Duration // time that its calls held slots
	latency      []time.Duration
}

func (r result) quantile(q float64) time.Duration {
	slices.Sort(r.latency)
	return r.latency[int(q*float64(len(r.latency)-1))]
}

// serve sends loads to a bulkhead for a time, in a bubble. A call takes 10 ms on average.
// A call counts where it is served before the loads end.
func serve(t *testing.T, cfg bulkhead.Config, d time.Duration, loads ...load) map[string]result {
	results := map[string]result{}
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(cfg)
		var mu sync.Mutex
		var calls sync.WaitGroup
		service := lognormal(10 * time.Millisecond)
		for i, l := range loads {
			calls.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(i), 3))
				ctx := costing(atLevel(ofShare(t.Context(), l.share), l.level), max(l.cost, 1))
				for begin := time.Now(); time.Since(begin) < d; {
					time.Sleep(time.Duration(rng.ExpFloat64() / l.rate * float64(time.Second)))
					takes, start := service(rng), time.Now()
					calls.Go(func() {
						err := b.Do(ctx, func(context.Context) error { time.Sleep(takes); return nil })
						mu.Lock()
						defer mu.Unlock()
						r := results[l.share]
						r.made++
						if err == nil && time.Since(begin) < d {
							r.slots += takes * time.Duration(max(l.cost, 1))
							r.latency = append(r.latency, time.Since(start))
						}
						if err == nil {
							r.served++
						}
						results[l.share] = r
					})
				}
			})
		}
		time.Sleep(d + time.Second)
		calls.Wait()
		requireIdle(t, b)
		require.Zero(t, bulkhead.Shares(b))
	})
	return results
}

func tenants() (loads []load) {
	for i := range 9 {
		loads = append(loads, load{share: fmt.Sprint("tenant ", i), rate: 100})
	}
	return loads
}

// A server has 20 slots and so 2000 calls a second. Of its ten tenants, nine send half of
// their part, and one ten times of its.
func TestFloodOfOneTenantLeavesOthersAlone(t *testing.T) {
	if raceDetector {
		t.Skip("a simulation")
	}
	const d = 10 * time.Second
	run := func(shared bool, loads []load) map[string]result {
		cfg := bulkhead.Config{Limit: 20, MaxWait: 100 * time.Millisecond, Queue: 100}
		if shared {
			cfg.Share = shareOf
		}
		return serve(t, cfg, d, loads...)
	}
	flooded := append(tenants(), load{share: "flood", rate: 2000})
	alone, shared, mixed := run(true, tenants()), run(true, flooded), run(false, flooded)
	var served, servedMixed int
	for name, r := range shared {
		served += len(r.latency)
		servedMixed += len(mixed[name].latency)
		if name == "flood" {
			continue
		}
		require.GreaterOrEqual(t, float64(r.served), 0.99*float64(r.made), name)
		for _, q := range []float64{0.5, 0.99} {
			require.LessOrEqual(t, r.quantile(q).Seconds(), 1.2*alone[name].quantile(q).Seconds(), "%s, %v", name, q)
		}
		require.Less(t, float64(mixed[name].served), 0.99*float64(mixed[name].made),
			"without shares, the flood is that of all")
	}
	require.GreaterOrEqual(t, float64(served), 0.99*float64(servedMixed), "in all")
	t.Logf("served: tenant 0 %d of %d (without shares %d), flood %d of %d, all %d (%d)", shared["tenant 0"].served,
		shared["tenant 0"].made, mixed["tenant 0"].served, shared["flood"].served, shared["flood"].made, served, servedMixed)
	t.Logf("latency of tenant 0: median %v (alone %v), 99 %% %v (%v)", shared["tenant 0"].quantile(0.5),
		alone["tenant 0"].quantile(0.5), shared["tenant 0"].quantile(0.99), alone["tenant 0"].quantile(0.99))
}

func TestFloodsGetEqualParts(t *testing.T) {
	if raceDetector {
		t.Skip("a simulation")
	}
	for _, test := range []struct {
		name  string
		cfg   bulkhead.Config
		a, b  load
		ratio float64 // of the time in slots
		d     time.Duration
	}{
		{"equal", bulkhead.Config{Limit: 20}, load{rate: 4000}, load{rate: 4000}, 1, 5 * time.Second},
		{"unequal floods", bulkhead.Config{Limit: 20}, load{rate: 8000}, load{rate: 3000}, 1, 5 * time.Second},
		{"a small limit", bulkhead.Config{Limit: 2}, load{rate: 400}, load{rate: 600}, 1, 20 * time.Second},
		{"one slot", bulkhead.Config{Limit: 1}, load{rate: 200}, load{rate: 300}, 1, 20 * time.Second},
		{"costs", bulkhead.Config{Limit: 60, Cost: costOf}, load{rate: 4000, cost: 3}, load{rate: 9000}, 1, 5 * time.Second},
		{"the second level", bulkhead.Config{Limit: 20, Levels: 2, Priority: levelOf}, load{rate: 4000, level: 1},
			load{rate: 4000, level: 1}, 1, 5 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.cfg.Share, test.cfg.MaxWait, test.cfg.Queue = shareOf, 100*time.Millisecond, 100
			test.a.share, test.b.share = "a", "b"
			results := serve(t, test.cfg, test.d, test.a, test.b)
			ratio := float64(results["a"].slots) / float64(results["b"].slots)
			t.Logf("%.3f", ratio)
			require.InEpsilon(t, test.ratio, ratio, 0.05)
		})
	}
}

// Calls keep their share while Share and the limit change around them.
func TestSharesAcrossUpdates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 2, MaxWait: -1})
		c := newCallers(t, b)
		c.start(t.Context(), "held 1")
		c.start(t.Context(), "held 2")
		c.start(t.Context(), "none 1")
		require.NoError(t, b.Update(func(cfg *bulkhead.Config) { cfg.Share = shareOf }))
		c.start(ofShare(t.Context(), "a"), "a 1")
		c.start(ofShare(t.Context(), "a"), "a 2")
		c.start(ofShare(t.Context(), "b"), "b 1")
		require.Equal(t, 2, bulkhead.Shares(b))
		c.finish("held 1", "held 2", "none 1")
		require.Equal(t, []string{"held 1", "held 2", "a 1", "none 1", "b 1"}, c.ran)
		require.NoError(t, b.Update(func(cfg *bulkhead.Config) { cfg.Share = nil }))
		c.start(ofShare(t.Context(), "a"), "none 2")
		require.NoError(t, setLimit(b, 3))
		synctest.Wait()
		c.finish("b 1")
		require.Equal(t, []string{"none 2", "a 2"}, c.ran[5:])
		c.finishAll()
		require.Zero(t, bulkhead.Shares(b))
		requireIdle(t, b)
	})
}

func TestStatsShowTheBusiestShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 14, MaxWait: -1, Share: shareOf, Cost: costOf})
		require.Empty(t, b.Stats().Shares)
		c := newCallers(t, b)
		start := func(share string, cost, n int) {
			for i := range n {
				c.start(costing(ofShare(t.Context(), share), cost), fmt.Sprint(share, cost, i))
			}
		}
		start("a", 1, 3)
		start("b", 2, 1)
		start("c", 1, 3)
		start("b", 6, 1)
		start("d", 2, 4)
		require.Equal(t, []bulkhead.ShareStats{{"b", 8, 0}, {"d", 0, 4}, {"a", 3, 0}, {"c", 3, 0}}, b.Stats().Shares)
		for i := range 20 {
			start(fmt.Sprint("few ", i), 1, 1)
		}
		long := strings.Repeat("é", 80)
		start("x"+long, 1, 2)
		shares := b.Stats().Shares
		require.Len(t, shares, 10)
		require.Equal(t, bulkhead.ShareStats{Share: "x" + long[:98], Queued: 2}, shares[4], "no part of a character")
		require.Equal(t, "few 0", shares[5].Share)
		c.finishAll()
		require.Empty(t, b.Stats().Shares)
	})
}

// The text of a share in errors and events is bounded; the share is not.
func TestShareTextIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 2, Share: shareOf})
		var told []bulkhead.Event
		b.Observe(func(_ context.Context, e bulkhead.Event) { told = append(told, e) })
		long := strings.Repeat("s", 1000)
		c := newCallers(t, b)
		for _, name := range []string{"1", "2", "3", "1 more"} {
			c.start(ofShare(t.Context(), long+name[:1]), name)
		}
		require.Equal(t, 3, bulkhead.Shares(b))
		c.finishAll()
		require.Len(t, told, 3)
		require.Equal(t, long[:100], told[0].Refusal.Share)
	})
}

// Without a Share there are no shares, and calls without one have a row of their own beside others.
func TestStatsOfCallsWithoutAShare(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 2})
	defer hold(t, b)()
	require.Nil(t, b.Stats().Shares)
	b = bulkhead.New(bulkhead.Config{Limit: 2, MaxWait: -1, Share: func(context.Context) string { return "" }})
	require.Nil(t, b.Stats().Shares)
	defer hold(t, b)()
	require.Equal(t, []bulkhead.ShareStats{{InFlight: 1}}, b.Stats().Shares)
}

// A displaced call may have free slots reserved for it. The calls that still wait then get these slots.
func TestReservedSlotsOfDisplacedCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{
			Limit: 4, MaxWait: bulkhead.Unlimited, Queue: 3, Share: shareOf, Cost: costOf,
		})
		c := newCallers(t, b)
		start := func(name, share string, cost int) (cancel func()) {
			ctx, cancel := context.WithCancel(costing(ofShare(t.Context(), share), cost))
			c.start(ctx, name)
			return cancel
		}
		start("first", "z", 2)
		start("second", "z", 2)
		start("oldest", "a", 1)
		for range 6 { // from then on, the newest call is served first
			start("canceled", "a", 1)()
			synctest.Wait()
		}
		start("older", "a", 4)
		start("newest", "a", 4)
		c.finish("first")
		require.Equal(t, 2, b.Stats().InFlight, "two slots are reserved for the newest call")
		start("newcomer", "b", 1)
		require.Equal(t, bulkhead.Displaced, c.refusal("newest"))
		require.Equal(t, []string{"first", "second"}, c.ran[:2])
		require.ElementsMatch(t, []string{"newcomer", "oldest"}, c.ran[2:], "which are admitted together")
		c.finishAll()
	})
}
