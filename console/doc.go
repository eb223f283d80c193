// Package console provides a web page for operators: it shows the policies of a program live. An operator sees which
// dependency is broken and since when, and can act without a deploy if that is allowed.
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
// The page shows the policies of one process, and names it by host, pid and start. Behind a load balancer, an action
// reaches only that process. Sagas are in a store, which all processes share.
//
// # Cost
//
// A goroutine samples every metric once per second and retains the samples of the last ten minutes. The first visitor
// therefore sees how an outage started. For 100 policies, the sampler uses less than 0.1% of a core and 1 to 3 MB. A
// policy whose Health queries a store, such as a Runner, is called only every 10 seconds. The console recognizes it by
// a Health that uses its ctx.
//
// # Actions on many sagas
//
// The page groups stuck sagas by step and error. An operator selects sagas or whole groups, and the console applies the
// action to one saga after the other. Each saga is an operation for Allow and Audit.
//
// The form has each saga's sequence number. If a saga has changed since it was shown, the action is refused for that
// saga and applied to the others; only Cancel applies even so. The action ends early if Allow returns an error, the
// store fails, or the console is closed. It also ends before the server's WriteTimeout, or the deadline of the
// request's ctx, because otherwise the response would be lost. In each case the response has the number of sagas that
// were changed, and the number of sagas that are left.
//
// # State and version of a saga
//
// On the page of a saga that is stuck, or waits while no runner holds it, an operator can replace the state, which is
// shown as JSON, and move the saga to another registered version. Both come with Retry, Skip or Compensate: a skipped
// step leaves nothing in the state, so the operator enters the results that later steps need. The confirmation shows
// the state before and after. The saga's log records that the state was replaced, but neither state. Config.Audit
// receives the new one.
//
// # Security
//
// Anyone who can reach the page can read it. Mount it next to the program's other debug pages, or behind a handler that
// authenticates. Error texts, the keys of a Group and the states of sagas may hold secrets. They are hidden unless
// [Show] selects them. The names of policies, their settings and the ids of sagas are always shown.
//
// Without Config.Allow the console is read-only. http.CrossOriginProtection rejects a POST from another origin. A proxy
// must keep the browser's Host, as nginx does with "proxy_set_header Host $http_host". DNS rebinding lets a foreign
// page reach the console from an operator's browser. Allow, or the handler around the console, must therefore require
// a credential or check r.Host. The client's address alone proves nothing.
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
// A list of sagas has the optional parameters runner, saga (a definition), status, text (an id, or its beginning), age
// (the minimum age, such as 10m) and after (the next of the previous page).
//
// An operation is a form. Its fields are those of [Operation] in lower case. An action on many sagas has one field ids
// for each saga, with the id and the seq of the list as id@seq. A seq of 0 applies the action to the saga even if it
// has changed. With one id, retry, skip and compensate may have a new state as JSON, and a version. With ids, they may
// have a version.
//
//	curl -H 'Accept: application/json' -d action=trip -d policy=breaker/users -d for=30s $CONSOLE/act
//	curl -H 'Accept: application/json' -d action=apply -d policy=bulkhead/users -d 'settings={"Limit": 8}' $CONSOLE/act
//	curl -H 'Accept: application/json' -d action=retry -d policy=saga/orders -d ids=order-1@17 \
//	     -d ids=order-2@9 -d note='bank is back' $CONSOLE/act
//	curl -H 'Accept: application/json' -d action=skip -d policy=saga/orders -d id=order-1 -d seq=17 -d step=ticket \
//	     -d 'state={"Seats": 2, "Ticket": "T-1"}' -d note='printed by hand' $CONSOLE/act
//
// The response is {"done": true}. Apply adds the changes. An action on many sagas adds the numbers "acted" and
// "refused", and "refusals" with the reasons. If the operation fails, the response has a status of 400 or more and is
// {"done": false, "error": "..."}. With preview=1, apply changes nothing and responds with the changes that it would
// make.
package console
