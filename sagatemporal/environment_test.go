package sagatemporal_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	enumspb "go.temporal.io/api/enums/v1"
	querypb "go.temporal.io/api/query/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/log"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"

	"github.com/go-resilience/resilience/saga"
)

// An environment is a client and a worker in the SDK's test environment: each workflow has one of its own, with virtual
// time that advances while no activity runs. It has what the engine uses of a client, without visibility. It cannot
// restart a worker, and reports canceled activities as ended at once.
type environment struct {
	client.Client
	worker.Registry

	mu         sync.Mutex
	register   []func(worker.Registry)
	executions map[string]*execution

	lose func(saga.Call) bool // whether the worker dies after the attempt; nil means never
}

var quiet = log.NewStructuredLogger(slog.New(slog.DiscardHandler))

func newEnvironment() *environment { return &environment{executions: make(map[string]*execution)} }

func (e *environment) RegisterWorkflowWithOptions(w any, o workflow.RegisterOptions) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.register = append(e.register, func(r worker.Registry) { r.RegisterWorkflowWithOptions(w, o) })
}

func (e *environment) RegisterActivityWithOptions(a any, o activity.RegisterOptions) {
	if perform, is := a.(func(context.Context, saga.Call) (saga.Answer, error)); is {
		a = func(ctx context.Context, c saga.Call) (saga.Answer, error) {
			answer, err := perform(ctx, c)
			if e.lose != nil && e.lose(c) {
				err = temporal.NewTimeoutError(enumspb.TIMEOUT_TYPE_HEARTBEAT, nil)
			}
			return answer, err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.register = append(e.register, func(r worker.Registry) { r.RegisterActivityWithOptions(a, o) })
}

// An execution is a workflow with all its runs.
type execution struct {
	mu    sync.Mutex
	run   *run
	runs  int
	ended chan struct{} // closed at the end of the last run
}

// A run is a workflow until it ends or continues as new.
type run struct {
	env     *testsuite.TestWorkflowEnvironment
	started chan struct{} // closed once its handlers are set
	ended   chan struct{}
}

func (e *environment) newRun(id string) *run {
	suite := testsuite.WorkflowTestSuite{}
	suite.SetLogger(quiet)
	r := &run{suite.NewTestWorkflowEnvironment(), make(chan struct{}), make(chan struct{})}
	r.env.SetTestTimeout(1000 * time.Hour) // it would panic in a saga that waits after the end of its test
	r.env.SetWorkflowRunTimeout(0)         // virtual time would reach any other
	r.env.SetStartTime(time.Now())
	r.env.SetStartWorkflowOptions(client.StartWorkflowOptions{ID: id})
	started := sync.OnceFunc(func() { close(r.started) })
	r.env.SetOnLocalActivityStartedListener(func(*activity.Info, context.Context, []any) { started() })
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, register := range e.register {
		register(r.env)
	}
	return r
}

func (e *environment) ExecuteWorkflow(
	_ context.Context, o client.StartWorkflowOptions, workflowType any, args ...any,
) (client.WorkflowRun, error) {
	r := e.newRun(o.ID)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.executions[o.ID] != nil {
		return nil, serviceerror.NewWorkflowExecutionAlreadyStarted("", "", "")
	}
	x := &execution{run: r, runs: 1, ended: make(chan struct{})}
	e.executions[o.ID] = x
	go func() {
		for {
			r.env.ExecuteWorkflow(workflowType, args...)
			next, is := errors.AsType[*workflow.ContinueAsNewError](r.env.GetWorkflowError())
			if !is {
				close(x.ended) // first: until then, do would call the ended run again and again, and fill its queue
				close(r.ended)
				return
			}
			workflowType, args = next.WorkflowType.Name, nil
			for _, p := range next.Input.Payloads {
				var arg json.RawMessage
				if err := converter.GetDefaultDataConverter().FromPayload(p, &arg); err != nil {
					panic(err)
				}
				args = append(args, arg)
			}
			was := r
			r = e.newRun(o.ID)
			x.mu.Lock()
			x.run, x.runs = r, x.runs+1
			x.mu.Unlock()
			close(was.ended)
		}
	}()
	return nil, nil
}

func (e *environment) execution(id string) (*execution, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if x := e.executions[id]; x != nil {
		return x, nil
	}
	return nil, serviceerror.NewNotFound("workflow not found")
}

func (x *execution) current() *run {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.run
}

// do calls fn in the workflow's loop, and reports whether it did. It does not if the workflow has ended.
func (x *execution) do(ctx context.Context, fn func(*testsuite.TestWorkflowEnvironment)) (bool, error) {
	for {
		r, called := x.current(), make(chan struct{})
		select {
		case <-r.started:
			r.env.RegisterDelayedCallback(func() { defer close(called); fn(r.env) }, 0)
		case <-ctx.Done():
			return false, ctx.Err()
		}
		ended := false
		select {
		case <-called:
		case <-ctx.Done():
		case <-x.ended:
			ended = true
		case <-r.ended:
		}
		select {
		case <-called: // fn may have ended the workflow
			return true, nil
		default:
		}
		if ended || ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
}

func (e *environment) QueryWorkflowWithOptions(
	ctx context.Context, q *client.QueryWorkflowWithOptionsRequest,
) (*client.QueryWorkflowWithOptionsResponse, error) {
	x, err := e.execution(q.WorkflowID)
	if err != nil {
		return nil, err
	}
	r := &client.QueryWorkflowWithOptionsResponse{}
	var failed error
	open, err := x.do(ctx, func(env *testsuite.TestWorkflowEnvironment) {
		r.QueryResult, failed = env.QueryWorkflow(q.QueryType, q.Args...)
	})
	if !open {
		r.QueryRejected = &querypb.QueryRejected{Status: enumspb.WORKFLOW_EXECUTION_STATUS_COMPLETED}
	}
	return r, errors.Join(err, failed)
}

func (e *environment) UpdateWorkflow(
	ctx context.Context, o client.UpdateWorkflowOptions,
) (client.WorkflowUpdateHandle, error) {
	x, err := e.execution(o.WorkflowID)
	if err != nil {
		return nil, err
	}
	h := &update{completed: make(chan struct{})}
	open, err := x.do(ctx, func(env *testsuite.TestWorkflowEnvironment) {
		env.UpdateWorkflow(o.UpdateName, "", h, o.Args...)
	})
	if err != nil {
		return nil, err
	}
	if open {
		select {
		case <-h.completed:
			return h, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-x.ended:
		}
		select {
		case <-h.completed: // the update ended the workflow
			return h, nil
		default:
		}
	}
	return nil, serviceerror.NewNotFound("workflow execution already completed")
}

// An update is the handle of an update that has completed.
type update struct {
	client.WorkflowUpdateHandle
	completed chan struct{}
	success   any
	err       error
}

func (*update) Accept() {}

func (u *update) Reject(err error) { u.Complete(nil, err) }

func (u *update) Complete(success any, err error) {
	u.success, u.err = success, err
	close(u.completed)
}

func (u *update) Get(_ context.Context, to any) error {
	if u.err == nil {
		*to.(*string) = u.success.(string)
	}
	return u.err
}

func (e *environment) GetWorkflow(_ context.Context, id, _ string) client.WorkflowRun {
	return &workflowRun{environment: e, id: id}
}

type workflowRun struct {
	client.WorkflowRun
	*environment
	id string
}

func (w *workflowRun) Get(ctx context.Context, to any) error {
	x, err := w.execution(w.id)
	if err != nil {
		return err
	}
	select {
	case <-x.ended:
		return x.current().env.GetWorkflowResult(to)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *environment) CountWorkflow(
	context.Context, *workflowservice.CountWorkflowExecutionsRequest,
) (*workflowservice.CountWorkflowExecutionsResponse, error) {
	return nil, serviceerror.NewInvalidArgument("there is no visibility")
}

func (e *environment) CancelWorkflow(ctx context.Context, id, _ string) error {
	x, err := e.execution(id)
	if err == nil {
		_, err = x.do(ctx, func(env *testsuite.TestWorkflowEnvironment) { env.CancelWorkflow() })
	}
	return err
}
