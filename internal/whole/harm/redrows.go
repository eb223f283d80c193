package harm

// RedRows are the rows that NewClient fails today. Delete a line once its package has been fixed: the tests fail if a
// row is red and not listed, or listed and green.
var RedRows = []RedRow{
	// Failures of calls that were in flight together open the breaker.
	{Row: "2/h2-cold", Package: "breaker"},
	{Row: "2/h2-warm", Package: "breaker"},
	{Row: "2/h1", Package: "breaker"},
	{Row: "2/h1-warm", Package: "breaker"},
	{Row: "3/refused", Package: "breaker"},

	// A stream in progress does not end a run of failures.
	{Row: "14/503", Package: "breaker"},
	{Row: "14/cut-once", Package: "breaker"},

	// The breaker of a host stays open for 10 to 30 seconds.
	{Row: "3/503", Package: "resiliencehttp"},
	{Row: "4/refused", Package: "resiliencehttp", Sometimes: true},
	{Row: "5/h2-silent", Package: "resiliencehttp"},
	{Row: "5/h1-silent", Package: "resiliencehttp"},
	{Row: "6/h1-all", Package: "resiliencehttp"},
	{Row: "19/503", Package: "resiliencehttp"},

	// A silent HTTP/2 connection is never abandoned.
	{Row: "5/h2-blue-green", Package: "resiliencehttp"},
	{Row: "6/h2-all", Package: "resiliencehttp"},
	{Row: "6/h2-old", Package: "resiliencehttp"},

	// The queue serves callers whose time is over.
	{Row: "11/deadline-1.2-1s", Package: "bulkhead"},
	{Row: "11/deadline-2-1s", Package: "bulkhead"},
	{Row: "11/cancel-2-1s", Package: "bulkhead"},

	// A response is held until the first byte of its body, and uploads count as silence.
	{Row: "15/h2-first", Package: "resiliencehttp"},
	{Row: "15/h2-every", Package: "resiliencehttp"},
	{Row: "15/h1-first", Package: "resiliencehttp"},
	{Row: "15/h1-every", Package: "resiliencehttp"},
	{Row: "17/upload", Package: "resiliencehttp"},
	{Row: "17/trickle", Package: "resiliencehttp"},

	// Waiting for a connection of the client's own counts against the server.
	{Row: "18/300ms", Package: "resiliencehttp"},
}
