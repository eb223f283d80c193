package history_test

import (
	"context"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services"
)

// A Redis that fails over loses the changes that it has not replicated. Until the next promise, reads may then be as
// old as the values promised before the loss, but no older.
func TestCacheasideFailover(t *testing.T) { search(t, &failoverTarget) }

var failoverTarget = target{
	name: "failover", length: 4 * time.Second, worker: cacheWorker, begin: failoverBegin, check: cacheCheck,
}

// Without gaps, the checker must find reads that are older than a promise. This shows that changes are lost, and that
// the checker detects it.
var lossless = target{
	name: "failover", length: 4 * time.Second, worker: cacheWorker, begin: failoverBegin,
	check: func(r *run) *finding {
		r.gaps = nil
		return cacheCheck(r)
	},
}

func TestCacheasideFailoverFindsItsControl(t *testing.T) {
	if !*withMutants {
		t.Skip("needs -history.mutants")
	}
	found, did := explore(t, &lossless, os.Args[0], rand.Uint64N(1_000_000), time.Minute)
	require.NotNil(t, found, "no read is older than was promised: %s", list(did))
	t.Log(found)
}

// A gap is the time of a failover. Changes that reached Redis after begun and before dead may be lost.
type gap struct{ begun, killed, dead int64 }

func failoverBegin(r *run) {
	r.plan = cachePlan{
		Memory: r.rng.IntN(3) == 0, Store: true,
		TTL: 2 * time.Second, ErrorPause: 2 * time.Millisecond, LoadTimeout: time.Second,
		Timeout: 250 * time.Millisecond, LeaseTTL: 10 * time.Millisecond, WriteTimeout: 20 * time.Millisecond,
		Load: 5 * time.Millisecond, Write: 5 * time.Millisecond, Slow: 20, Keys: 2,
		Readers: 4, Pause: 8 * time.Millisecond, Writers: 2, WritePause: 60 * time.Millisecond,
	}
	r.calm = 800 * time.Millisecond
	r.newSource()
	p := newRedisPair(r)
	for range 2 {
		front := faultproxy.New(r, p.servers[0].Addr)
		p.fronts = append(p.fronts, front)
		r.start(front.Addr())
	}
	r.troubles = [][]trouble{{{"failover", p.failOver}}}
}

// A redisPair is two servers, of which one follows the other.
type redisPair struct {
	*run
	servers     [2]*services.RedisServer
	clients     [2]*redis.Client
	replication [2]*faultproxy.Proxy // to each
	fronts      []*faultproxy.Proxy  // to the primary
	primary     int
}

func newRedisPair(r *run) *redisPair {
	p := &redisPair{run: r}
	for i := range p.servers {
		p.servers[i] = services.NewRedis(r)
		p.replication[i] = faultproxy.New(r, p.servers[i].Addr)
		p.clients[i] = redis.NewClient(&redis.Options{Addr: p.servers[i].Addr})
		r.Cleanup(func() { _ = p.clients[i].Close() })
	}
	p.follow()
	return p
}

// follow has the other server replicate the primary, and waits until it does.
func (p *redisPair) follow() {
	ctx, replica := context.Background(), p.clients[1-p.primary]
	require.NoError(p, p.clients[p.primary].ConfigSet(ctx, "repl-diskless-sync-delay", "0").Err())
	host, port, err := net.SplitHostPort(p.replication[p.primary].Addr())
	require.NoError(p, err)
	require.NoError(p, replica.ReplicaOf(ctx, host, port).Err())
	require.Eventually(p, func() bool {
		return strings.Contains(replica.Info(ctx, "replication").Val(), "master_link_status:up")
	}, 2*time.Minute, 5*time.Millisecond)
}

// failOver kills the primary while the replica lags. The replica becomes the primary.
func (p *redisPair) failOver(rng *rand.Rand) {
	ctx, old, next := context.Background(), p.primary, 1-p.primary
	lost := gap{begun: now()}
	conn := p.clients[old].Conn()
	require.NoError(p, conn.Set(ctx, "mark", lost.begun, 0).Err())
	replicas, err := conn.Wait(ctx, 1, 30*time.Second).Result() // for everything written before the mark
	require.NoError(p, err)
	require.EqualValues(p, 1, replicas)
	_ = conn.Close()
	p.replication[old].Hold(faultproxy.Both)
	time.Sleep(between(rng, time.Millisecond, 150*time.Millisecond))
	lost.killed = now()
	p.servers[old].Kill()
	lost.dead = now()
	p.mu.Lock()
	p.gaps = append(p.gaps, lost)
	p.mu.Unlock()
	require.NoError(p, p.clients[next].ReplicaOf(ctx, "NO", "ONE").Err())
	p.replication[old].Reset()
	p.replication[old].Heal()
	for _, front := range p.fronts {
		front.Point(p.servers[next].Addr)
		front.Reset()
	}
	p.primary = next
	p.servers[old].Start()
	p.follow()
}
