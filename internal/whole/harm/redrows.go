package harm

// RedRows are the rows that NewClient fails today. Delete a line once its package has been fixed: the tests fail if a
// row is red and not listed, or listed and green.
var RedRows = []RedRow{
	// The breaker stays open for 10 to 30 seconds, so that a probe may take as long as an answer.
	{Row: "3/refused", Package: "resiliencehttp", Cells: `^50/s`},
	{Row: "3/refused", Package: "resiliencehttp", Cells: `^20/s`, Sometimes: true},
	{Row: "4/refused", Package: "resiliencehttp", Sometimes: true},
	{Row: "5/h2-silent", Package: "resiliencehttp", Cells: `^200/s`, Sometimes: true},
	{Row: "5/h1-silent", Package: "resiliencehttp", Cells: `^200/s`, Sometimes: true},
	{Row: "6/h1-all", Package: "resiliencehttp", Cells: ` (1|3)s$|^(20|200)/s 10s`},
	{Row: "12/polite", Package: "resiliencehttp", Cells: `^20/s 1s`, Sometimes: true},

	// NewClient makes three attempts, go-retryablehttp five.
	{Row: "14/503", Package: "resiliencehttp", Cells: `^20/s`, Peers: true},

	// A silent HTTP/2 connection is never abandoned.
	{Row: "6/h2-all", Package: "resiliencehttp", Cells: ` \d+s$`, Sometimes: true},

	// NewClient's queue refuses patient callers after a second.
	{Row: "12/polite", Package: "resiliencehttp", Cells: ` 10s$`},
	{Row: "12/stubborn", Package: "resiliencehttp", Cells: ` 10s$`},
}
