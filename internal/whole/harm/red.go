package harm

import "regexp"

// A RedRow is a row whose rules NewClient does not meet today.
type RedRow struct {
	Row     string // the ID of the Row
	Package string // the package that must change to make the row green, or lost if none will
	Cells   string // a regular expression that matches the red cells, such as `^200/s`; empty means all

	// Peers means that the row is red only if NewClient is also compared with failsafe-go and
	// go-retryablehttp.
	Peers bool

	// Sometimes means that the row is red in some runs and green in others, because NewClient's delays are
	// random.
	Sometimes bool
}

// lost is the Package of rows that stay red by design.
const lost = "none"

// redRow returns the first line of list that matches the row and the cell, or nil. It ignores lines with
// Peers unless besidePeers is set.
func redRow(list []RedRow, r *Row, cell Cell, besidePeers bool) *RedRow {
	for i, red := range list {
		if red.Row == r.ID && (besidePeers || !red.Peers) && regexp.MustCompile(red.Cells).MatchString(cell.String()) {
			return &list[i]
		}
	}
	return nil
}
