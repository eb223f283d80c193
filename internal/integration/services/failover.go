package services

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// NewFailoverCluster starts a Redis Cluster of three masters and three replicas on free ports. If a master cannot be
// reached for nodeTimeout, its replica takes over a few hundred milliseconds later.
func NewFailoverCluster(t testing.TB, nodeTimeout time.Duration) []*RedisServer {
	t.Helper()
	needRedisServer(t)
	if _, err := exec.LookPath("redis-cli"); err != nil {
		missing(t, "the program redis-cli", err)
	}
	ports, more := clusterPorts(t), clusterPorts(t)
	var nodes []*RedisServer
	args := []string{"--cluster", "create"}
	for _, port := range append(ports[:], more[:]...) {
		s := &RedisServer{
			Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), t: t, dir: t.TempDir(), ready: ping,
			args: []string{"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
				"--cluster-require-full-coverage", "no",
				"--cluster-node-timeout", strconv.FormatInt(nodeTimeout.Milliseconds(), 10)},
		}
		t.Cleanup(s.Kill)
		s.Start()
		nodes, args = append(nodes, s), append(args, s.Addr)
	}
	out, err := exec.Command("redis-cli", append(args, "--cluster-replicas", "1", "--cluster-yes")...).CombinedOutput()
	if err != nil {
		t.Fatalf("redis-cli: %v\n%s", err, out)
	}
	await(t, "the replicas of a cluster", func() bool {
		for _, s := range nodes {
			if clusterOK(s.Addr) != nil || strings.Contains(replication(s.Addr), "master_link_status:down") {
				return false
			}
		}
		return true
	})
	return nodes
}

// NewSentinels starts a Redis server, a replica, and three Sentinels that watch them under the name "m". If the
// primary cannot be reached for downAfter, the replica takes over.
func NewSentinels(t testing.TB, downAfter time.Duration) (primary *RedisServer, sentinels []string) {
	t.Helper()
	primary = NewRedis(t)
	host, port, _ := net.SplitHostPort(primary.Addr)
	replica := NewRedis(t, "--replicaof", host+" "+port, "--repl-diskless-sync-delay", "0")
	await(t, "a replica", func() bool { return strings.Contains(replication(replica.Addr), "master_link_status:up") })
	for range 3 {
		s := &RedisServer{Addr: FreeAddr(t), t: t, dir: t.TempDir(), ready: ping}
		_, own, _ := net.SplitHostPort(s.Addr)
		conf := filepath.Join(s.dir, "sentinel.conf")
		text := fmt.Sprintf(`port %s
bind 127.0.0.1
dir %s
sentinel monitor m %s %s 2
sentinel down-after-milliseconds m %d
sentinel failover-timeout m 5000
sentinel parallel-syncs m 1
`, own, s.dir, host, port, downAfter.Milliseconds())
		if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s.sentinel = conf
		t.Cleanup(s.Kill)
		s.Start()
		sentinels = append(sentinels, s.Addr)
	}
	await(t, "the sentinels", func() bool {
		for _, addr := range sentinels {
			c := redis.NewSentinelClient(&redis.Options{Addr: addr})
			m, err := c.Master(context.Background(), "m").Result()
			_ = c.Close()
			if err != nil || m["num-other-sentinels"] != "2" || m["num-slaves"] != "1" {
				return false
			}
		}
		return true
	})
	return primary, sentinels
}

// replication returns the replication section of a Redis server's INFO.
func replication(addr string) string {
	c := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, DialerRetries: 1})
	defer c.Close()
	return c.Info(context.Background(), "replication").Val()
}

// await waits until ready returns true.
func await(t testing.TB, what string, ready func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if ready() {
			return
		}
	}
	t.Fatalf("%s are not ready after a minute", what)
}
