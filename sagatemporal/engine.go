package sagatemporal

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
	"google.golang.org/grpc/codes"

	"github.com/go-resilience/resilience/saga"
)

// Names on the server. They occur in histories and visibility queries, so they must not change.
const (
	typePrefix  = "saga/"       // the prefix of workflow and activity types; the definition's name follows
	decideType  = "saga.decide" // the type of the local activity
	queryType   = "saga"
	updateType  = "saga"
	statusField = "SagaStatus" // the search attribute
)

const (
	maxPayload = 64 << 10               // the maximum size of a signal's payload, the same as for a Runner
	firstLook  = 100 * time.Millisecond // the time until Wait first polls the saga
	lastLook   = 5 * time.Second        // the maximum time between two polls of Wait
	retries    = 3                      // the attempts of a request whose worker has stopped or whose run has ended
)

// New returns an engine that starts its sagas on the task queue. w must be a worker of the same task queue. The worker
// runs the sagas of the definitions that are registered with the engine. If w is nil, the engine only starts, signals
// and reads sagas.
//
// Call [saga.Register] before the worker starts. New panics if c is nil, if the task queue is empty, or if another
// engine was created with the same worker.
func New(c client.Client, w worker.Registry, taskQueue string) saga.Engine {
	if c == nil || taskQueue == "" {
		panic("sagatemporal: New needs a client and a task queue")
	}
	e := &engine{client: c, worker: w, taskQueue: taskQueue, definitions: make(map[key]*saga.Definition)}
	if w != nil {
		w.RegisterActivityWithOptions(e.decide, activity.RegisterOptions{Name: decideType})
	}
	return e
}

// An engine is a [saga.Engine] on a task queue.
type engine struct {
	client    client.Client
	worker    worker.Registry // nil in a process that runs no sagas
	taskQueue string

	mu          sync.Mutex
	definitions map[key]*saga.Definition
	status      *bool // whether the namespace has the search attribute; nil until it is known
}

var _ saga.Engine = (*engine)(nil)

// A key identifies a definition.
type key struct {
	name    string
	version int
}

