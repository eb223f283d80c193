package lease_test

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
)

// jobInterval is the interval of the job of TestJobOfFiveProcesses.
const jobInterval = 500 * time.Millisecond

// A clock is the store of a process whose clock is ahead. The instants of its runs are those of the other processes.
type clock struct {
	lease.Store
	offset time.Duration
	run    int64 // the last one that was requested
}

func (c *clock) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	rec, err := c.Store.Acquire(ctx, req)
	if rec.LastRun != 0 {
		rec.LastRun -= c.offset.Milliseconds()
	}
	return rec, err
}

func (c *clock) Renew(ctx context.Context, req lease.Request) error {
	if req.Run != 0 {
		req.Run += c.offset.Milliseconds()
		c.run = req.Run
	}
	return c.Store.Renew(ctx, req)
}

// job makes the runs of the schedule, and says which.
func (w *worker) job(ctx context.Context, cfg lease.Config) {
	store := &clock{Store: w.store, offset: w.Offset}
	local := schedule(func(t time.Time) time.Time {
		return lease.Interval(jobInterval).Next(t.Add(w.Offset)).Add(-w.Offset)
	})
	cfg.Poll = 50 * time.Millisecond
	_ = quiet(store, cfg).Every(ctx, local, func(context.Context, lease.Term) error {
		say("RUN %d", store.run)
		return nil
	})
}

// Five processes, whose clocks differ by up to 200 ms and whose renewals fail at times, are killed at random. No run is
// made twice.
func TestJobOfFiveProcesses(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, d database) { t.Parallel(); newLedger(t, d); runJob(t, d) })
	t.Run("redis", func(t *testing.T) { t.Parallel(); runJob(t, newRedisDatabase(t)) })
	t.Run("etcd", func(t *testing.T) { t.Parallel(); runJob(t, newEtcdDatabase(t)) })
	t.Run("kubernetes", func(t *testing.T) { t.Parallel(); runJob(t, newKubernetesDatabase(t)) })
}

func runJob(t *testing.T, d database) {
	all := make([]*process, 5)
	begin := func(p *process) { start(t, p, "UTC") }
	for i := range all {
		all[i] = &process{config: workerConfig{
			Number: i, Database: d, TTL: time.Second, Job: true, Offset: time.Duration(i) * 50 * time.Millisecond,
		}}
		begin(all[i])
	}
	defer func() {
		for _, p := range all {
			_ = p.end(syscall.SIGKILL)
		}
	}()
	runs := func() (made []int64) {
		for _, p := range all {
			for lines := bufio.NewScanner(strings.NewReader(p.stderr.String())); lines.Scan(); {
				var run int64
				if n, _ := fmt.Sscanf(lines.Text(), "RUN %d", &run); n == 1 {
					made = append(made, run)
				}
			}
		}
		return made
	}
	require.Eventually(t, func() bool { return len(runs()) > 0 }, time.Minute, 10*time.Millisecond, "no run")
	first, kills := runs()[0], 0
	for deadline := time.Now().Add(time.Minute); len(runs()) < 20; kills++ {
		require.True(t, time.Now().Before(deadline), "%d runs", len(runs()))
		time.Sleep(rand.N(800 * time.Millisecond))
		p := all[rand.N(len(all))]
		_ = p.end(syscall.SIGKILL)
		begin(p)
	}
	made := make(map[int64]bool)
	for _, run := range runs() {
		require.False(t, made[run], "the run of %d is made twice", run)
		require.Zero(t, run%jobInterval.Milliseconds())
		made[run] = true
	}
	due := (time.Now().UnixMilli() - first) / jobInterval.Milliseconds()
	t.Logf("%d instants, %d runs, some of them for several instants without a leader, none twice; %d kills",
		due, len(made), kills)
}
