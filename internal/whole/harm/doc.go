// Package harm provides the rows of the table "Under faults" in docs/BENCHMARKS.md. A row is a fault that is
// common with HTTP, such as a server's restart, and the results that resiliencehttp.NewClient must achieve
// during the fault. Each row runs the same calls against the same server and network with several clients.
// NewClient must not do harm compared with the other clients:
//
//   - Rule A, answers: NewClient must answer, within the callers' patience, at least as many calls as the
//     best of the other clients. These are a plain client, a client with only retries, and failsafe-go. Two
//     allowances are subtracted: the calls that start within the row's recovery time, and 1% of all calls. A
//     fourth client, go-retryablehttp, waits 1, 2, 4 and 8 seconds between its attempts. NewClient is
//     compared with it only in rows 2, 5 and 14.
//   - Rule B, load: NewClient must send at most 1.2 requests for each call, plus 10 requests per second for
//     each host. Its retry budget allows that many. A budget is initially filled with the retries of 10
//     seconds, so the rule adds 10 seconds to the length of a run.
//
// A row's [Must] adds rules or replaces rule A. [Row.Compare] applies the rules.
//
// The rows run in virtual time (testing/synctest), over connections in memory, with net/http's HTTP/1.1 and
// HTTP/2. Only row 7 runs in real time, on loopback addresses. The server's answer to a request depends only
// on the seed, the number of the call and the number of the attempt, so it is the same for all clients. The
// clients' random delays and the order of goroutines still vary between runs. Therefore each row runs with
// three seeds, whose results are added up, and a result that is near the limit of a rule has the verdict
// [Close].
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
// Add a [Row] to a function in rows.go, or add a new function to the list in [Rows]. Most rows consist only
// of data:
//
//	{
//		ID: "3/503", Name: "the server restarts: 2s of 503",
//		Rate: 20, Rates: allRates, Patience: 3 * s, Waits: allWaits, Length: 25 * s,
//		Fault: 5 * s, FaultEnd: 7 * s, Recovery: s,
//		Server: During(5*s, 7*s, Unavailable, quick),
//	}
//
// Server is a [Handler]. Compose it from the functions in server.go, such as During and Share, which choose
// between two Handlers, and Takes and Status, which answer. Script changes the network or starts calls at
// given times. For a fault of a new kind, write another function of a few lines. Keep Rate times Length below
// 500, because each call costs about 80 µs of CPU time for each client and seed.
//
// Then run the row 20 times. If it is red, which means that NewClient does not meet a rule, add a line to
// [RedRows] with the package that must change. If the verdict varies between runs, change the row's length or
// rate, so that the result is farther from the limit of the rule.
//
// # Making a row green
//
// Change the package, run the row, and delete the row's line from [RedRows]. The row's test fails as long as
// the row is green and the line is there. The clients' configurations are in clients.go.
//
// planted_test.go plants known mistakes in NewClient's configuration, each of which must turn a certain row
// red. A mistake whose row is red without it is skipped. When that row has turned green, go test -run Planted
// -planted and make harm plant the mistake.
package harm
