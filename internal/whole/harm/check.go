package harm

import (
	"maps"
	"testing"
)

// An Outcome holds the measurements of all clients in a cell of a row, and the verdict on NewClient.
type Outcome struct {
	Row      *Row
	Cell     Cell
	Clients  map[string]*Measurement // by name of the client
	Verdict  Verdict
	Failures string // the rules that NewClient did not meet
	Package  string // the Package of the cell's line in RedRows; empty if there is no line
}

// Compare runs the row in cell with NewClient and with the other clients, and judges NewClient. Without all,
// it runs the other clients only if the row's rules need them. Compare reports an error if NewClient failed
// and [RedRows] does not list the cell, or if RedRows lists the cell and NewClient did not fail.
func (r *Row) Compare(t *testing.T, cell Cell, all bool, others ...Client) Outcome {
	t.Helper()
	clients := map[string]*Measurement{}
	for _, c := range others {
		if all || r.Must.Goodput == 0 && !r.Must.LoadOnly {
			clients[c.Name] = Run(t, r, cell, c, Seeds...)
		}
	}
	mine := Run(t, r, cell, NewClient, Seeds...)
	o := Outcome{Row: r, Cell: cell, Clients: clients}
	o.Verdict, o.Failures = r.Judge(cell, mine, clients)

	ours := maps.Clone(clients) // the clients without failsafe-go and go-retryablehttp
	delete(ours, Failsafe)
	delete(ours, RetryableHTTP)
	verdict, failures := r.Judge(cell, mine, ours)
	r.check(t, cell, verdict, failures, false)
	if len(ours) < len(clients) && o.Verdict != verdict {
		r.check(t, cell, o.Verdict, o.Failures, true)
	}
	if listed := redRow(RedRows, r, cell, true); listed != nil {
		o.Package = listed.Package
	}
	clients[NewClient.Name] = mine
	return o
}

// check reports an error if the verdict contradicts RedRows.
func (r *Row) check(t *testing.T, cell Cell, v Verdict, failures string, besidePeers bool) {
	t.Helper()
	listed := redRow(RedRows, r, cell, besidePeers)
	switch {
	case v == Red && listed == nil:
		t.Errorf("NewClient does harm in row %s at %v: %s", r.ID, cell, failures)
	case v == Green && listed != nil && !listed.Sometimes:
		t.Errorf("row %s is green at %v now: delete its line from RedRows (package %s)", r.ID, cell, listed.Package)
	}
}
