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

// An offlineClient is a Temporal client that runs one saga in the test environment of the SDK. The start of a saga
// returns when the saga has ended. It implements only the methods that an engine of package sagatemporal calls for
// Start and Result. Get, Signal and Operate need a server.
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

// CountWorkflow returns an error. The engine then does not use search attributes, which need a server.
func (c *offlineClient) CountWorkflow(
	context.Context, *workflowservice.CountWorkflowExecutionsRequest,
) (*workflowservice.CountWorkflowExecutionsResponse, error) {
	return nil, serviceerror.NewInvalidArgument("no visibility")
}
