// Package harm provides the rows of "Under faults" in docs/BENCHMARKS.md: ordinary troubles of HTTP, and the results
// that resiliencehttp.NewClient must achieve. Each row runs the same calls against the same server and network with
// several clients, and NewClient must do no harm:
//
//   - Rule A, answers: NewClient answers in time at least as many calls as the best of a plain client, retries without
//     other policies, and failsafe-go, minus the calls that start within the row's recovery time, minus 1% of them all.
//     go-retryablehttp waits 1, 2, 4 and 8 seconds between its attempts. It counts in rows 2, 5 and 14 only.
//   - Rule B, load: NewClient sends at most 1.2 requests for each call, plus 10 a second for each host, as its retry
//     budget allows. A budget starts with the retries of ten seconds, so a run has ten seconds more than it lasts.
//
// A row's [Must] adds rules or replaces rule A. Row.Compare applies them.
//
// The rows run in virtual time (testing/synctest), over connections in memory, and with the HTTP/1.1 and HTTP/2 of
// net/http. Row 7 runs on loopback addresses. The server's answer to a request depends only on the seed, the number of
// the call and the number of the attempt, so all clients meet the same server. The clients' random delays and the
// order of goroutines remain. Therefore each row has three seeds, whose results are added up, and there is the
// verdict [Close].
//
// # Running
//
//	go test ./internal/whole/harm                               # one rate and one patience for each row
//	go test ./internal/whole/harm -v -run 'TestRows/5/h2'       # some rows
//	cd internal/benchmarks && go test -v -run 'TestHarm/rows/5' # the same, with failsafe-go and go-retryablehttp
//	make harm                                                   # all cells, the table, and planted mistakes
//
// # Adding a row
//
// Add a [Row] to a function of rows.go, or a function to [Rows]. Most rows are data:
//
//	{
//		ID: "3/503", Name: "the server restarts: 2s of 503",
//		Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 25 * s,
//		Fault: 5 * s, FaultEnd: 7 * s, Recovery: s,
//		Server: During(5*s, 7*s, Unavailable, quick),
//	}
//
// Server is a [Handler], made of those in server.go: During, Share, EveryNth, OldConns, Path; Takes, Silent, Status,
// Stream. Script changes the network or starts calls at given times. A fault of a new kind is another function of a
// few lines. Keep Rate times Length below 500: each call costs about 80 µs of CPU for each client and seed.
//
// Then run the row 20 times. If it is red, add a line to [RedRows] with the package that will make it green. If its
// verdict changes between runs, move it away from the limit of the rule, by its length or its rate.
//
// # Making a row green
//
// Change the package, run the row, and delete its line from [RedRows]. The test of the row fails until the line is
// gone. The clients' configurations are in clients.go. If a row of planted_test.go turns green, its mistake is planted
// from then on, by go test -run Planted -planted or make harm.
package harm
