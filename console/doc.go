// Package console is a live page of the policies of a program, for operators. It shows which
// dependency is broken now and how that came about, and has buttons to act without a deploy
// where they are allowed.
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
// The page says which process it speaks for, by host, pid and start. Behind a load balancer
// an action reaches that one process. Sagas are in the store, and belong to all processes.
//
// # What it costs
//
// From New on, one goroutine samples every metric once a second and keeps ten minutes of samples, so the
// first visitor sees how an outage started. For 100 policies that takes less than a thousandth of a core, and 1
// to 3 MB. A policy that queries a store for its health, such as a Runner, is called every 10 seconds only; the
// console recognizes it by a Health that uses its ctx.
//
// # Many sagas at once
//
// An action on many acts on the sagas that the page shows, one after the other, in its
// request. Each is an operation for Allow and for Audit. It ends with the first that is not
// allowed or whose store fails, with the request, and with Close.
//
// # Security
//
// Anyone who can reach the page can read it. Put it where the program's other debug pages
// are, or behind a handler that authenticates. Error texts, the keys of a Group and the state of a
// saga may hold secrets; each is hidden unless [Show] says otherwise. The names of policies,
// their settings and the ids of sagas are always shown.
//
// Without Config.Allow the console is read-only. http.CrossOriginProtection rejects a POST
// from another origin. A proxy in front must keep the Host of the browser, as nginx does with
// "proxy_set_header Host $http_host". By DNS rebinding, a foreign page can still reach the
// console from an operator's browser: Allow, or the handler around the console, must ask for
// a credential or check r.Host. The client's address alone proves nothing.
//
// # For scripts
//
// Every page answers JSON to a request with Accept: application/json.
//
//	GET  ./                                the verdict; each policy with its state, rates and sparkline
//	GET  policy?kind=breaker&name=users    metrics over time, states, settings, members
//	GET  sagas?runner=orders               counts and a list
//	GET  saga?runner=orders&id=order-17    steps, log, state, actions
//	POST act                               an operation
//
// A list of sagas has the optional parameters runner, saga (a definition), status, text (the
// beginning of an id), age (the least, such as 10m) and after (the next of the page before).
//
// An operation is a form. Its fields are those of [Operation] in lower case; ids are the sagas
// of an operation on many:
//
//	curl -H 'Accept: application/json' -d action=trip -d policy=breaker/users -d for=30s $CONSOLE/act
//	curl -H 'Accept: application/json' -d action=apply -d policy=bulkhead/users -d 'settings={"Limit": 8}' $CONSOLE/act
//	curl -H 'Accept: application/json' -d action=retry -d policy=saga/orders -d ids=order-1 \
//	     -d ids=order-2 -d note='bank is back' $CONSOLE/act
//
// The answer is {"done": true}, with the changes of apply, or how many sagas "acted" and
// "refused"; on failure {"done": false, "error": "..."} with a status of 400 or more. With
// preview=1, apply changes nothing and answers what it would change.
package console
