package sagatemporal_test

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	enumspb "go.temporal.io/api/enums/v1"
	historypb "go.temporal.io/api/history/v1"
	"go.temporal.io/api/operatorservice/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/enginetest"
	"github.com/go-resilience/resilience/sagatemporal"
)

// The tests of this file need a server: TEMPORAL_SERVER is the program that make engines builds, or TEMPORAL_ADDRESS
// and TEMPORAL_NAMESPACE are those of one that runs.

var (
	serverPID   int
	serverInput io.Closer // the server runs until this one is closed, or lost
)

var theServer = sync.OnceValues(func() (address, namespace string) {
	if a := os.Getenv("TEMPORAL_ADDRESS"); a != "" {
		return a, cmp.Or(os.Getenv("TEMPORAL_NAMESPACE"), "default")
	}
	program := os.Getenv("TEMPORAL_SERVER")
	if program == "" {
		return "", ""
	}
	cmd := exec.Command(program)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err == nil {
		err = cmp.Or(err2, cmd.Start())
	}
	if err != nil {
		panic(err)
	}
	serverInput, serverPID = in, cmd.Process.Pid
	_, _ = fmt.Fscan(bufio.NewReader(out), &address, &namespace)
	return address, namespace
})

func dial(address, namespace string) (client.Client, error) {
	return client.Dial(client.Options{
		HostPort: address, Namespace: namespace, Logger: quiet,
	})
}

// server returns a client of the server, or skips the test.
func server(t testing.TB) client.Client {
	t.Helper()
	address, namespace := theServer()
	if address == "" {
		t.Skip("neither TEMPORAL_SERVER nor TEMPORAL_ADDRESS is set")
	}
	c, err := dial(address, namespace)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func unique(name string) string { return fmt.Sprintf("%s-%x", name, rand.Uint32()) }

// A renamed client has workflow ids of its own, so that tests can use the same ids.
type renamed struct {
	client.Client
	prefix string
}

func (r renamed) ExecuteWorkflow(
	ctx context.Context, o client.StartWorkflowOptions, w any, args ...any,
) (client.WorkflowRun, error) {
	o.ID = r.prefix + o.ID
	return r.Client.ExecuteWorkflow(ctx, o, w, args...)
}

func (r renamed) QueryWorkflowWithOptions(
	ctx context.Context, q *client.QueryWorkflowWithOptionsRequest,
) (*client.QueryWorkflowWithOptionsResponse, error) {
	q.WorkflowID = r.prefix + q.WorkflowID
	return r.Client.QueryWorkflowWithOptions(ctx, q)
}

func (r renamed) UpdateWorkflow(
	ctx context.Context, o client.UpdateWorkflowOptions,
) (client.WorkflowUpdateHandle, error) {
	o.WorkflowID = r.prefix + o.WorkflowID
	return r.Client.UpdateWorkflow(ctx, o)
}

func (r renamed) GetWorkflow(ctx context.Context, id, run string) client.WorkflowRun {
	return r.Client.GetWorkflow(ctx, r.prefix+id, run)
}

// A restartable worker is stopped and started again with what is registered with it.
type restartable struct {
	worker.Registry
	t      *testing.T
	client client.Client
	queue  string

	mu       sync.Mutex
	register []func(worker.Registry)
	worker   worker.Worker
}

func (r *restartable) add(register func(worker.Registry), isWorkflow bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.register = append(r.register, register)
	if r.worker != nil {
		register(r.worker)
	} else if isWorkflow {
		r.start() // a worker that starts without a workflow runs none
	}
}

func (r *restartable) RegisterWorkflowWithOptions(w any, o workflow.RegisterOptions) {
	r.add(func(g worker.Registry) { g.RegisterWorkflowWithOptions(w, o) }, true)
}

func (r *restartable) RegisterActivityWithOptions(a any, o activity.RegisterOptions) {
	r.add(func(g worker.Registry) { g.RegisterActivityWithOptions(a, o) }, false)
}

func (r *restartable) start() {
	r.worker = worker.New(r.client, r.queue, worker.Options{})
	for _, register := range r.register {
		register(r.worker)
	}
	if err := r.worker.Start(); err != nil {
		r.t.Errorf("worker: %v", err)
	}
}

func (r *restartable) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.worker != nil {
		r.worker.Stop()
		r.worker = nil
	}
}

func (r *restartable) restart() {
	r.stop()
	worker.PurgeStickyWorkflowCache()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.start()
}

func TestServerEngine(t *testing.T) {
	c := server(t)
	enginetest.Run(t, func(t *testing.T) enginetest.Environment {
		name := unique("engine")
		w := &restartable{t: t, client: c, queue: name}
		t.Cleanup(w.stop)
		return enginetest.Environment{
			Engine: sagatemporal.New(renamed{c, name + "/"}, w, name), Restart: w.restart,
		}
	})
}

// A process of these tests is a worker if this variable has the address, namespace and task queue.
const workerVariable = "SAGATEMPORAL_TEST_WORKER"