// Register implements [saga.Engine].
func (e *engine) Register(d *saga.Definition) error {
	tx, children := d.Needs()
	switch {
	case tx:
		return fmt.Errorf("sagatemporal: %s version %d has a DoTx or UndoTx: %w", d.Name(), d.Version(), saga.ErrNoTx)
	case children:
		return fmt.Errorf("sagatemporal: %s version %d has a step with a Child: %w",
			d.Name(), d.Version(), errors.ErrUnsupported)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	k, isNew := key{d.Name(), d.Version()}, true
	for other, was := range e.definitions {
		if other == k && *was != *d {
			return fmt.Errorf("sagatemporal: another definition of %s version %d is registered", k.name, k.version)
		}
		isNew = isNew && other.name != k.name
	}
	e.definitions[k] = d
	if e.worker != nil && isNew {
		e.worker.RegisterWorkflowWithOptions(e.run, workflow.RegisterOptions{Name: typePrefix + k.name})
		e.worker.RegisterActivityWithOptions(e.perform, activity.RegisterOptions{Name: typePrefix + k.name})
	}
	return nil
}

// definition returns a registered definition, or an error that matches saga.ErrNotRegistered.
func (e *engine) definition(name string, version int) (*saga.Definition, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.definitions[key{name, version}]
	if d == nil {
		return nil, fmt.Errorf("%w: %s version %d", saga.ErrNotRegistered, name, version)
	}
	return d, nil
}

// Start implements [saga.Engine].
func (e *engine) Start(ctx context.Context, d *saga.Definition, id string, state []byte) (*saga.Instance, error) {
	if _, err := e.definition(d.Name(), d.Version()); err != nil {
		return nil, err
	}
	if len(state) > maxState {
		return nil, fmt.Errorf("sagatemporal: start of %q: state has %d bytes: must be at most %d",
			id, len(state), maxState)
	}
	snapshot, err := d.Begin(id, state, time.Now())
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(snapshot)
	if err != nil {
		return nil, err
	}
	_, err = e.client.ExecuteWorkflow(ctx, client.StartWorkflowOptions{
		ID: id, TaskQueue: e.taskQueue,
		WorkflowIDReusePolicy:                    enumspb.WORKFLOW_ID_REUSE_POLICY_REJECT_DUPLICATE,
		WorkflowExecutionErrorWhenAlreadyStarted: true,
	}, typePrefix+d.Name(), saved{Version: d.Version(), Snapshot: data})
	if _, exists := errors.AsType[*serviceerror.WorkflowExecutionAlreadyStarted](err); exists {
		in, err := e.Get(ctx, id)
		if err == nil && in.Saga != d.Name() {
			return nil, fmt.Errorf("%w: %q is a %s", saga.ErrExists, id, in.Saga)
		}
		return in, err
	}
	if err != nil {
		return nil, fmt.Errorf("sagatemporal: start of %q: %w", id, ended(ctx, err))
	}
	return d.Instance(snapshot), nil
}

// Get implements [saga.Engine].
func (e *engine) Get(ctx context.Context, id string) (*saga.Instance, error) {
	in, _, err := e.get(ctx, id)
	if err != nil {
		return nil, failed("get", id, err)
	}
	return in, nil
}

// get returns a saga, or an error for failed. If the saga has ended, get reads the result of the workflow from the
// server, and also returns the names of the signals that the saga had. Otherwise, a worker answers a query.
func (e *engine) get(ctx context.Context, id string) (*saga.Instance, []string, error) {
	var r *client.QueryWorkflowWithOptionsResponse
	err := again(ctx, func() (err error) {
		r, err = e.client.QueryWorkflowWithOptions(ctx, &client.QueryWorkflowWithOptionsRequest{
			WorkflowID: id, QueryType: queryType, QueryRejectCondition: enumspb.QUERY_REJECT_CONDITION_NOT_OPEN,
		})
		return err
	})
	switch {
	case err != nil:
		return nil, nil, ended(ctx, err)
	case r.QueryRejected != nil:
		return e.result(ctx, id)
	}
	in := new(saga.Instance)
	if err := r.QueryResult.Get(in); err != nil {
		return nil, nil, err
	}
	return in, nil, nil
}

// again sends a request. It repeats the request if the worker that was to answer it has stopped.
func again(ctx context.Context, request func() error) (err error) {
	for range retries {
		err = request()
		code := serviceerror.ToStatus(err).Code()
		if ctx.Err() != nil || code != codes.Canceled && code != codes.DeadlineExceeded {
			break
		}
	}
	return err
}

// result waits until a saga has ended. It returns the saga and the names of its signals, or an error for failed.
func (e *engine) result(ctx context.Context, id string) (*saga.Instance, []string, error) {
	var r result
	in := new(saga.Instance)
	err := e.client.GetWorkflow(ctx, id, "").Get(ctx, &r)
	if err == nil {
		err = json.Unmarshal(r.Instance, in)
	}
	if err != nil {
		return nil, nil, ended(ctx, err)
	}
	in.Now = time.Now()
	return in, r.Signals, nil
}

// failed returns the error of a request about a saga. It matches ErrNotFound if there is no such workflow.
func failed(what, id string, err error) error {
	if _, is := errors.AsType[*serviceerror.NotFound](err); is {
		err = saga.ErrNotFound
	}
	return fmt.Errorf("sagatemporal: %s %q: %w", what, id, err)
}

// ended adds the error and the cause of ctx to err if ctx is done, because the server's errors do not match the errors
// of a ctx.
func ended(ctx context.Context, err error) error {
	end, cause := ctx.Err(), context.Cause(ctx)
	switch {
	case end == nil:
		return err
	case errors.Is(cause, end):
		return errors.Join(cause, err)
	}
	return errors.Join(end, cause, err)
}

// Wait implements [saga.Engine]. The server reports the end of a workflow, but not that a saga is stuck, so Wait polls
// the saga.
func (e *engine) Wait(ctx context.Context, id string) (*saga.Instance, error) {
	type end struct {
		in  *saga.Instance
		err error
	}
	long, cancel := context.WithCancel(ctx)
	defer cancel()
	ends := make(chan end, 1)
	go func() {
		in, _, err := e.result(long, id)
		if err != nil {
			err = failed("get", id, err)
		}
		ends <- end{in, err}
	}()
	for pause := firstLook; ; pause = min(2*pause, lastLook) {
		select {
		case end := <-ends:
			return end.in, end.err
		case <-time.After(pause):
			// Get may fail because no worker runs. Wait then continues, because a worker may start.
			if in, err := e.Get(ctx, id); err == nil && in.Status == saga.Stuck {
				return in, nil
			}
		}
	}
}

// Signal implements [saga.Engine].
func (e *engine) Signal(ctx context.Context, id, name string, payload []byte) error {
	if name == "" || len(payload) > maxPayload {
		return fmt.Errorf("sagatemporal: signal %q of %q has no name, or a payload of more than %d bytes",
			name, id, maxPayload)
	}
	return e.send(ctx, id, fmt.Sprintf("signal %q of", name), &message{Signal: name, Payload: payload})
}

// Operate implements [saga.Engine].
func (e *engine) Operate(ctx context.Context, id string, op saga.Operation) error {
	return e.send(ctx, id, string(op.Action)+" of", &message{Operation: &op})
}

// send sends a message to the saga's workflow, and returns after the workflow has applied or rejected it.
func (e *engine) send(ctx context.Context, id, what string, m *message) error {
	options := client.UpdateWorkflowOptions{
		UpdateID: rand.Text(), WorkflowID: id, UpdateName: updateType, Args: []any{m},
		WaitForStage: client.WorkflowUpdateStageCompleted,
	}
	for n := 1; ; n++ {
		refused := ""
		err := again(ctx, func() error {
			h, err := e.client.UpdateWorkflow(ctx, options)
			if err == nil {
				err = h.Get(ctx, &refused)
			}
			return err
		})
		if _, closed := errors.AsType[*serviceerror.NotFound](err); closed {
			in, signals, err := e.get(ctx, id)
			switch {
			case err != nil:
				return failed(what, id, err)
			case m.Signal != "" && slices.Contains(signals, m.Signal):
				return nil
			case !in.Status.Ended() && n < retries:
				continue
			}
			refused = fmt.Sprintf("it is %s", in.Status)
		} else if err != nil {
			return failed(what, id, ended(ctx, err))
		}
		if refused != "" {
			return failed(what, id, fmt.Errorf("%w: %s", saga.ErrNotAllowed, refused))
		}
		return nil
	}
}

// List implements [saga.Engine].
func (e *engine) List(ctx context.Context, f saga.Filter) (sagas []*saga.Instance, next string, err error) {
	if !e.hasStatus(ctx) {
		return nil, "", fmt.Errorf("sagatemporal: list: %w: namespace has no search attribute %s of type Keyword",
			errors.ErrUnsupported, statusField)
	}
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	query := []string{statusField + " IS NOT NULL", "ExecutionStatus != 'ContinuedAsNew'"}
	if f.Saga != "" {
		query = append(query, "WorkflowType = "+quote(typePrefix+f.Saga))
	}
	if f.ID != "" {
		query = append(query, "WorkflowId STARTS_WITH "+quote(f.ID))
	}
	if !f.CreatedBefore.IsZero() {
		query = append(query, "StartTime < "+quote(f.CreatedBefore.UTC().Format(time.RFC3339Nano)))
	}
	if len(f.Status) > 0 {
		var any []string
		for _, s := range f.Status {
			any = append(any, quote(string(s)))
		}
		query = append(query, statusField+" IN ("+strings.Join(any, ", ")+")")
	}
	limit := f.Limit
	if limit <= 0 {
		limit = 100
	}
	page, err := e.client.ListWorkflow(ctx, &workflowservice.ListWorkflowExecutionsRequest{
		PageSize: int32(min(limit, 1000)), NextPageToken: []byte(f.After), Query: strings.Join(query, " AND "),
	})
	if err != nil {
		return nil, "", fmt.Errorf("sagatemporal: list: %w", ended(ctx, err))
	}
	for _, w := range page.Executions {
		in, err := e.Get(ctx, w.Execution.WorkflowId)
		if errors.Is(err, saga.ErrNotFound) {
			continue // the saga was deleted after the page was read
		}
		if err != nil {
			return nil, "", fmt.Errorf("sagatemporal: list: %w", err)
		}
		if f.WithoutState {
			in.State = nil
		}
		sagas = append(sagas, in)
	}
	return sagas, string(page.NextPageToken), nil
}

// hasStatus reports whether the namespace has the search attribute. It caches the server's answer, because every
// decision needs it.
func (e *engine) hasStatus(ctx context.Context) bool {
	e.mu.Lock()
	known := e.status
	e.mu.Unlock()
	if known != nil {
		return *known
	}
	_, err := e.client.CountWorkflow(ctx, &workflowservice.CountWorkflowExecutionsRequest{Query: statusField + " = ''"})
	_, invalid := errors.AsType[*serviceerror.InvalidArgument](err)
	has := err == nil
	if has || invalid {
		e.mu.Lock()
		e.status = &has
		e.mu.Unlock()
	}
	return has
}

// instance returns the saga in a workflow's saved state.
func (e *engine) instance(name string, s *saved) (*saga.Instance, error) {
	d, err := e.definition(name, s.Version)
	if err != nil {
		return nil, err
	}
	var snapshot saga.Snapshot
	if err := json.Unmarshal(s.Snapshot, &snapshot); err != nil {
		return nil, err
	}
	in := d.Instance(snapshot)
	in.Now = time.Now()
	return in, nil
}
