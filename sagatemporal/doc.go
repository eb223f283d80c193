// Package sagatemporal runs the sagas of package saga on Temporal. A definition that runs on a [saga.Runner] runs here
// unchanged, through the same [saga.Handle].
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
// A process that only starts, signals or reads sagas passes nil as the worker. The server needs no preparation, and
// the engine no database.
//
// # How a saga runs
//
// A saga is a workflow of the type "saga/" and the definition's Name, whose id is that of the saga. A local activity
// decides, and its result is in the history with the saga's log. An attempt of a step is an activity that Temporal does
// not retry: the saga decides whether another attempt follows, after which pause, or whether it turns back. After 64
// decisions, or once the server suggests it, the workflow continues as new with the saga as its argument.
//
// The workflow replays decisions and does not repeat them. So a deployment may change a Backoff, a Codec, a Timeout or
// the version of package saga while sagas run. [saga.Saga.Version] says what needs a new Version.
//
// # Differences from a Runner
//
// The table has what differs. The figures are of three steps, with server 1.32.0 and SQLite in memory, on two cores
// that were busy with other work. The plain workflow has three activities. A production server has other figures.
//
//	                     Runner                        Temporal
//	needs                a SQL database                a Temporal server
//	DoTx, UndoTx         in the store's database       Register returns an error that matches ErrNoTx
//	Child                starts sagas                  Register returns one that matches errors.ErrUnsupported
//	StartTx, SignalTx    in the store's database       an error that matches ErrNoTx
//	Command.Epoch        increases with each claim     0: the command id is the only guard
//	a process dies       others wait for LeaseTTL, 15s attempts are repeated 11s after kill -9
//	   again and again   stuck after 10 takeovers      no limit
//	Cancel, in a Do      its ctx ends within 5s        its ctx ends with a heartbeat: after 2s to 10s
//	Signal, Operate      need the store                need a worker; 5s after the last one was killed
//	Get                  needs the store               needs a worker until the saga has ended
//	CreatedAt            the database's clock          the clock of the process that calls Start
//	state                no limit                      256 KiB; less with three or more parallel steps
//	Tenant               tenants take turns            no effect
//	Inject               carried to the steps          context propagators of the client
//	Observe, Describe    events, metrics, health       metrics of the SDK, visibility
//	History              the log in the store          the log in the workflow's history
//	Retention            for each status               of the namespace
//	List                 the latest first              open sagas first; needs a search attribute
//	CPU for a saga       0.7ms of PostgreSQL           87ms of the server (a plain workflow: 83ms)
//	CPU when idle        0.8ms a second                56ms a second, of the server
//	Start to Result                                    200ms (a plain workflow: 200ms)
//	history              a row and its log             27 events, 10 KB (a plain workflow: 23 events, 2 KB)
//	1,000 steps                                        52s, in 16 runs
//
// The stories in saga/testdata that need no other runner, no parent and no clock run on both, with the same calls,
// statuses and results.
//
// # The command id
//
// If a worker loses its connection, its attempt may still run when another worker repeats it. On a Runner, an
// increasing [saga.Command.Epoch] lets a participant reject the older one. Here Epoch is always 0, so a participant can
// only compare [saga.Command.ID], as [saga.Apply] and the packages sagahttp and sagagrpc do.
//
// # Deployments
//
// All workers of a task queue should register all versions of all definitions that have sagas. A worker without the
// version of a saga fails the workflow task, and the server gives it to a worker again, after up to 10 minutes. So the
// saga is not lost. An attempt on such a worker is repeated after a second. An Operation with a Version needs both
// versions.
//
// A request to cancel the workflow has the effect of [saga.ActionCancel]. Do not terminate or reset the workflow of a
// saga: the steps are then not undone, or called again.
//
// # List
//
// List needs a search attribute SagaStatus of type Keyword:
//
//	temporal operator search-attribute create --name SagaStatus --type Keyword
//
// Without it, the error matches [errors.ErrUnsupported]. Restart the program after you have created it. The attribute
// has the [saga.Status], and can be used in queries of your own. A page has the open sagas first, and then those that
// have ended, each with the latest first, as the server sorts them. Filter.CreatedBefore compares the start of the
// latest run. List reads each saga of a page by a request, so that a page of 100 open sagas takes 100 queries.
//
// # Tests
//
// A TestWorkflowEnvironment of the SDK runs sagas in virtual time: it is a [worker.Registry], and a client that calls
// its ExecuteWorkflow starts the saga. See examples/temporal in the repository.
//
// # Stability
//
// The package is unstable until 1.0.0. A later version replays the histories of this one.
package sagatemporal