func TestMain(m *testing.M) {
	if words := strings.Fields(os.Getenv(workerVariable)); len(words) == 4 {
		work(words[0], words[1], words[2], words[3])
	}
	os.Exit(m.Run())
}

// work is a worker process. Its steps write to the file calls in a directory, and hang if that has a file hang.
func work(address, namespace, queue, dir string) {
	c, err := dial(address, namespace)
	if err != nil {
		panic(err)
	}
	w := worker.New(c, queue, worker.Options{})
	saga.Register(sagatemporal.New(c, w, queue), journey(dir, time.Millisecond))
	if err := w.Run(worker.InterruptCh()); err != nil {
		panic(err)
	}
	os.Exit(0)
}

// journey returns the definition of the worker processes.
func journey(dir string, backoff time.Duration) *saga.Saga[trip] {
	do := func(ctx context.Context, s *trip) error {
		c := saga.CommandFrom(ctx)
		f, err := os.OpenFile(filepath.Join(dir, "calls"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		fmt.Fprintf(f, "%s %d\n", c.ID, c.Attempt)
		if err := f.Close(); err != nil {
			return err
		}
		if _, err := os.Stat(filepath.Join(dir, "hang")); err == nil && strings.HasSuffix(c.ID, "hotel/do") {
			<-ctx.Done()
		}
		s.Calls = append(s.Calls, c.ID)
		return nil
	}
	sg := define(
		saga.Step[trip]{Name: "flight", Do: do, Undo: do},
		saga.Step[trip]{Name: "hotel", Do: do, Undo: do},
		saga.Step[trip]{Name: "paid", Await: "paid"},
		saga.Step[trip]{Name: "charge", Do: do, Pivot: true},
	)
	for i := range sg.Steps {
		sg.Steps[i].Backoff = func(int) time.Duration { return backoff }
	}
	sg.Name = "journey"
	return sg
}

// A process is a worker in a process of its own.
type process struct{ cmd *exec.Cmd }

func startWorker(t *testing.T, queue, dir string) *process {
	t.Helper()
	address, namespace := theServer()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s %s", workerVariable, address, namespace, queue, dir))
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	p := &process{cmd}
	t.Cleanup(p.kill)
	return p
}

// kill ends the process as kill -9 does.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func calls(t *testing.T, dir string) (lines []string) {
	data, err := os.ReadFile(filepath.Join(dir, "calls"))
	if !os.IsNotExist(err) {
		require.NoError(t, err)
	}
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

func TestServerKilledWorker(t *testing.T) {
	c := server(t)
	dir, queue := t.TempDir(), unique("kill")
	id := queue
	h := saga.Register(sagatemporal.New(c, nil, queue), journey(dir, time.Millisecond))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "hang"), nil, 0o600))
	first := startWorker(t, queue, dir)
	began := time.Now()
	_, err := h.Start(t.Context(), id, trip{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(calls(t, dir)) == 2 }, time.Minute, 10*time.Millisecond)
	t.Log("hotel was called after", time.Since(began))
	first.kill()
	require.NoError(t, os.Remove(filepath.Join(dir, "hang")))
	killed := time.Now()
	second := startWorker(t, queue, dir)
	require.Eventually(t, func() bool { return len(calls(t, dir)) == 3 }, 2*time.Minute, 10*time.Millisecond)
	t.Log("hotel was called again after", time.Since(killed))

	// The saga waits. A signal without a worker is received by the next one.
	require.Eventually(t, func() bool {
		in, err := get(h, id)
		return err == nil && in.Steps[2].Status == saga.StepWaiting
	}, time.Minute, 100*time.Millisecond)
	second.kill()
	sent := make(chan error, 1)
	signaled := time.Now()
	go func() { sent <- h.Signal(t.Context(), id, "paid", nil) }()
	time.Sleep(time.Second)
	startWorker(t, queue, dir)
	require.NoError(t, <-sent)
	t.Log("the signal was received after", time.Since(signaled))
	s, err := h.Result(t.Context(), id)
	require.NoError(t, err)
	flight, hotel, charge := id+"/flight/do", id+"/hotel/do", id+"/charge/do"
	require.Equal(t, []string{flight, hotel, charge}, s.Calls)
	require.Equal(t, []string{flight + " 1", hotel + " 1", hotel + " 1", charge + " 1"}, calls(t, dir))
	in, err := get(h, id)
	require.NoError(t, err)
	save(t, c, id, "killed")
	require.Equal(t, 1, in.Steps[1].Attempts, "the interrupted attempt does not count")
}

func get(h *saga.Handle[trip], id string) (*saga.Instance, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	in, _, err := h.Get(ctx, id)
	return in, err
}

