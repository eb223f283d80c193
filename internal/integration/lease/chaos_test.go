package lease_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
)

var chaosHandovers = flag.Int("chaos.handovers", 25, "after how many terms TestChaos ends, on each database")

// TestChaos has three processes lead in turn that are killed, stopped past the TTL and
// continued, and cut off from the database: connections end, become half open and hang,
// and answers are late. The clocks of the processes and of their connections are hours
// apart. No two terms' fenced writes interleave, and no process believes that it leads
// when another's term has begun.
func TestChaos(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, d database) { t.Parallel(); newChaos(t, d, "").run() })
}

// TestChaosOfRedis is TestChaos with a server that is stopped, too, and with a resource that refuses
// lower epochs in place of the fence. No epoch is of two terms.
func TestChaosOfRedis(t *testing.T) {
	t.Parallel()
	newChaos(t, newRedisDatabase(t), "").run()
}

// TestChaosOfEtcd is TestChaos with a server that is stopped, too, and with writes in fenced transactions of etcd.
func TestChaosOfEtcd(t *testing.T) {
	t.Parallel()
	newChaos(t, newEtcdDatabase(t), "").run()
}

// TestChaosOfKubernetes is TestChaos with an API server that is stopped, too, and with an object that has the epoch of
// its last write in place of the fence. No epoch is of two terms.
func TestChaosOfKubernetes(t *testing.T) {
	t.Parallel()
	newChaos(t, newKubernetesDatabase(t), "").run()
}

// TestChaosOfClocks has the clock of the store be set, forward and back, beside the kills and stops.
// Set forward, it ends leases whose leaders do not know yet: what holds are fences and epochs.
func TestChaosOfClocks(t *testing.T) {
	t.Parallel()
	test := func(t *testing.T, d database) { t.Parallel(); newChaos(t, d, clocksAreSet).run() }
	onEach(t, test)
	t.Run("redis", func(t *testing.T) { test(t, newRedisDatabase(t)) })
}

// TestMutants shows that the chaos finds what is missing.
func TestMutants(t *testing.T) {
	t.Parallel()
	for _, m := range []mutant{withoutFence, ttlFromAnswer, processClock} {
		t.Run(string(m), func(t *testing.T) {
			t.Parallel()
			c := newChaos(t, newDatabase(t, "pgx"), m)
			for deadline := time.Now().Add(2 * time.Minute); ; {
				if found := c.violations(); len(found) > 0 {
					t.Logf("found in %d hand-overs: %s", c.kept.handovers(), found[0])
					return
				}
				require.True(t, time.Now().Before(deadline), "the chaos does not notice")
				c.trouble()
			}
		})
	}
}

// A chaos is a number of worker processes on one database, and what is done to them.
type chaos struct {
	t    *testing.T
	d    database
	kept ledger
	ttl  time.Duration
	mode mutant
	work []*process
	done map[string]int // troubles, by kind
}

// A process is a worker, with its own way to the database.
type process struct {
	config workerConfig
	proxy  *faultproxy.Proxy // nil: SQLite
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr *output
}

// zones are hours apart.
var zones = []struct{ name, offset string }{
	{"Pacific/Kiritimati", "+13:00"}, {"Etc/GMT+12", "-12:00"}, {"Asia/Kathmandu", "+05:45"},
}

func newChaos(t *testing.T, d database, m mutant) *chaos {
	c := &chaos{t: t, d: d, kept: newLedger(t, d), ttl: 500 * time.Millisecond, mode: m, done: make(map[string]int)}
	if d.Driver == "sqlite" || d.Driver == "etcd" || d.Driver == "kubernetes" {
		c.ttl = time.Second // one writer, perhaps a slow one; whole seconds
	}
	for i, zone := range zones {
		p := &process{config: workerConfig{Number: i, TTL: c.ttl, Mutant: m, Long: max(10, *chaosHandovers/100)}}
		if m == ttlFromAnswer {
			p.config.Long = 1 // only renewals have what it breaks
		}
		p.config.Database, p.proxy = proxied(t, d)
		switch d.Driver {
		case "pgx": // the server hears nothing of the end of a half-open connection
			p.config.Database = p.config.Database.with(t, "TimeZone", zone.name).
				with(t, "idle_in_transaction_session_timeout", fmt.Sprint((3 * c.ttl).Milliseconds()))
		case "mysql":
			p.config.Database = p.config.Database.with(t, "time_zone", "'"+zone.offset+"'").with(t, "wait_timeout", "2")
		}
		c.start(p)
		c.work = append(c.work, p)
	}
	t.Cleanup(func() {
		for _, p := range c.work {
			_ = p.end(syscall.SIGKILL)
		}
	})
	return c
}

// run makes trouble until there were enough terms.
func (c *chaos) run() {
	want := *chaosHandovers
	if c.ttl == time.Second { // the TTL is twice as long
		want /= 2
	}
	for c.kept.handovers() < want {
		c.trouble()
		require.Empty(c.t, c.violations())
	}
	c.finish()
}

// proxied returns d as it is reached through a new proxy.
func proxied(t testing.TB, d database) (database, *faultproxy.Proxy) {
	switch d.Driver {
	case "pgx":
		u, err := url.Parse(d.DSN)
		require.NoError(t, err)
		p := faultproxy.New(t, u.Host)
		u.Host = p.Addr()
		d.DSN = u.String()
		return d, p
	case "mysql":
		cfg, err := mysql.ParseDSN(d.DSN)
		require.NoError(t, err)
		p := faultproxy.New(t, cfg.Addr)
		cfg.Addr = p.Addr()
		d.DSN = cfg.FormatDSN()
		return d, p
	case "redis", "etcd", "kubernetes":
		p := faultproxy.New(t, d.DSN)
		d.DSN = p.Addr()
		return d, p
	}
	return d, nil
}

