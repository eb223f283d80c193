package harm

// RedRows are the rows that NewClient fails today. Delete a line once its package has been fixed: the tests fail if a
// row is red and not listed, or listed and green.
var RedRows = []RedRow{
	// A breaker that opens for less than a second admits a probe for each call at a call a second, after the calls
	// that opened it. NewClient opens no longer, because that loses more calls than the faults do.
	{Row: "4/refused", Package: "resiliencehttp", Cells: `^1/s`},

	// The breaker refuses calls whose dial would have succeeded when the network passes packets again, and the
	// bulkhead those beyond 100 that hang. Nothing distinguishes such a host from a dead one until then.
	{Row: "6/h1-all", Package: "resiliencehttp", Cells: ` (1|3)s$|^(20|200)/s 10s`, Sometimes: true},
	{Row: "6/h2-all", Package: "resiliencehttp", Cells: ` \d+s$`, Sometimes: true},
	{Row: "5/h2-silent", Package: "resiliencehttp", Cells: `^200/s`, Sometimes: true},
	{Row: "5/h1-silent", Package: "resiliencehttp", Cells: `^200/s`, Sometimes: true},

	// The budget limits the retries of NewClient, and go-retryablehttp has none.
	{Row: "14/503", Package: "resiliencehttp", Cells: `^20/s`, Peers: true, Sometimes: true},

	// NewClient's queue refuses patient callers after a second; a longer wait would serve impatient callers worse.
	{Row: "12/polite", Package: "resiliencehttp", Cells: ` 10s$|^20/s 1s`, Sometimes: true},
	{Row: "12/stubborn", Package: "resiliencehttp", Cells: ` 10s$`, Sometimes: true},
}
