package saga_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

var chaosSagas = flag.Int("chaos.sagas", 1000, "how many sagas TestChaos runs")

// TestChaos runs sagas on three processes that are killed, stopped and cut off
// from the database all the time: its connections end or become half open, the
// server hangs, and COMMITs arrive after their sender has given them up. The
// participant refuses, fails, loses replies and acts late. Every saga ends, with
// each effect once or not at all.
func TestChaos(t *testing.T) {
	chaosOn(t, newDatabase(t, sqlstore.PostgreSQL), *chaosSagas)
}

// TestChaosOnMySQL is TestChaos, with fewer sagas.
func TestChaosOnMySQL(t *testing.T) { chaosOn(t, newDatabase(t, sqlstore.MySQL), *chaosSagas/4) }

func chaosOn(t *testing.T, d database, sagas int) {
	c := newChaos(t, d, 3, sagas)
	c.start()
	troubles := []func(*worker){c.kill, c.stop, c.endBackends, c.reset, c.halfOpen, c.holdBack, c.hang}
	for !c.allStarted() {
		c.trouble(troubles...)
		require.Empty(t, c.violations())
	}
	for range 5 {
		c.trouble(troubles...)
	}
	c.finish()
}

// TestChaosOfTwoProcessesOnOneFile has two processes share a SQLite file and be killed.
func TestChaosOfTwoProcessesOnOneFile(t *testing.T) {
	c := newChaos(t, newDatabase(t, sqlstore.SQLite), 2, *chaosSagas/10)
	c.config.LeaseTTL = 3 * time.Second // one writer, perhaps a slow one
	c.start()
	for !c.allStarted() {
		c.trouble(c.kill)
	}
	c.finish()
}

// TestMutants shows that TestChaos fails without each of the rules: the fence,
// the nonce, the barrier, and the undoing of steps in doubt.
func TestMutants(t *testing.T) {
	for _, m := range []mutant{withoutFence, withoutNonce, withoutBarrier, withoutDoubt} {
		t.Run(string(m), func(t *testing.T) {
			c := newChaos(t, newDatabase(t, sqlstore.PostgreSQL), 2, 1_000_000)
			c.config.Mutant = m
			c.config.Faults.Refuse, c.config.Faults.Late, c.config.Faults.LoseReply = 0.15, 0.15, 0.1
			c.config.Faults.Stall = 0.01
			if m == withoutNonce {
				c.config.Faults = faults{LateCommit: 0.3} // other faults would hide the mutant
			}
			c.start()
			for deadline := time.Now().Add(3 * time.Minute); ; {
				if found := c.violations(); len(found) > 0 {
					t.Logf("found in %d sagas: %s", c.count(`SELECT count(*) FROM saga`), found[0])
					return
				}
				require.True(t, time.Now().Before(deadline), "the chaos does not notice")
				time.Sleep(200 * time.Millisecond)
			}
		})
	}
}

// A chaos is a number of worker processes on one database, and the troubles that
// befall them.
type chaos struct {
	t      *testing.T
	config workerConfig
	db     *sql.DB
	runner *saga.Runner // reads, and runs nothing

	workers []*worker
	done    map[string]int // troubles, by kind
}

func newChaos(t *testing.T, d database, workers, sagas int) *chaos {
	c := &chaos{t: t, db: d.open(t), done: make(map[string]int), config: workerConfig{
		Database: d, Workers: workers, Sagas: sagas, LeaseTTL: time.Second,
		// On a slow machine a saga may make no progress between many kills, and is
		// not poisoned: a saga that never does so fails the test by its deadline.
		Takeovers: -1,
		Faults: faults{Refuse: 0.03, Fail: 0.05, LoseReply: 0.06, Late: 0.03, Stall: 0.001, LoseCommit: 0.02,
			LateCommit: 0.05},
	}}
	// A start every 15 ms, or faster if there are very many.
	c.config.Every = time.Duration(workers) * min(15*time.Millisecond,
		max(4*time.Millisecond, 200*time.Second/time.Duration(sagas)))
	for _, table := range []string{effectTable, appliedTable} {
		_, err := c.db.Exec(table)
		require.NoError(t, err)
	}
	store := sqlstore.New(c.db, d.Dialect, sqlstore.Config{})
	c.runner = saga.NewRunner(store, saga.RunnerConfig{})
	saga.Register(c.runner, chaosSaga(&participant{}))
	return c
}