// output is what a process has written.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// start starts the process.
func (c *chaos) start(p *process) {
	start(c.t, p, zones[p.config.Number].name)
}

func start(t *testing.T, p *process, zone string) {
	text, err := json.Marshal(p.config)
	require.NoError(t, err)
	if p.stderr == nil {
		p.stderr = new(output)
	}
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), "LEASE_WORKER="+string(text), "TZ="+zone)
	p.cmd.Stderr = p.stderr
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
}

// end sends a signal and waits for the end of the process.
func (p *process) end(sig syscall.Signal) error {
	_ = p.cmd.Process.Signal(sig)
	_ = p.stdin.Close()
	return p.cmd.Wait()
}

// trouble does one of the things that make trouble, after a while.
func (c *chaos) trouble() {
	time.Sleep(rand.N(2 * c.ttl))
	kinds := []func(*process){c.kill, c.stop}
	switch {
	case c.mode == clocksAreSet:
		kinds = append(kinds, c.setClock, c.setClock)
	case c.d.Driver != "sqlite":
		kinds = append(kinds, c.endConns, c.reset, c.halfOpen, c.holdBack, c.delay, c.hang)
	}
	kinds[rand.N(len(kinds))](c.work[rand.N(len(c.work))])
}

// kill ends a process with no chance to do anything, and starts another.
func (c *chaos) kill(p *process) {
	c.done["kills"]++
	err := p.end(syscall.SIGKILL)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() > 0 {
		c.t.Fatalf("worker %d: %v\n%s", p.config.Number, err, p.stderr)
	}
	c.start(p)
}

// stop stops a process until its term is over. The others go on meanwhile.
func (c *chaos) stop(p *process) {
	c.done["stops"]++
	require.NoError(c.t, p.cmd.Process.Signal(syscall.SIGSTOP))
	time.Sleep(c.ttl + rand.N(c.ttl))
	require.NoError(c.t, p.cmd.Process.Signal(syscall.SIGCONT))
}

func (c *chaos) reset(p *process) { c.done["resets"]++; p.proxy.Reset() }

// halfOpen makes the connections of a process half open, until keepalives would find out.
func (c *chaos) halfOpen(p *process) {
	c.done["half-opens"]++
	time.AfterFunc(4*c.ttl, p.proxy.Cut(direction()))
}

// holdBack delivers all that a process sends, or is to hear, a while later.
func (c *chaos) holdBack(p *process) {
	c.done["hold-backs"]++
	p.proxy.Hold(direction())
	time.Sleep(rand.N(2 * c.ttl))
	p.proxy.Heal()
}

// delay makes the network slow for a while.
func (c *chaos) delay(p *process) {
	c.done["delays"]++
	p.proxy.Delay(direction(), func([]byte) time.Duration { return rand.N(c.ttl / 3) })
	time.Sleep(c.ttl + rand.N(2*c.ttl))
	p.proxy.Heal()
}

// hang has the server hang, for one process.
func (c *chaos) hang(p *process) {
	c.done["hangs"]++
	p.proxy.Hang()
	time.Sleep(rand.N(2 * c.ttl))
	p.proxy.Heal()
}

// endConns ends about half of the database's connections, or stops Redis, etcd or Kubernetes for a while.
func (c *chaos) endConns(*process) { c.done[c.kept.endConns(c.ttl)]++ }

// setClock sets the clock of the store, for the lease, by up to two TTLs.
func (c *chaos) setClock(*process) {
	c.done["clocks set"]++
	c.kept.setClock(rand.N(4*c.ttl) - 2*c.ttl)
}

func direction() faultproxy.Direction { return faultproxy.Direction(1 + rand.N(int(faultproxy.Both))) }

// violations returns what must not be.
func (c *chaos) violations() (found []string) {
	for _, p := range c.work {
		out := p.stderr.String()
		if _, what, ok := strings.Cut(out, "VIOLATION "); ok {
			found = append(found, strings.SplitN(what, "\n", 2)[0])
		}
		require.NotContains(c.t, out, "DATA RACE", out)
		require.NotContains(c.t, out, "panic:", out)
	}
	if what := c.kept.forbidden(); what != "" {
		found = append(found, what)
	}
	return found
}

// finish ends the workers, undisturbed, and looks a last time.
func (c *chaos) finish() {
	for _, p := range c.work {
		if p.proxy != nil {
			p.proxy.Heal()
		}
	}
	before := c.kept.handovers()
	again := func() bool { return c.kept.handovers() > before+5 }
	require.Eventually(c.t, again, time.Minute, 10*time.Millisecond, "no process leads")
	fenced := 0
	for _, p := range c.work {
		require.NoError(c.t, p.end(syscall.Signal(0)), p.stderr)
		fenced += strings.Count(p.stderr.String(), "FENCED")
	}
	require.Empty(c.t, c.violations())
	c.work = nil
	c.t.Logf("%d hand-overs, %d fenced writes, %d refused; %v; 0 interleaved, 0 overlaps",
		c.kept.handovers(), c.kept.writes(), fenced, c.done)
}
