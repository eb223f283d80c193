package harm

import (
	"maps"
	"testing"
)

// An Outcome has the measurements of all clients in a cell of a row, and the verdict on NewClient.
type Outcome struct {
	Row      *Row
	Cell     Cell
	Clients  map[string]*Measurement // by the name of the client
	Verdict  Verdict
	Failures string // the rules that NewClient did not meet
	Package  string // the package that RedRows has for the cell; empty if it is not listed
}

// Compare runs the row in cell with NewClient and with the others to which the row compares it, or with all others
// if all is set. It reports an error if NewClient failed and [RedRows] does not list the cell, or if it lists the cell
// and NewClient did not fail.
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

	ours := maps.Clone(clients) // without the peers
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

// check reports an error if the verdict is not the listed one.
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
