package main

import (
	"context"
	"log/slog"

	"go.temporal.io/api/serviceerror"
	"go.temporal.io/api/workflowservice/v1"
	"go.temporal.io/sdk/client"
	sdklog "go.temporal.io/sdk/log"
	"go.temporal.io/sdk/testsuite"
)

// An offlineClient runs one saga in the test environment of the SDK. Start returns when the saga has ended. It has the
// methods of a client that an engine calls for Start and Result; Get, Signal and Operate need a server.
type offlineClient struct {
	client.Client
	env *testsuite.TestWorkflowEnvironment
}

func newOffline() *offlineClient {
	suite := testsuite.WorkflowTestSuite{}
	suite.SetLogger(sdklog.NewStructuredLogger(slog.New(slog.DiscardHandler)))
	return &offlineClient{env: suite.NewTestWorkflowEnvironment()}
}

func (c *offlineClient) ExecuteWorkflow(
	_ context.Context, o client.StartWorkflowOptions, workflow any, args ...any,
) (client.WorkflowRun, error) {
	c.env.SetStartWorkflowOptions(o)
	c.env.ExecuteWorkflow(workflow, args...)
	return nil, c.env.GetWorkflowError()
}

func (c *offlineClient) GetWorkflow(context.Context, string, string) client.WorkflowRun {
	return offlineRun{c: c}
}

type offlineRun struct {
	client.WorkflowRun
	c *offlineClient
}

func (r offlineRun) Get(_ context.Context, result any) error {
	return r.c.env.GetWorkflowResult(result)
}

// CountWorkflow fails, so the engine sets no search attribute.
func (c *offlineClient) CountWorkflow(
	context.Context, *workflowservice.CountWorkflowExecutionsRequest,
) (*workflowservice.CountWorkflowExecutionsResponse, error) {
	return nil, serviceerror.NewInvalidArgument("no visibility")
}
