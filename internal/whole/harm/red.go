package harm

import "regexp"

// A RedRow says that NewClient fails a row today, and where that will be fixed.
type RedRow struct {
	Row     string // the ID
	Package string // the package whose change makes the row green, or lost
	Cells   string // a regular expression of the cells, such as `^200/s`; empty means all

	// Peers means that the row is red only beside failsafe-go and go-retryablehttp, in internal/benchmarks.
	Peers bool

	// Sometimes means that chance decides, because NewClient's delays are random. The row may be green, too.
	Sometimes bool
}

// lost is the Package of the rows that the design gives up.
const lost = "none"

// redRow returns the line of list for a cell, or nil. Lines with Peers count only if besidePeers is set.
func redRow(list []RedRow, r *Row, cell Cell, besidePeers bool) *RedRow {
	for i, red := range list {
		if red.Row == r.ID && (besidePeers || !red.Peers) && regexp.MustCompile(red.Cells).MatchString(cell.String()) {
			return &list[i]
		}
	}
	return nil
}
