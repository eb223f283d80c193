// Package console provides a web page that shows operators the current state of a program's policies. An operator sees
// which dependency is broken and since when. If [Config].Allow permits it, the operator can also act, for example open
// a breaker or change settings, without a deployment.
//
//	page := console.New(reg, console.Config{
//		Allow: func(r *http.Request, op console.Operation) error { return mayOperate(r) },
//		Audit: func(ctx context.Context, op console.Operation, err error) {
//			slog.InfoContext(ctx, "operator", "operation", op, "err", err)
//		},
//	})
//	defer page.Close()
//	mux.Handle("/debug/resilience/", http.StripPrefix("/debug/resilience", page))
//
// The page shows the policies of one process, and identifies the process by its host, PID and start time. Behind a load
// balancer, an action on a policy reaches only that process. An action on a saga takes effect in all processes, because
// they share the store of the sagas.
//
// # Cost
//
// A goroutine samples every metric once per second and retains the samples of the last ten minutes. So a visitor who
// first opens the page during an outage can also see how the outage started. For 100 policies, sampling uses less than
// 0.1% of a CPU core and 1 to 3 MB of memory.
//
// The console calls a policy's Health function once per second. If the function queries a store, as the Health function
// of a Runner does, the console calls the function only every 10 seconds. If a Health function uses its ctx, the
// console assumes that the function queries a store.
//
// # Actions on many sagas
//
// A saga is stuck if it cannot continue without an operator. The page groups stuck sagas by step and error. An operator
// selects sagas or whole groups, and the console applies the action to one saga after the other. Config.Allow and
// Config.Audit are called for each saga.
//
// The form of an action has the sequence number of each saga, which is the number of entries in the saga's log. If a
// saga has changed since the page showed it, the action is refused for that saga and applied to the other sagas. The
// action Cancel is applied even to a saga that has changed.
//
// An action on many sagas ends early if Allow returns an error, the store fails, or the console is closed. An action
// also ends before the server's WriteTimeout or the deadline of the request's ctx, because otherwise the response would
// be lost. The response to an action that ended early has the number of sagas that were changed and the number of sagas
// that are left.
//
// # State and version of a saga
//
// The page of a saga shows the saga's state as JSON. An operator can replace the state, and can move the saga to
// another registered version. The page offers these changes for a stuck saga. It also offers them for a waiting saga
// that no runner holds.
//
// A new state or version is part of the actions Retry, Skip and Compensate. For example, a skipped step adds nothing to
// the state. If later steps need results of the skipped step, the operator enters these results. Before the action, a
// confirmation page shows the old and the new state. The saga's log records that the state was replaced, but contains
// neither the old nor the new state. Config.Audit receives the new state.
//
// # Security
//
// Anyone who can reach the page can read it. Mount the console next to the program's other debug pages, or behind a
// handler that authenticates. Texts of errors, the keys of a Group and the states of sagas may contain secrets, so they
// are hidden unless [Show] selects them. The names and settings of policies and the IDs of sagas are always shown.
//
// Without Config.Allow the console is read-only. The console rejects a POST request from another origin, by
// http.CrossOriginProtection. A proxy in front of the console must pass the browser's Host header on, as nginx does
// with "proxy_set_header Host $http_host".
//
// By DNS rebinding, a page of another site can send requests to the console from an operator's browser. Therefore
// Allow, or a handler around the console, must require a credential or check r.Host. A check of the client's address
// does not prevent DNS rebinding.
//
// # Scripts
//
// Every page responds with JSON to a request with Accept: application/json.
//
//	GET  ./                                verdict; each policy with its state, rates and sparkline
//	GET  policy?kind=breaker&name=users    metrics over time, states, settings, members
//	GET  sagas?runner=orders               counts, a list, and groups of stuck sagas
//	GET  saga?runner=orders&id=order-17    steps, log, state, actions
//	POST act                               an operation
//
// A list of sagas has the optional parameters runner, saga, status, text, age and after. The parameter saga is the name
// of a definition. The parameter text is an id, or the first part of an id. The parameter age is the minimum age, such
// as 10m. The parameter after is the field next of the previous page.
//
// An operation is sent as an HTML form of at most 1 MiB. The names of the form's fields are the names of the fields of
// [Operation] in lower case. An action on a single saga has the fields id and seq. An action on many sagas repeats the
// field ids for each saga. Each value of ids has the form id@seq. The list shows the id and the seq of each saga. If
// seq is 0, the action is applied to the saga even if the saga has changed. The actions retry, skip and compensate may
// have a version. If one of these three actions is on a single saga, it may also have a new state as JSON.
//
//	curl -H 'Accept: application/json' -d action=trip -d policy=breaker/users -d for=30s $CONSOLE/act
//	curl -H 'Accept: application/json' -d action=apply -d policy=bulkhead/users -d 'settings={"Limit": 8}' $CONSOLE/act
//	curl -H 'Accept: application/json' -d action=retry -d policy=saga/orders -d ids=order-1@17 \
//	     -d ids=order-2@9 -d note='bank is back' $CONSOLE/act
//	curl -H 'Accept: application/json' -d action=skip -d policy=saga/orders -d id=order-1 -d seq=17 -d step=ticket \
//	     -d 'state={"Seats": 2, "Ticket": "T-1"}' -d note='printed by hand' $CONSOLE/act
//
// The response to a successful operation is {"done": true}. The response to the action apply also has "changes". The
// response to an action on many sagas has the fields "acted" and "refused", which are numbers of sagas. The field
// "refusals" has the reasons. If the operation fails, the response is {"done": false, "error": "..."}, with an HTTP
// status of 400 or more. With the field preview=1, the action apply changes nothing, and the response has the changes
// that the action would make.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package console