func (c *chaos) start() {
	for i := range c.config.Workers {
		store := c.config.Database
		var proxy *faultproxy.Proxy
		if store.Dialect != sqlstore.SQLite {
			store, proxy = proxied(c.t, store)
			// The server hears nothing of the end of a half-open connection.
			if store.Dialect == sqlstore.MySQL {
				store = store.with(c.t, "wait_timeout", max(1, int(3*c.config.LeaseTTL.Seconds())))
			} else {
				store = store.with(c.t, "idle_in_transaction_session_timeout", (3 * c.config.LeaseTTL).Milliseconds())
			}
		}
		w := &worker{number: i, store: store, proxy: proxy}
		c.run(w)
		c.calm(w)
		c.workers = append(c.workers, w)
	}
	c.t.Cleanup(func() {
		for _, w := range c.workers {
			w.end(syscall.SIGKILL)
		}
	})
}

// A worker is one process, with its own way to the database.
type worker struct {
	number int
	store  database
	proxy  *faultproxy.Proxy // nil: SQLite
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr *bytes.Buffer
}

// run starts the process.
func (c *chaos) run(w *worker) {
	config := c.config
	config.Number, config.Store = w.number, w.store
	text, err := json.Marshal(config)
	require.NoError(c.t, err)
	w.stderr, w.cmd = new(bytes.Buffer), exec.Command(os.Args[0])
	w.cmd.Env = append(os.Environ(), "SAGA_WORKER="+string(text))
	w.cmd.Stderr = w.stderr
	w.stdin, err = w.cmd.StdinPipe()
	require.NoError(c.t, err)
	require.NoError(c.t, w.cmd.Start())
}

// calm ends what a trouble has done to the network, which is bad enough without:
// some COMMITs, and a few other messages, are late.
func (c *chaos) calm(w *worker) {
	if w.proxy == nil {
		return
	}
	w.proxy.Heal()
	late, lease := c.config.Faults.LateCommit, c.config.LeaseTTL
	w.proxy.Delay(faultproxy.ToServer, func(data []byte) time.Duration {
		switch {
		case isCommit(data) && chance(late):
			return lease/4 + rand.N(lease) // its sender has given up, and perhaps lost the saga
		case chance(late / 50):
			return rand.N(2 * lease)
		}
		return 0
	})
}

// end sends a signal and waits for the end of the process.
func (w *worker) end(sig syscall.Signal) error {
	_ = w.cmd.Process.Signal(sig)
	_ = w.stdin.Close()
	return w.cmd.Wait()
}

// trouble causes a random trouble after a while.
func (c *chaos) trouble(kinds ...func(*worker)) {
	time.Sleep(rand.N(c.config.LeaseTTL))
	kinds[rand.N(len(kinds))](c.workers[rand.N(len(c.workers))])
}

// aWhile returns a time that is shorter or longer than a lease.
func (c *chaos) aWhile() { time.Sleep(rand.N(2 * c.config.LeaseTTL)) }

// kill ends a process with no chance to do anything, and starts another.
func (c *chaos) kill(w *worker) {
	c.done["kills"]++
	err := w.end(syscall.SIGKILL)
	c.mustHaveLived(w, err)
	c.run(w)
}

// stop stops a process until its leases are over. The others go on meanwhile.
func (c *chaos) stop(w *worker) {
	c.done["stops"]++
	require.NoError(c.t, w.cmd.Process.Signal(syscall.SIGSTOP))
	time.Sleep(c.config.LeaseTTL + rand.N(c.config.LeaseTTL))
	require.NoError(c.t, w.cmd.Process.Signal(syscall.SIGCONT))
}

// reset ends the connections of a process.
func (c *chaos) reset(w *worker) {
	c.done["resets"]++
	w.proxy.Reset()
}

// halfOpen makes the connections of a process half open, until keepalives would
// find out.
func (c *chaos) halfOpen(w *worker) {
	c.done["half-opens"]++
	time.AfterFunc(4*c.config.LeaseTTL, w.proxy.Cut(direction()))
}

// holdBack delivers all that a process sends, or is to hear, a while later.
func (c *chaos) holdBack(w *worker) {
	c.done["hold-backs"]++
	w.proxy.Hold(direction())
	c.aWhile()
	c.calm(w)
}

// hang makes the server hang for one process.
func (c *chaos) hang(w *worker) {
	c.done["hangs"]++
	w.proxy.Hang()
	c.aWhile()
	c.calm(w)
}

