package fleet_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// limitsOn returns limits on a Redis of the test, with the meters of cfg or those given.
func limitsOn(c redis.UniversalClient, cfg fleet.Config, meters ...fleet.Meter) *fleet.Limits {
	cfg.Name, cfg.Eval, cfg.EvalEach = "limits", resilienceredis.Eval(c), resilienceredis.EvalEach(c)
	if cfg.Meters == nil {
		cfg.Meters = func(context.Context) []fleet.Meter { return meters }
	}
	return fleet.New(cfg)
}

// kindsOfKeys are the kinds of state that the script keeps in Redis, in keys of a tenant.
var kindsOfKeys = map[string]string{"rate": "r:", "quota": "q:", "day": "q:", "slots": "s:", "cooldown": "c:",
	"waiters": "w:", "polls": "p:"}

// TestUnreadableStateCountsAsAbsent writes over the state of one tenant, as an operator may. Its calls are admitted,
// settled and renewed as if the key was absent, and no call of another tenant is refused.
func TestUnreadableStateCountsAsAbsent(t *testing.T) {
	c := client(t, services.NewRedis(t).Addr).(*redis.Client)
	type tenantKey struct{}
	outages := 0
	l := limitsOn(c, fleet.Config{MaxWait: 200 * time.Millisecond, Timeout: time.Second,
		Meters: func(ctx context.Context) []fleet.Meter {
			tenant := ctx.Value(tenantKey{}).(string)
			return []fleet.Meter{
				fleet.Rate(tenant+"/rate", 1e9, 1).Estimated(),
				fleet.Quota(tenant+"/quota", 1e9, throttle.Window{Every: time.Hour}, 1).Estimated(),
				fleet.Quota(tenant+"/day", 1e9, throttle.Window{Per: throttle.Day}, 1).Estimated(),
				fleet.Slots(tenant+"/slots", 2),
			}
		}})
	l.Observe(func(_ context.Context, e throttle.Event) {
		if e.Kind != throttle.EventRefused {
			outages++
		}
	})
	do := func(tenant string) error {
		return l.Do(context.WithValue(t.Context(), tenantKey{}, tenant), func(context.Context) error { return nil })
	}
	set := func(value string) func(string) error {
		return func(key string) error { return c.Set(t.Context(), key, value, 0).Err() }
	}
	digits := strings.Repeat("9", 400)
	for name, write := range map[string]func(key string) error{
		"empty": set(""), "a number": set("0"), "a word": set("x"), "negative": set("-1 -1 -1 -1"),
		"two numbers": set("1 2"), "four numbers": set("1 2 3 4"), "five numbers": set("1 2 3 4 5"),
		"not finite": set("inf nan"), "binary": set("\x00\xff"), "a fraction": set("1.5 2.5"),
		"huge numbers": set(digits + " " + digits), "four huge numbers": set(strings.Repeat(digits+" ", 3) + digits),
		"a set":        func(key string) error { return c.SAdd(t.Context(), key, "x").Err() },
		"a hash":       func(key string) error { return c.HSet(t.Context(), key, "x", "y").Err() },
		"a list":       func(key string) error { return c.LPush(t.Context(), key, "x").Err() },
		"a sorted set": func(key string) error { return c.ZAdd(t.Context(), key, redis.Z{Score: 1e300, Member: "x"}).Err() },
	} {
		for kind, code := range kindsOfKeys {
			key := "limits:{bad}:" + code + kind
			if code == "c:" || code == "w:" || code == "p:" {
				key = "limits:{bad}:" + code + "slots"
			}
			if name == "a sorted set" && (code == "s:" || code == "w:" || code == "p:") {
				continue // this is their type
			}
			require.NoError(t, c.Del(t.Context(), key).Err())
			require.NoError(t, write(key))
			for range 3 {
				require.NoError(t, do("bad"), "%s: %s", kind, name)
				require.NoError(t, do("good"), "%s: %s", kind, name)
			}
		}
	}
	require.Eventually(t, func() bool { return l.Stats().Unsettled == 0 }, 5*time.Second, time.Millisecond)
	require.Zero(t, outages)
	s := l.Stats()
	require.Zero(t, s.Failed+s.NeverSettled+s.LateSettled+s.LostSlots)
}

// fill uses up the memory of a Redis.
func fill(t *testing.T, c *redis.Client) {
	t.Helper()
	require.NoError(t, c.ConfigSet(t.Context(), "maxmemory", "3mb").Err())
	require.Eventually(t, func() bool {
		err := c.Append(t.Context(), "full", strings.Repeat("x", 4096)).Err()
		return err != nil && strings.HasPrefix(err.Error(), "OOM")
	}, 20*time.Second, time.Microsecond)
}

// TestFullRedisFreesSlots has the memory of Redis end while calls run: their slots are renewed and freed, what they
// settle arrives, and the refusal of a call that needs memory names the reason.
func TestFullRedisFreesSlots(t *testing.T) {
	c := client(t, services.NewRedis(t, "--maxmemory-policy", "noeviction").Addr).(*redis.Client)
	slots := limitsOn(c, fleet.Config{Lease: time.Second}, fleet.Slots("tenant/run", 2))
	tokens := limitsOn(c, fleet.Config{}, fleet.Rate("tenant/tokens", 1e-3, 10).Burst(10).Estimated())
	short, err := slots.Reserve(t.Context())
	require.NoError(t, err)
	long, err := slots.Reserve(t.Context())
	require.NoError(t, err)
	spent, err := tokens.Reserve(t.Context())
	require.NoError(t, err)
	fill(t, c)

	short.Settle(0)
	spent.Settle(4)
	require.Eventually(t, func() bool { return slots.Stats().Unsettled+tokens.Stats().Unsettled == 0 },
		5*time.Second, time.Millisecond)
	require.EqualValues(t, 1, c.ZCard(t.Context(), "limits:{tenant}:s:run").Val())
	select {
	case <-long.Lost():
		t.Fatal("a lease could not be renewed")
	case <-time.After(3 * time.Second):
	}
	long.Settle(0)
	require.Eventually(t, func() bool { return c.ZCard(t.Context(), "limits:{tenant}:s:run").Val() == 0 },
		5*time.Second, time.Millisecond)

	calls := limitsOn(c, fleet.Config{}, fleet.Rate("tenant/calls", 10, 1))
	err = calls.Do(t.Context(), func(context.Context) error { return nil })
	limited, ok := errors.AsType[*throttle.LimitedError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, throttle.Outage, limited.Reason)
	require.ErrorContains(t, err, "OOM")
	require.Equal(t, "store_full", calls.Describe().Health(t.Context()).State)

	require.NoError(t, c.Del(t.Context(), "full").Err())
	began := time.Now()
	require.Eventually(t, func() bool {
		return calls.Do(t.Context(), func(context.Context) error { return nil }) == nil
	}, 10*time.Second, 10*time.Millisecond)
	require.Zero(t, calls.Describe().Health(t.Context()))
	r, err := limitsOn(c, fleet.Config{}, fleet.Rate("tenant/tokens", 1e-3, 6).Burst(10)).Reserve(t.Context())
	require.NoError(t, err, "six of ten were given back")
	r.Settle(0)
	t.Logf("well again %v after there was memory; settlements lost: %d, slots lost: %d",
		time.Since(began).Round(time.Millisecond), tokens.Stats().NeverSettled, slots.Stats().LostSlots)
	require.Zero(t, slots.Stats().LostSlots+slots.Stats().NeverSettled)
	require.Zero(t, tokens.Stats().NeverSettled+tokens.Stats().LateSettled)
}
