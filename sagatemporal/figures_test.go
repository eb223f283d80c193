package sagatemporal_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/sagatemporal"
)

var measured = flag.Int("measure", 0, "the number of sagas that TestServerFigures runs at once; 0 skips it")

var plainActivity = activity.RegisterOptions{Name: "plain"}

// cpu returns the CPU time of a process. The clock ticks of Linux are 10ms.
func cpu(t *testing.T, pid int) time.Duration {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+2:]))
	user, err := strconv.Atoi(fields[11])
	require.NoError(t, err)
	system, err := strconv.Atoi(fields[12])
	require.NoError(t, err)
	return time.Duration(user+system) * 10 * time.Millisecond
}

func ownCPU() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// TestServerFigures measures sagas of three steps, and beside them a workflow with three activities.
func TestServerFigures(t *testing.T) {
	c := server(t)
	if *measured == 0 {
		t.Skip("-measure is 0")
	}
	queue := unique("figures")
	w := worker.New(c, queue, worker.Options{})
	h := saga.Register(sagatemporal.New(c, w, queue), define(step("flight"), step("hotel"), step("charge")))
	w.RegisterActivityWithOptions(func(context.Context) error { return nil }, plainActivity)
	w.RegisterWorkflowWithOptions(func(ctx workflow.Context) error {
		ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
			StartToCloseTimeout: time.Minute, RetryPolicy: &temporal.RetryPolicy{MaximumAttempts: 1},
		})
		for range 3 {
			if err := workflow.ExecuteActivity(ctx, plainActivity.Name).Get(ctx, nil); err != nil {
				return err
			}
		}
		return nil
	}, workflow.RegisterOptions{Name: "plain"})
	require.NoError(t, w.Start())
	defer w.Stop()
	for _, kind := range []struct {
		name string
		run  func(id string)
	}{
		{"saga", func(id string) {
			_, err := h.Start(t.Context(), id, trip{})
			if err == nil {
				_, err = h.Result(t.Context(), id)
			}
			if err != nil {
				t.Error(err)
			}
		}},
		{"workflow", func(id string) {
			run, err := c.ExecuteWorkflow(t.Context(), client.StartWorkflowOptions{ID: id, TaskQueue: queue}, "plain")
			if err == nil {
				err = run.Get(t.Context(), nil)
			}
			if err != nil {
				t.Error(err)
			}
		}},
	} {
		kind.run(queue + kind.name)
		events, bytes := history(t, c, queue+kind.name, "")
		t.Logf("%s: %d events, %d bytes", kind.name, len(events), bytes)
		var latencies []time.Duration
		for i := range 100 {
			began := time.Now()
			kind.run(fmt.Sprint(queue, kind.name, "-one-", i))
			latencies = append(latencies, time.Since(began))
		}
		slices.Sort(latencies)
		t.Logf("%s: one at a time: median %v, 95%% %v", kind.name, latencies[50], latencies[95])
		began, server, own := time.Now(), cpu(t, serverPID), ownCPU()
		var all sync.WaitGroup
		const concurrent = 32
		for n := range concurrent {
			all.Go(func() {
				for i := n; i < *measured; i += concurrent {
					kind.run(fmt.Sprint(queue, kind.name, "-many-", i))
				}
			})
		}
		all.Wait()
		n := time.Duration(*measured)
		t.Logf("%s: %d at a time: %.0f per second; CPU of the server %v, of the worker and its client %v each",
			kind.name, concurrent, float64(n)/time.Since(began).Seconds(), (cpu(t, serverPID)-server)/n, (ownCPU()-own)/n)
	}
	t.Logf("memory of the server: %s", memory(t, serverPID))
	began, server := time.Now(), cpu(t, serverPID)
	time.Sleep(10 * time.Second)
	t.Logf("idle: CPU of the server %v per second", (cpu(t, serverPID)-server)/time.Duration(time.Since(began).Seconds()))
}

func memory(t *testing.T, pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(data), "VmRSS:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}
