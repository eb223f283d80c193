package harm

// RedRows lists the rows whose rules NewClient does not meet today. The tests fail if a row is red and not
// listed, or listed and green. Delete a row's line when its package has been fixed.
var RedRows = []RedRow{
	// The server refuses all connections. Each call makes four attempts, because a call with fewer would be
	// lost in a restart of 200ms. During the seventh call, 25 failures open the breaker. From then on, the
	// breaker opens for less than a second at a time. At one call per second, it therefore admits each
	// further call as a probe. Together, 25 attempts and 23 probes are sent for 30 calls, which is more than
	// the rule allows. NewClient does not open its breaker for longer, because it would then lose more calls
	// than the faults themselves.
	{Row: "4/refused", Package: "resiliencehttp", Cells: `^1/s`},

	// All answers are 503. As in row 4, 25 attempts are sent before the breaker opens, for 7 or 8 calls. At one
	// call per second, nine of ten of the other calls find the breaker's open time over and are sent as probes.
	// Together these are 112 to 115 requests for 100 calls.
	{Row: "8/100", Package: "resiliencehttp", Cells: `^1/s`},

	// The server does not answer for 10s. A probe that is sent shortly before the end of these 10s hangs
	// until its caller's deadline, 3s later. Then the breaker stays open for up to another second. Rule A
	// allows NewClient to lose the calls of 3.3s: 3s of recovery time, and 1% of 30s. In 3 or 4 of 100
	// runs, the three seeds' probes start at such times that NewClient loses more.
	{Row: "5/h1-silent", Package: "resiliencehttp", Cells: `^10/s 3s`, Sometimes: true},
	{Row: "5/h2-silent", Package: "resiliencehttp", Cells: `^10/s 3s`, Sometimes: true},

	// For 15s, the network drops all packets, so dials hang. A client without policies answers all calls
	// whose callers still wait when the 15s are over. Rule A allows NewClient to lose the calls of 2.35s: 2s
	// of recovery time, and 1% of 35s.
	//
	// With a patience of 3s, the breaker has been open for a long time when the 15s end, because 25 calls
	// have missed their deadlines. In the last 3s, it admits only probes. Retries save the calls of the last
	// 0.26 to 0.53s. The other calls of these 3s, except the probes, are lost, and so are the calls until the
	// next probe succeeds.
	//
	// With a patience of 10s and 20 calls per second, the breaker opens 11.25s after the start of the fault,
	// when the 25th dial has hung for 10s. The calls of the remaining 3.75s are lost, except the calls of the
	// last 0.26 to 0.53s.
	//
	// With a patience of 10s and 200 calls per second, the client without policies answers the 1,400 calls of
	// the last 7s. NewClient has only 100 slots, and 600 more calls wait for a slot, each for up to 3s.
	//
	// The row would be green if the breaker did not open, or if there were more slots. But then, if a host is
	// permanently gone, all of its callers would wait until their deadlines.
	{Row: "6/h1-all", Package: "resiliencehttp", Cells: ` (1|3)s$|^(20|200)/s 10s`, Sometimes: true},
	{Row: "6/h2-all", Package: "resiliencehttp", Cells: ` (1|3)s$|^(20|200)/s 10s`, Sometimes: true},

	// The network permanently drops the bytes of existing connections, but new connections work. At 200 calls
	// per second, the calls of the first 0.5s occupy all 100 slots. They hang for up to 10s, until a deadline
	// shows that the connection is dead. Other calls wait for a slot, each for up to 3s. A client without
	// policies has no slots, so its other calls do not wait.
	{Row: "6/h2-old", Package: "resiliencehttp", Cells: `^200/s 10s`},
}