func TestServerContinuesAsNew(t *testing.T) {
	c := server(t)
	var steps []saga.Step[trip]
	for i := range 1000 {
		steps = append(steps, saga.Step[trip]{
			Name: fmt.Sprint(i), Do: func(context.Context, *trip) error { return nil },
			Undo: func(context.Context, *trip) error { return nil },
		})
	}
	queue := unique("steps")
	w := worker.New(c, queue, worker.Options{})
	h := saga.Register(sagatemporal.New(c, w, queue), define(steps...))
	require.NoError(t, w.Start())
	defer w.Stop()
	began := time.Now()
	_, err := h.Start(t.Context(), queue, trip{})
	require.NoError(t, err)
	_, err = h.Result(t.Context(), queue)
	require.NoError(t, err)
	t.Log("1000 steps took", time.Since(began))
	in, err := get(h, queue)
	require.NoError(t, err)
	require.Equal(t, saga.Completed, in.Status)
	events, bytes := history(t, c, queue, "")
	t.Log("the last run has", len(events), "events of", bytes, "bytes")
}

// A saga of a version that no worker knows waits for one that does.
func TestServerUnknownVersion(t *testing.T) {
	c := server(t)
	queue := unique("version")
	second := define(step("train"))
	second.Version, second.Steps[0].Timeout = 2, saga.Unlimited
	start := func(of ...*saga.Saga[trip]) (*saga.Handle[trip], worker.Worker) {
		w := worker.New(c, queue, worker.Options{})
		h := saga.Register(sagatemporal.New(c, w, queue), of[0], of[1:]...)
		require.NoError(t, w.Start())
		return h, w
	}
	_, w := start(define(step("flight")))
	h := saga.Register(sagatemporal.New(c, nil, queue), second)
	_, err := h.Start(t.Context(), queue, trip{})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	_, err = h.Result(ctx, queue)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	w.Stop()
	h, w = start(second, define(step("flight")))
	defer w.Stop()
	s, err := h.Result(t.Context(), queue)
	require.NoError(t, err)
	require.Equal(t, []string{"do train"}, s.Calls)
}

// history returns the events of a run of a workflow, or of the latest, and their size.
func history(t testing.TB, c client.Client, id, run string) (events []*historypb.HistoryEvent, bytes int) {
	i := c.GetWorkflowHistory(context.Background(), id, run, false, enumspb.HISTORY_EVENT_FILTER_TYPE_ALL_EVENT)
	for i.HasNext() {
		e, err := i.Next()
		require.NoError(t, err)
		events = append(events, e)
		bytes += e.Size()
	}
	return events, bytes
}

// Sagas are listed once the namespace has the search attribute, the open ones first.
func TestServerList(t *testing.T) {
	c := server(t)
	_, namespace := theServer()
	_, err := c.OperatorService().AddSearchAttributes(t.Context(), &operatorservice.AddSearchAttributesRequest{
		Namespace:        namespace,
		SearchAttributes: map[string]enumspb.IndexedValueType{"SagaStatus": enumspb.INDEXED_VALUE_TYPE_KEYWORD},
	})
	if _, exists := errors.AsType[*serviceerror.AlreadyExists](err); !exists {
		require.NoError(t, err)
	}
	queue := unique("list")
	w := worker.New(c, queue, worker.Options{})
	engine := sagatemporal.New(c, w, queue)
	hotel := step("hotel")
	hotel.Await = "paid"
	trips := saga.Register(engine, define(step("flight"), hotel))
	require.NoError(t, w.Start())
	defer w.Stop()
	for _, id := range []string{"-1", "-2", "-3"} {
		_, err := trips.Start(t.Context(), queue+id, trip{})
		require.NoError(t, err)
	}
	require.NoError(t, trips.Signal(t.Context(), queue+"-2", "paid", nil))
	_, err = trips.Result(t.Context(), queue+"-2")
	require.NoError(t, err)
	list := func(f saga.Filter) (ids []string, next string) {
		f.ID = queue
		sagas, next, err := engine.List(t.Context(), f)
		require.NoError(t, err)
		for _, in := range sagas {
			ids = append(ids, strings.TrimPrefix(in.ID, queue))
		}
		return ids, next
	}
	require.Eventually(t, func() bool {
		ids, _ := list(saga.Filter{Status: []saga.Status{saga.Completed}})
		return len(ids) == 1
	}, time.Minute, 100*time.Millisecond)
	ids, next := list(saga.Filter{})
	require.Equal(t, []string{"-3", "-1", "-2"}, ids)
	require.Empty(t, next)
	ids, _ = list(saga.Filter{Saga: "trip", Status: []saga.Status{saga.Running, saga.Stuck}})
	require.Equal(t, []string{"-3", "-1"}, ids)
	ids, _ = list(saga.Filter{Saga: "tour"})
	require.Empty(t, ids)
	ids, _ = list(saga.Filter{CreatedBefore: time.Now().Add(-time.Hour)})
	require.Empty(t, ids)
	ids, next = list(saga.Filter{Limit: 2})
	require.Equal(t, []string{"-3", "-1"}, ids)
	ids, next = list(saga.Filter{Limit: 2, After: next})
	require.Equal(t, []string{"-2"}, ids)
	require.Empty(t, next)
}
