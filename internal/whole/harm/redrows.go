package harm

// RedRows are the rows that NewClient fails today. Delete a line once its package has been fixed: the tests fail if a
// row is red and not listed, or listed and green.
var RedRows = []RedRow{
	// The first call makes four attempts, or a restart of 200ms would lose it. So do the next ones, until 25 failures
	// open the breaker during the seventh call. Then the breaker opens for less than a second at a time, and at one call
	// a second it admits each call as a probe. Thus 25 attempts and 23 probes are sent for 30 calls. NewClient opens no
	// longer than that, because a longer time loses more calls than the faults do.
	{Row: "4/refused", Package: "resiliencehttp", Cells: `^1/s`},

	// The server is silent for 10s. A probe that is sent shortly before the end of the silence hangs until the deadline
	// of its caller, 3s later, and then the breaker stays open for up to another second. Rule A allows NewClient to lose
	// the calls of 3.3s: 3s of recovery, and 1% of 30s. In 3 of 100 runs, the probes of the seeds fall so that it loses
	// more.
	{Row: "5/h1-silent", Package: "resiliencehttp", Cells: `^10/s 3s`, Sometimes: true},

	// Packets are dropped for 15s, and dials hang. A client without policies answers all calls whose patience outlasts
	// the 15s. Rule A allows NewClient to lose the calls of 2.35s: 2s of recovery, and 1% of 35s.
	//
	// With a patience of 3s, 25 missed deadlines have opened the breaker long before. It admits only probes in the last
	// 3s, and the retries rescue the calls of the last 0.35 to 0.7s. The calls of 2.3 to 2.65s are lost, except for the
	// probes, and those until the next probe succeeds.
	//
	// With a patience of 10s at 20 calls a second, the breaker opens 11.25s after the start, when the 25th dial has
	// hung for 10s. The calls of the remaining 3.75s are lost, except for the last 0.35 to 0.7s.
	//
	// With a patience of 10s at 200 calls a second, the client without policies answers the calls of the last 7s, which
	// are 1,400. NewClient has 100 slots, and 600 calls wait for one, for up to 3s.
	//
	// A breaker that does not open, or more slots, would make the row green. Both would leave the callers of a host that
	// is gone for good to wait for their deadlines.
	{Row: "6/h1-all", Package: "resiliencehttp", Cells: ` (1|3)s$|^(20|200)/s 10s`, Sometimes: true},
	{Row: "6/h2-all", Package: "resiliencehttp", Cells: ` (1|3)s$|^(20|200)/s 10s`, Sometimes: true},

	// Bytes of old connections are dropped for good, and new connections work. At 200 calls a second, the calls of the
	// first half second occupy all 100 slots. They hang until a deadline shows that the connection is silent, for up to
	// 10s, and the other calls wait for a slot for up to 3s. A client without policies has no slots.
	{Row: "6/h2-old", Package: "resiliencehttp", Cells: `^200/s 10s`},
}
