package harm

import "regexp"

// A RedRow is a row that NewClient fails today.
type RedRow struct {
	Row     string // the ID
	Package string // the package whose change will make the row green, or lost
	Cells   string // a regular expression of the cells, such as `^200/s`; empty means all

	// Peers means that the row is red only in comparison with failsafe-go and go-retryablehttp.
	Peers bool

	// Sometimes means that chance decides, because NewClient's delays are random. The row may also be green.
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
