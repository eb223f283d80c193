package harm_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/harm"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// A tenantKey is the key of the tenant in a ctx.
type tenantKey struct{}

// tenants has limits for each tenant, which are so high that no test reaches them.
type tenants struct{ limits *fleet.Limits }

func newTenants(client redis.UniversalClient, node func(string) string, slots int) tenants {
	return tenants{fleet.New(fleet.Config{
		Name: "harm", Eval: resilienceredis.Eval(client), EvalEach: resilienceredis.EvalEach(client), Node: node,
		// On a busy machine a late answer would be an outage for all tenants.
		Timeout: 5 * time.Second,
		Meters: func(ctx context.Context) []fleet.Meter {
			tenant := ctx.Value(tenantKey{}).(string)
			meters := []fleet.Meter{fleet.Rate(tenant+"/calls", 0.01, 1).Burst(1e6)} // its key exists for long
			if !strings.HasSuffix(tenant, "good") {
				meters = append(meters, fleet.Slots(tenant+"/running", slots))
			}
			return meters
		},
	})}
}

// begin begins a call of a tenant.
func (l tenants) begin(ctx context.Context, tenant string) (*fleet.Reservation, error) {
	return l.limits.Reserve(context.WithValue(ctx, tenantKey{}, tenant))
}

// reserve makes a call of a tenant.
func (l tenants) reserve(ctx context.Context, tenant string) error {
	r, err := l.begin(ctx, tenant)
	if err == nil {
		r.Settle(0)
	}
	return err
}

// judge alternates between a call of the tenant in trouble and four calls of another one.
func (l tenants) judge(t *testing.T, bad, good string) (r harm.Result) {
	const rounds = 25
	own, refused := 0, 0
	var why error
	for range rounds {
		if l.reserve(t.Context(), bad) != nil {
			own++
		}
		for range 4 {
			if err := l.reserve(t.Context(), good); err != nil {
				refused++
				why = err
			}
		}
	}
	r.Cells = []string{fmt.Sprintf("%d of %d", own, rounds), fmt.Sprintf("%d of %d", refused, 4*rounds)}
	r.Break(refused == 0, "%d of %d calls of another tenant are refused: %v", refused, 4*rounds, why)
	return r
}

// planted returns a row in which an operator has replaced all keys of a tenant.
func planted(value func(ctx context.Context, c *redis.Client, key string) error) func(t *testing.T) harm.Result {
	return func(t *testing.T) harm.Result {
		client := redisClient(t, services.NewRedis(t).Addr)
		l := newTenants(client, nil, 1000)
		require.NoError(t, l.reserve(t.Context(), "good"))
		_, err := l.begin(t.Context(), "bad") // without an end, so that the key of the slots exists
		require.NoError(t, err)
		keys, err := client.Keys(t.Context(), "*bad*").Result()
		require.NoError(t, err)
		require.Len(t, keys, 2)
		for _, key := range keys {
			require.NoError(t, client.Del(t.Context(), key).Err())
			require.NoError(t, value(t.Context(), client, key))
		}
		return l.judge(t, "bad", "good")
	}
}

func text(s string) func(context.Context, *redis.Client, string) error {
	return func(ctx context.Context, c *redis.Client, key string) error {
		return c.Set(ctx, key, s, time.Hour).Err()
	}
}

func set(ctx context.Context, c *redis.Client, key string) error { return c.SAdd(ctx, key, "x").Err() }

func list(ctx context.Context, c *redis.Client, key string) error {
	return c.LPush(ctx, key, "x").Err()
}

func hash(ctx context.Context, c *redis.Client, key string) error {
	return c.HSet(ctx, key, "field", "text").Err()
}

// moving is a row in which a Cluster moves the hash slot of a tenant. One of the tenant's keys does not exist and might
// be on the other master, so that Redis answers TRYAGAIN.
func moving(t *testing.T) (r harm.Result) {
	cluster := services.NewRedisCluster(t)
	client := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: cluster.Addrs(), ContextTimeoutEnabled: true, MaxRetries: -1,
	})
	t.Cleanup(func() { _ = client.Close() })
	l := newTenants(client, resilienceredis.Node(client), 1000)
	from := cluster.MasterOf("harm:{bad}")
	good := "good"
	for cluster.MasterOf("harm:{"+good+"}") != from {
		good = "x" + good
	}
	require.NoError(t, l.reserve(t.Context(), good))
	_, err := l.begin(t.Context(), "bad")
	require.NoError(t, err)
	keys, err := clusterKeys(t.Context(), client, "*bad*")
	require.NoError(t, err)
	require.Len(t, keys, 2)
	require.NoError(t, client.Del(t.Context(), keys[0]).Err())
	cluster.Move("harm:{bad}", (from+1)%3, func() { r = l.judge(t, "bad", good) })
	return r
}

func clusterKeys(ctx context.Context, client *redis.ClusterClient, pattern string) (keys []string, err error) {
	err = client.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error {
		some, err := c.Keys(ctx, pattern).Result()
		if len(some) > 0 {
			keys = some // all keys of a tenant are on one master
		}
		return err
	})
	return keys, err
}

// unusable returns a row in which the meters of a tenant are not valid.
func unusable(tenant string, slots int) func(t *testing.T) harm.Result {
	return func(t *testing.T) harm.Result {
		return newTenants(redisClient(t, services.NewRedis(t).Addr), nil, slots).judge(t, tenant, "good")
	}
}

func fleetTable() *harm.Table {
	return &harm.Table{
		Name: "fleet",
		Title: "The limits of one tenant are in trouble. This tenant makes every fifth call, and another one the rest. No " +
			"call of the other tenant may be refused.",
		Head: []string{"its own refused", "others refused"},
		Rows: []harm.Row{
			{Name: "zero", Trouble: "its keys are the text 0", Run: planted(text("0"))},
			{Name: "empty", Trouble: "its keys are empty texts", Run: planted(text(""))},
			{Name: "words", Trouble: "its keys are texts that do not parse", Run: planted(text("not a number"))},
			{Name: "set", Trouble: "its keys are sets", Run: planted(set)},
			{Name: "list", Trouble: "its keys are lists", Run: planted(list)},
			{Name: "hash", Trouble: "its keys are hashes with other fields", Run: planted(hash)},
			{Name: "moving", Trouble: "its slot of a Cluster moves (TRYAGAIN)", Run: moving},
			{Name: "braces", Trouble: "its name is a{b}c", Run: unusable("a{b}c", 1000)},
			{Name: "no name", Trouble: "its name is empty", Run: unusable("", 1000)},
			{Name: "none", Trouble: "its limit is 0", Run: unusable("bad", 0)},
		},
	}
}
