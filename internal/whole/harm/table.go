package harm

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A Table is the table of docs/BENCHMARKS.md.
type Table struct {
	clients  []string
	outcomes []Outcome
}

// NewTable returns a table with a column for each client, NewClient first.
func NewTable(others ...Client) *Table {
	t := &Table{clients: []string{NewClient.Name}}
	for _, c := range others {
		t.clients = append(t.clients, c.Name)
	}
	return t
}

// Add adds an outcome. The outcomes of a row must follow each other, that of Quick first.
func (t *Table) Add(o Outcome) { t.outcomes = append(t.outcomes, o) }

// String returns the table in Markdown: a line for each row, with the measurements of its quick cell and the verdicts
// of all cells.
func (t *Table) String() string {
	var b strings.Builder
	red, cells := 0, 0
	for _, o := range t.outcomes {
		if cells++; o.Verdict == Red {
			red++
		}
	}
	lines := slices.Collect(t.rows())
	redLines := 0
	for _, l := range lines {
		if len(redCells(l)) > 0 {
			redLines++
		}
	}
	fmt.Fprintf(&b, "\n%d of %d rows are red, in %d of %d cells.\n\n", redLines, len(lines), red, cells)
	fmt.Fprintf(&b, "| row | trouble | at | %s | rules not met |\n|---|---|---|%s---|\n",
		strings.Join(t.clients, " | "), strings.Repeat("---|", len(t.clients)))
	for _, l := range lines {
		first := l[0]
		fmt.Fprintf(&b, "| %s | %s | %v |", first.Row.ID, first.Row.Name, first.Cell)
		for _, name := range t.clients {
			fmt.Fprintf(&b, " %s |", figures(first.Row, first.Clients[name]))
		}
		fmt.Fprintf(&b, " %s |\n", verdicts(l))
	}
	return b.String()
}

// rows yields the outcomes of each row.
func (t *Table) rows() func(yield func([]Outcome) bool) {
	return func(yield func([]Outcome) bool) {
		for rest := t.outcomes; len(rest) > 0; {
			n := slices.IndexFunc(rest, func(o Outcome) bool { return o.Row != rest[0].Row })
			if n < 0 {
				n = len(rest)
			}
			if !yield(rest[:n]) {
				return
			}
			rest = rest[n:]
		}
	}
}

// figures returns the measurements of a client: the share answered, p50 and p99, the requests per call, the time until
// 99% were answered again, and the refusals.
func figures(r *Row, m *Measurement) string {
	if m == nil {
		return ""
	}
	words := []string{fmt.Sprintf("%.1f%%", 100*m.Share())}
	if m.Answered > 0 {
		words = append(words, fmt.Sprintf("%s/%s", seconds(m.P50()), seconds(m.P99())))
	}
	words = append(words, fmt.Sprintf("x%.2f", m.SentPerCall()))
	if r.FaultEnd > 0 {
		words = append(words, fmt.Sprintf("+%.1fs", m.Back.Seconds()))
	}
	if m.Refused > 0 {
		words = append(words, fmt.Sprintf("%d refused", m.Refused))
	}
	return strings.Join(words, ", ")
}

func seconds(d time.Duration) string {
	return strings.ReplaceAll(round(d).String(), "m0s", "m")
}

// verdicts returns what is red in the cells of a row.
func verdicts(cells []Outcome) string {
	red := redCells(cells)
	if len(red) == 0 {
		return ""
	}
	text := "**red**"
	if len(red) < len(cells) || len(cells) > 1 {
		text = fmt.Sprintf("**red** in %d of %d cells", len(red), len(cells))
	}
	return fmt.Sprintf("%s; %v: %s", text, red[0].Cell, red[0].Failures)
}

func redCells(cells []Outcome) (red []Outcome) {
	for _, o := range cells {
		if o.Verdict == Red {
			red = append(red, o)
		}
	}
	return red
}