func direction() faultproxy.Direction { return faultproxy.Direction(1 + rand.N(int(faultproxy.Both))) }

// endBackends ends about half of the database's connections.
func (c *chaos) endBackends(*worker) {
	c.done["backends ended"]++
	if c.config.Database.Dialect == sqlstore.MySQL {
		_, _ = killConnections(c.db, c.config.Database.Name, 0.5)
		return
	}
	_, err := c.db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE pid <> pg_backend_pid() AND random() < 0.5 AND application_name = $1`, c.config.Database.Name)
	if err != nil {
		c.t.Log("cut: ", err) // its own, perhaps
	}
}

// mustHaveLived fails the test if a worker had ended by itself.
func (c *chaos) mustHaveLived(w *worker, err error) {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 {
		c.t.Fatalf("worker %d: %v\n%s", w.number, err, tail(w.stderr.String()))
	}
}

func tail(s string) string { return s[max(0, len(s)-8000):] }

func (c *chaos) count(query string) (n int) {
	require.NoError(c.t, retry(func() error { return c.db.QueryRow(query).Scan(&n) }))
	return n
}

// retry is for the test's own connections, which are cut too.
func retry(fn func() error) (err error) {
	for range 10 {
		if err = fn(); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

func (c *chaos) allStarted() bool { return c.count(`SELECT count(*) FROM saga`) >= c.config.Sagas }

// finish waits for the end of all sagas, undisturbed, and checks them.
func (c *chaos) finish() {
	t := c.t
	for _, w := range c.workers {
		if w.proxy != nil {
			w.proxy.Heal()
		}
	}
	deadline := time.Now().Add(5 * time.Minute)
	for {
		n := c.count(`SELECT count(*) FROM saga WHERE status IN ('completed', 'compensated', 'stuck', 'abandoned')`)
		if n == c.config.Sagas {
			break
		}
		require.True(t, time.Now().Before(deadline), "%d of %d sagas have ended", n, c.config.Sagas)
		time.Sleep(50 * time.Millisecond)
	}
	for _, w := range c.workers {
		err := w.end(syscall.Signal(0))
		require.NoError(t, err, "worker %d\n%s", w.number, tail(w.stderr.String()))
		require.NotContains(t, w.stderr.String(), "DATA RACE", tail(w.stderr.String()))
	}
	c.workers = nil
	require.Empty(t, c.violations())
	ends := make(map[string]int)
	for _, status := range []saga.Status{saga.Completed, saga.Compensated, saga.Stuck, saga.Running} {
		ends[string(status)] = c.count(`SELECT count(*) FROM saga WHERE status = '` + string(status) + `'`)
	}
	require.Equal(t, c.config.Sagas, ends["completed"]+ends["compensated"])
	require.NotZero(t, ends["completed"])
	require.NotZero(t, ends["compensated"])
	t.Logf("%d sagas: %d completed, %d compensated, %d stuck; %v, %d takeovers; 0 effects twice, 0 gaps",
		c.config.Sagas, ends["completed"], ends["compensated"], ends["stuck"], c.done,
		c.count(`SELECT count(*) FROM saga_log WHERE event = 'taken_over'`))
}

// violations returns the broken rules of all sagas in the database.
func (c *chaos) violations() []string {
	effects := make(map[string]map[string]net) // by saga and step
	var found []string
	report := func(id, format string, args ...any) {
		found = append(found, id+": "+fmt.Sprintf(format, args...))
	}
	ctx := context.Background()
	var all []*saga.Instance
	for after, more := "", true; more; {
		var page []*saga.Instance
		var next string
		require.NoError(c.t, retry(func() (err error) {
			page, next, err = c.runner.List(ctx, saga.Filter{After: after, Limit: 1000})
			return err
		}))
		after, more, all = next, next != "", append(all, page...)
	}
	slices.SortFunc(all, func(a, b *saga.Instance) int { return strings.Compare(a.ID, b.ID) })
	for page := range slices.Chunk(all, 1000) {
		// Read after the records: the log of an ended saga does not change.
		from, to := page[0].ID, page[len(page)-1].ID
		require.NoError(c.t, retry(func() error { return c.readEffects(from, to, effects, report) }))
		logs := make(map[string][]saga.Entry)
		require.NoError(c.t, retry(func() error { return c.readLogs(from, to, logs) }))
		for _, in := range page {
			checkLog(in, logs[in.ID], report)
			if in.Status.Ended() {
				checkEffects(in, effects[in.ID], report)
			}
		}
	}
	return found
}

func (c *chaos) readEffects(from, to string, effects map[string]map[string]net, report func(id, format string, args ...any)) error {
	rows, err := c.db.Query(c.config.Database.sql(`SELECT saga_id, step, done, undone, quoted FROM effect WHERE saga_id BETWEEN $1 AND $2`), from, to)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var id, step, quoted string
		var done, undone int
		if err := rows.Scan(&id, &step, &done, &undone, &quoted); err != nil {
			return err
		}
		if done > 1 || undone > done {
			report(id, "step %s was done %d times and undone %d times", step, done, undone)
		}
		if effects[id] == nil {
			effects[id] = make(map[string]net)
		}
		effects[id][step] = net{done - undone, quoted}
	}
	return rows.Err()
}

func (c *chaos) readLogs(from, to string, logs map[string][]saga.Entry) error {
	clear(logs)
	rows, err := c.db.Query(c.config.Database.sql(`SELECT saga_id, seq, step, op, event, epoch, error FROM saga_log WHERE saga_id BETWEEN $1 AND $2 ORDER BY saga_id, seq`), from, to)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var id string
		var e saga.Entry
		if err := rows.Scan(&id, &e.Seq, &e.Step, &e.Op, &e.Kind, &e.Epoch, &e.Error); err != nil {
			return err
		}
		logs[id] = append(logs[id], e)
	}
	return rows.Err()
}

// net is the net effect of a step, and what quote and rate had said when it was asked for.
type net struct {
	n      int
	quoted string
}

// checkLog checks that the entries of a log are consistent.
func checkLog(in *saga.Instance, log []saga.Entry, report func(id, format string, args ...any)) {
	var back, ended bool
	seen := make(map[string]bool)
	epoch := int64(0)
	for i, e := range log {
		switch {
		case e.Seq != int64(i+1):
			report(in.ID, "log: entry %d has seq %d", i+1, e.Seq)
		case e.Epoch < epoch:
			report(in.ID, "log: epoch %d after %d", e.Epoch, epoch)
		case ended:
			report(in.ID, "log: %s %s after the end", e.Kind, e.Step)
		case back && e.Op == saga.OpDo:
			report(in.ID, "log: %s %s after it has turned back", e.Kind, e.Step)
		}
		epoch = e.Epoch
		switch e.Kind {
		case saga.EventTurnedBack:
			back = true
		case saga.EventCompleted, saga.EventCompensated:
			ended = true
		case saga.EventStuck:
			report(in.ID, "stuck: %s", e.Error)
		case saga.EventStepDone, saga.EventStepUndone:
			if seen[e.Step+string(e.Kind)] {
				report(in.ID, "log: %s %s twice", e.Step, e.Kind)
			}
			seen[e.Step+string(e.Kind)] = true
		}
	}
	if in.Status.Ended() && in.Seq != int64(len(log)) {
		report(in.ID, "log: %d entries, and the record's seq is %d", len(log), in.Seq)
	}
}

// checkEffects checks that the effects are those of the record.
func checkEffects(in *saga.Instance, effects map[string]net, report func(id, format string, args ...any)) {
	var state chaosTrip
	if err := json.Unmarshal(in.State, &state); err != nil {
		report(in.ID, "%v", err)
	}
	want := []string{}
	for _, u := range in.Steps {
		if u.Status == saga.StepDone && u.Name != "quote" && u.Name != "rate" { // which have no effect
			want = append(want, u.Name)
		}
	}
	got := []string{}
	for step, e := range effects {
		if e.n != 0 {
			got = append(got, step)
		}
		said := state.Quote + state.Rate
		if step == "account" {
			said = state.Account
		}
		if (step != "account" || e.n != 0) && (e.quoted != said || said == "") {
			report(in.ID, "%s was asked for with %q, and the record says %q", step, e.quoted, said)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(want, got) {
		report(in.ID, "%s, steps %v are done and %v are in effect", in.Status, want, got)
	}
	if in.Status == saga.Compensated && len(want) > 0 {
		report(in.ID, "compensated, and %v are done", want)
	}
	if in.Status == saga.Completed && strings.Join(want, " ") != "account car charge hotel ticket" {
		report(in.ID, "completed, and only %v are done", want)
	}
}
