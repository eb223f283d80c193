// Package etcd runs etcd clusters for tests. Each member of a cluster is a process, which a test can stop and kill.
package etcd

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"google.golang.org/grpc/grpclog"

	"github.com/go-resilience/resilience/internal/integration/services"
)

const env = "INTEGRATION_ETCD_MEMBER"

// A member is the configuration of one process.
type member struct{ Name, Dir, Client, Peer, Cluster string }

// Main runs a member and does not return if a Cluster has started the process. Otherwise it does nothing. TestMain
// must call Main first.
func Main() {
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
	text := os.Getenv(env)
	if text == "" {
		return
	}
	var m member
	if err := json.Unmarshal([]byte(text), &m); err != nil {
		panic(err)
	}
	at := func(addr string) []url.URL { return []url.URL{{Scheme: "http", Host: addr}} }
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = m.Name, m.Dir, "fatal", true
	cfg.TickMs, cfg.ElectionMs = 50, 500 // with these values, the minimum TTL is 1 second
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = at(m.Client), at(m.Client)
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = at(m.Peer), at(m.Peer)
	cfg.InitialCluster = m.Cluster
	if _, err := embed.StartEtcd(cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // blocks until the test ends
	os.Exit(0)
}

// A Cluster is an etcd cluster that belongs to one test.
type Cluster struct {
	Addrs []string // addresses of the members, for clients

	t       testing.TB
	members []member
	mu      sync.Mutex
	cmds    []*exec.Cmd
}

// New starts a cluster of n members and waits until it can be used. The cluster ends with the test.
func New(t testing.TB, n int) *Cluster {
	t.Helper()
	c := &Cluster{t: t, cmds: make([]*exec.Cmd, n)}
	var all []string
	for i := range n {
		m := member{Name: fmt.Sprint("m", i), Dir: t.TempDir(), Client: services.FreeAddr(t), Peer: services.FreeAddr(t)}
		c.members = append(c.members, m)
		c.Addrs = append(c.Addrs, m.Client)
		all = append(all, m.Name+"=http://"+m.Peer)
	}
	for i := range c.members {
		c.members[i].Cluster = strings.Join(all, ",")
		t.Cleanup(func() { c.Kill(i) })
		c.Start(i)
	}
	client := Client(t, c.Addrs...)
	require.Eventually(t, func() bool {
		_, err := client.Get(t.Context(), "ready")
		return err == nil
	}, time.Minute, 10*time.Millisecond, "etcd does not start")
	return c
}

// Client returns a client that is closed when the test ends.
func Client(t testing.TB, addrs ...string) *clientv3.Client {
	t.Helper()
	client, err := Connect(addrs...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// Connect returns a client without keepalive: tests must pass even if the client does not notice that a member hangs.
func Connect(addrs ...string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: addrs, DialTimeout: time.Second, Logger: zap.NewNop()})
}

// Start starts a member.
func (c *Cluster) Start(i int) {
	text, err := json.Marshal(c.members[i])
	require.NoError(c.t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), env+"="+string(text))
	cmd.Stderr = os.Stderr
	_, err = cmd.StdinPipe() // the pipe is closed when this process ends
	require.NoError(c.t, err)
	require.NoError(c.t, cmd.Start())
	c.mu.Lock()
	c.cmds[i] = cmd
	c.mu.Unlock()
}

// Kill kills a member. The member loses no data that it has written.
func (c *Cluster) Kill(i int) {
	c.mu.Lock()
	cmd := c.cmds[i]
	c.cmds[i] = nil
	c.mu.Unlock()
	if cmd != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// Pause stops all members, or the given members, until Resume is called.
func (c *Cluster) Pause(which ...int) { c.signal(syscall.SIGSTOP, which) }

// Resume continues all members, or the given members.
func (c *Cluster) Resume(which ...int) { c.signal(syscall.SIGCONT, which) }

func (c *Cluster) signal(sig syscall.Signal, which []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, cmd := range c.cmds {
		if cmd == nil || len(which) > 0 && !slices.Contains(which, i) {
			continue
		}
		_ = cmd.Process.Signal(sig)
	}
}
