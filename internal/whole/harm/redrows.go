package harm

// RedRows are the rows that NewClient fails today. Delete a line once its package has been fixed: the tests fail if a
// row is red and not listed, or listed and green.
var RedRows = []RedRow{
	// The breaker stays open for 10 to 30 seconds, so that a probe may take as long as an answer.
	{Row: "3/refused", Package: "resiliencehttp", Cells: `^50/s`},
	{Row: "3/refused", Package: "resiliencehttp", Cells: `^20/s`, Sometimes: true},
	{Row: "3/503", Package: "resiliencehttp", Cells: `^(20|200)/s`},
	{Row: "4/refused", Package: "resiliencehttp", Sometimes: true},
	{Row: "5/h2-silent", Package: "resiliencehttp", Cells: `^(10|20)/s 3s|^1/s 1s`},
	{Row: "5/h2-silent", Package: "resiliencehttp", Cells: `^200/s`, Sometimes: true},
	{Row: "5/h1-silent", Package: "resiliencehttp", Cells: `^(10|20)/s 3s|^1/s 1s`},
	{Row: "5/h1-silent", Package: "resiliencehttp", Cells: `^200/s`, Sometimes: true},
	{Row: "6/h1-all", Package: "resiliencehttp", Cells: ` (1|3)s$|^(20|200)/s 10s`},
	{Row: "19/503", Package: "resiliencehttp", Cells: `^(20|200)/s`},
	{Row: "12/polite", Package: "resiliencehttp", Cells: `^20/s 1s`, Sometimes: true},

	// NewClient makes three attempts, go-retryablehttp five.
	{Row: "14/503", Package: "resiliencehttp", Cells: `^20/s`, Peers: true},

	// A silent HTTP/2 connection is never abandoned.
	{Row: "5/h2-blue-green", Package: "resiliencehttp", Cells: ` \d+s$`},
	{Row: "6/h2-all", Package: "resiliencehttp", Cells: ` \d+s$`},
	{Row: "6/h2-old", Package: "resiliencehttp", Cells: ` \d+s$`},

	// NewClient's queue refuses patient callers after a second.
	{Row: "12/polite", Package: "resiliencehttp", Cells: ` 10s$`},
	{Row: "12/stubborn", Package: "resiliencehttp", Cells: ` 10s$`},

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
