package services

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// A RedisCluster is a Redis Cluster that belongs to one test. It has three masters and no replicas. The test may
// kill, pause and restart each master. A master that is killed loses its keys but keeps its slots.
type RedisCluster struct {
	Masters [3]*RedisServer

	t   testing.TB
	ids [3]string
}

const slots = 16384

// NewRedisCluster starts a cluster on free ports of the loopback interface. Each master has a third of the slots. The
// cluster ends with the test.
func NewRedisCluster(t testing.TB) *RedisCluster {
	t.Helper()
	needRedisServer(t)
	c := &RedisCluster{t: t}
	ports := clusterPorts(t)
	for i, port := range ports {
		c.ids[i] = fmt.Sprintf("%040x", i+1)
		c.Masters[i] = &RedisServer{
			Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), t: t, dir: t.TempDir(), ready: clusterOK,
			// The node timeout is so long that no master is considered failed. With a short timeout, this would depend on the
			// speed of the machine, and there is no replica that could take over.
			args: []string{"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
				"--cluster-require-full-coverage", "no", "--cluster-node-timeout", "600000"},
		}
	}
	// The servers read the configuration of the cluster from a file, so they need not discover each other.
	for i, master := range c.Masters {
		var conf strings.Builder
		for j, port := range ports {
			role := "master"
			if i == j {
				role = "myself,master"
			}
			fmt.Fprintf(&conf, "%s 127.0.0.1:%d@%d %s - 0 0 %d connected %d-%d\n",
				c.ids[j], port, port+busOffset, role, j+1, j*slots/3, (j+1)*slots/3-1)
		}
		fmt.Fprintf(&conf, "vars currentEpoch %d lastVoteEpoch 0\n", len(ports))
		if err := os.WriteFile(filepath.Join(master.dir, "nodes.conf"), []byte(conf.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, master := range c.Masters {
		t.Cleanup(master.Kill)
		master.mu.Lock()
		master.launch()
		master.mu.Unlock()
	}
	for _, master := range c.Masters {
		master.mu.Lock()
		master.await()
		master.mu.Unlock()
	}
	return c
}

// busOffset is the difference between the port of a node's cluster bus and the port of the node.
const busOffset = 10000

// clusterPorts returns three free ports whose bus ports are also free. The ports are below the ports that the kernel
// uses for outgoing connections. Therefore they are still free when a killed server is restarted.
func clusterPorts(t testing.TB) (ports [3]int) {
	t.Helper()
	for i := range ports {
		for try := 0; ports[i] == 0; try++ {
			port := 11000 + rand.N(10000)
			own, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
			if err == nil {
				defer own.Close() // keeps the port until all three ports are found
				var bus net.Listener
				if bus, err = net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port+busOffset))); err == nil {
					defer bus.Close()
					ports[i] = port
				}
			}
			if try == 1000 {
				t.Fatalf("no free ports for a Redis Cluster: %v", err)
			}
		}
	}
	return ports
}

// clusterOK returns nil if a node serves its slots and is connected to the other running nodes.
func clusterOK(addr string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, DialerRetries: 1, ContextTimeoutEnabled: true})
	defer c.Close()
	info, err := c.ClusterInfo(ctx).Result()
	if err != nil {
		return err
	}
	if !strings.Contains(info, "cluster_state:ok") {
		return errors.New(info)
	}
	return nil
}

// Addrs returns the addresses of the masters.
func (c *RedisCluster) Addrs() (addrs []string) {
	for _, master := range c.Masters {
		addrs = append(addrs, master.Addr)
	}
	return addrs
}

// Slot returns the hash slot of a key. A master must be running.
func (c *RedisCluster) Slot(key string) int {
	c.t.Helper()
	var err error
	for i := range c.Masters {
		var slot int64
		if slot, err = with(c, i, func(ctx context.Context, rdb *redis.Client) (int64, error) {
			return rdb.ClusterKeySlot(ctx, key).Result()
		}); err == nil {
			return int(slot)
		}
	}
	c.t.Fatalf("CLUSTER KEYSLOT: %v", err)
	return 0
}

// MasterOf returns the index of the master that has the slot of a key.
func (c *RedisCluster) MasterOf(key string) int {
	c.t.Helper()
	slot := c.Slot(key)
	for i := range c.Masters {
		ranges, err := with(c, i, func(ctx context.Context, rdb *redis.Client) ([]any, error) {
			return rdb.Do(ctx, "CLUSTER", "SLOTS").Slice()
		})
		if err != nil {
			continue
		}
		for _, r := range ranges { // first slot, last slot, master: address, port, id
			r := r.([]any)
			if r[0].(int64) <= int64(slot) && int64(slot) <= r[1].(int64) {
				return slices.Index(c.ids[:], r[2].([]any)[2].(string))
			}
		}
	}
	c.t.Fatalf("no master has the slot %d of %s", slot, key)
	return 0
}

// Move moves the slot of a key, with all its keys, to a master. The functions in during are called while the slot is
// being moved: the old master redirects clients if it does not have a key, and the new master has none of the keys
// yet. All three masters must be running.
func (c *RedisCluster) Move(key string, to int, during ...func()) {
	c.t.Helper()
	from, slot := c.MasterOf(key), c.Slot(key)
	if from == to {
		return
	}
	host, port, _ := net.SplitHostPort(c.Masters[to].Addr)
	c.do(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", c.ids[from])
	c.do(from, "CLUSTER", "SETSLOT", slot, "MIGRATING", c.ids[to])
	for _, f := range during {
		f()
	}
	for {
		keys := c.do(from, "CLUSTER", "GETKEYSINSLOT", slot, 10).([]any)
		if len(keys) == 0 {
			break
		}
		c.do(from, append([]any{"MIGRATE", host, port, "", 0, 30_000, "KEYS"}, keys...)...)
	}
	// The new master is notified first. Otherwise the old master would redirect clients to a master that does not know
	// about the move.
	for _, i := range []int{to, from, 3 - to - from} {
		c.do(i, "CLUSTER", "SETSLOT", slot, "NODE", c.ids[to])
	}
}

func (c *RedisCluster) do(i int, args ...any) any {
	c.t.Helper()
	reply, err := with(c, i, func(ctx context.Context, rdb *redis.Client) (any, error) {
		return rdb.Do(ctx, args...).Result()
	})
	if err != nil {
		c.t.Fatalf("%v: %v", args, err)
	}
	return reply
}

// with calls f with a client of one master.
func with[T any](c *RedisCluster, i int, f func(context.Context, *redis.Client) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	rdb := redis.NewClient(&redis.Options{
		Addr: c.Masters[i].Addr, MaxRetries: -1, DialerRetries: 1, ReadTimeout: 30 * time.Second,
	})
	defer rdb.Close()
	return f(ctx, rdb)
}
