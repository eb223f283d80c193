package lease_test

import (
	"bytes"
	"database/sql"
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
	onEach(t, func(t *testing.T, d database) {
		t.Parallel()
		c := newChaos(t, d, "")
		want := *chaosHandovers
		if d.Driver == "sqlite" { // whose TTL is twice as long here
			want /= 2
		}
		for c.handovers() < want {
			c.trouble()
			require.Empty(t, c.violations())
		}
		c.finish()
	})
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
					t.Logf("found in %d hand-overs: %s", c.handovers(), found[0])
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
	db   *sql.DB
	ttl  time.Duration
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
var zones = []struct{ name, offset string }{{"Pacific/Kiritimati", "+13:00"}, {"Etc/GMT+12", "-12:00"}, {"Asia/Kathmandu", "+05:45"}}

func newChaos(t *testing.T, d database, m mutant) *chaos {
	c := &chaos{t: t, d: d, db: d.open(t), ttl: 500 * time.Millisecond, done: make(map[string]int)}
	if d.Driver == "sqlite" {
		c.ttl = time.Second // one writer, perhaps a slow one
	}
	_, err := d.store(t.Context(), c.db)
	require.NoError(t, err)
	for _, statement := range []string{
		"CREATE TABLE chaos_counter (n bigint NOT NULL)", "INSERT INTO chaos_counter VALUES (0)",
		"CREATE TABLE chaos_write (n bigint PRIMARY KEY, epoch bigint NOT NULL)",
	} {
		_, err := c.db.Exec(statement)
		require.NoError(t, err)
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
		c.run(p)
		c.work = append(c.work, p)
	}
	t.Cleanup(func() {
		for _, p := range c.work {
			_ = p.end(syscall.SIGKILL)
		}
	})
	return c
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

// run starts the process.
func (c *chaos) run(p *process) {
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
	if c.d.Driver != "sqlite" {
		kinds = append(kinds, c.endBackends, c.reset, c.halfOpen, c.holdBack, c.delay, c.hang)
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
	c.run(p)
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

// endBackends ends about half of the database's connections.
func (c *chaos) endBackends(*process) {
	c.done["backends ended"]++
	if c.d.Driver == "pgx" {
		u, _ := url.Parse(c.d.DSN)
		_, _ = c.db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE pid <> pg_backend_pid() AND random() < 0.5 AND application_name = $1`, u.Query().Get("application_name"))
		return
	}
	rows, err := c.db.Query(`SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id() AND rand() < 0.5`)
	if err != nil {
		return
	}
	defer rows.Close()
	var ids []int64
	for rows.Next() {
		var id int64
		if rows.Scan(&id) == nil {
			ids = append(ids, id)
		}
	}
	for _, id := range ids {
		_, _ = c.db.Exec(fmt.Sprint("KILL ", id))
	}
}

func direction() faultproxy.Direction { return faultproxy.Direction(1 + rand.N(int(faultproxy.Both))) }

// count is a query of the test's own connections, which are ended too.
func (c *chaos) count(query string) (n int) {
	var err error
	for range 20 {
		if err = c.db.QueryRow(query).Scan(&n); err == nil {
			return n
		}
		time.Sleep(20 * time.Millisecond)
	}
	require.NoError(c.t, err)
	return 0
}

// handovers returns how many terms have written.
func (c *chaos) handovers() int { return c.count("SELECT count(DISTINCT epoch) FROM chaos_write") }

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
	// In the order of commits: a write after one of a later term.
	if n := c.count(`SELECT count(*) FROM (SELECT epoch, max(epoch) OVER (ORDER BY n) AS latest FROM chaos_write) AS w WHERE epoch < latest`); n > 0 {
		found = append(found, fmt.Sprint(n, " writes of a term after one of a later term"))
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
	before := c.handovers()
	require.Eventually(c.t, func() bool { return c.handovers() > before+5 }, time.Minute, 10*time.Millisecond, "nobody leads")
	fenced := 0
	for _, p := range c.work {
		require.NoError(c.t, p.end(syscall.Signal(0)), p.stderr)
		fenced += strings.Count(p.stderr.String(), "FENCED")
	}
	require.Empty(c.t, c.violations())
	c.work = nil
	c.t.Logf("%d hand-overs, %d fenced writes, %d refused by the fence; %v; 0 interleaved, 0 overlaps",
		c.handovers(), c.count("SELECT count(*) FROM chaos_write"), fenced, c.done)
}
