// Package sagatemporal runs the sagas of package saga on Temporal. The same definition runs unchanged on a
// [saga.Runner] or on Temporal, and the program uses it through a [saga.Handle] in both cases.
//
//	c, err := client.Dial(client.Options{HostPort: address}) // of go.temporal.io/sdk/client
//	...
//	w := worker.New(c, "trips", worker.Options{}) // of go.temporal.io/sdk/worker
//	trips := saga.Register(sagatemporal.New(c, w, "trips"), trip)
//	if err := w.Start(); err != nil {
//		...
//	}
//	defer w.Stop()
//	if _, err := trips.Start(ctx, "trip-1", Trip{}); err != nil {
//		...
//	}
//	t, err := trips.Result(ctx, "trip-1")
//
// A process that only starts, signals or reads sagas passes nil as the worker. The Temporal server needs no
// preparation, and the program needs no other database.
//
// # How a saga runs
//
// Each saga is a workflow. The workflow's type is "saga/" followed by the definition's Name, and the workflow's id is
// the saga's id.
//
// After each result of an attempt, the workflow decides how the saga continues. Each decision is the result of a local
// activity. Temporal records each decision in the workflow's history, together with the saga's log.
//
// Each attempt of a step is an activity. Temporal does not retry the activity. The saga itself decides whether and when
// to make another attempt. The saga may also turn back, which means that it stops going forward and compensates.
//
// After 64 decisions, or earlier if the server suggests it, the workflow continues as new, with the saga as its
// argument.
//
// A replay reads the recorded decisions and does not decide again. Therefore a deployment may change a Backoff, a
// Codec, a Timeout or the version of package saga while sagas run. [saga.Saga.Version] documents which changes need a
// new Version.
//
// # Differences from a Runner
//
// The table compares a [saga.Runner] with this package. The measurements in the table are for a saga of three steps.
// The measurements used Temporal server 1.32.0 with SQLite in memory, on two cores that were busy with other work. For
// comparison, a plain workflow executes three activities without a saga. A production server needs its own
// measurements.
//
//	                     Runner                        Temporal
//	requirements         a SQL database                a Temporal server
//	DoTx, UndoTx         in the store's database       Register returns an error that matches ErrNoTx
//	Child                starts sagas                  Register returns an error that matches errors.ErrUnsupported
//	StartTx, SignalTx    in the store's database       return an error that matches ErrNoTx
//	Command.Epoch        increases with each claim     always 0: only the command id identifies a command
//	process killed       taken over after LeaseTTL     attempts are repeated 11s after kill -9
//	killed repeatedly    stuck after 10 takeovers      no limit
//	Cancel during a Do   ctx is canceled within 5s     ctx is canceled by a heartbeat, after 2s to 10s
//	Signal, Operate      need the store                need a worker; take 5s if the worker was killed and replaced
//	Get                  needs the store               needs a worker until the saga has ended
//	CreatedAt            the database's clock          the clock of the process that calls Start
//	size of the state    no limit                      256 KiB; less with three or more parallel steps
//	Tenant               tenants take turns            no effect
//	Inject               carried to the steps          use the client's context propagators
//	Observe, Describe    events, metrics, health       use the SDK's metrics, and visibility queries
//	History              the log in the store          the log in the workflow's history
//	Retention            for each status               the namespace's retention
//	order of List        the latest first              open sagas first; needs a search attribute
//	CPU for a saga       0.7ms of PostgreSQL           87ms of the server (plain workflow: 83ms)
//	CPU when idle        0.8ms per second              56ms per second, of the server
//	Start to Result      -                             200ms (plain workflow: 200ms)
//	size of the history  a row and its log             27 events, 10 KB (plain workflow: 23 events, 2 KB)
//	1,000 steps          -                             52s, in 16 workflow runs
//
// The tests in saga/testdata/stories.txt run sagas on a Runner and on Temporal, with the same calls, statuses and
// results. Sagas that need a second runner, a parent saga or a controlled clock run only on a Runner.
//
// # The command id
//
// If a worker loses its connection, another worker repeats the attempt while the first attempt may still run. On a
// Runner, a participant can reject the older attempt by its lower [saga.Command.Epoch]. On Temporal, Epoch is always 0.
// A participant can recognize a repeated command only by its [saga.Command.ID], as [saga.Apply] and the packages
// sagahttp and sagagrpc do.
//
// # Deployments
//
// As long as sagas of a version exist, register this version of the definition with each worker of the task queue. A
// worker that does not know the version of a saga fails the workflow task. A failed task does not lose the saga,
// because the server gives the task to a worker again after up to 10 minutes. A worker may also get an attempt of a
// saga whose version it does not know. The attempt is then repeated after a second. An Operation with a Version needs a
// worker that knows both the old and the new version.
//
// A request to cancel the workflow has the effect of [saga.ActionCancel]. Do not terminate or reset the workflow of a
// saga. After a termination, no step is undone. After a reset, steps are called again.
//
// # List
//
// List needs a search attribute SagaStatus of type Keyword:
//
//	temporal operator search-attribute create --name SagaStatus --type Keyword
//
// Without the attribute SagaStatus, List returns an error that matches [errors.ErrUnsupported]. Restart the program
// after you have created the attribute. The value of SagaStatus is the [saga.Status] of a saga. You can use SagaStatus
// in your own visibility queries.
//
// List returns the open sagas first and then the sagas that have ended. The server sorts the open and the ended sagas
// separately, the latest saga first. Filter.CreatedBefore is compared with the start of the workflow's latest run, not
// with the start of the saga. List sends a separate request for each saga of a page, so a page of 100 open sagas takes
// 100 queries.
//
// # Tests
//
// In tests, a TestWorkflowEnvironment of the SDK can run sagas in virtual time. Pass the TestWorkflowEnvironment to
// [New] as the [worker.Registry]. Also pass a client that starts sagas with the environment's ExecuteWorkflow. See
// examples/temporal in the repository.
//
// # Stability
//
// The package is unstable until 1.0.0. Later versions of the package can replay the workflow histories of this version.
package sagatemporal
