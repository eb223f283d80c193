package harm

import (
	"fmt"
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
	lines := t.byRow()
	redLines, red := 0, 0
	for _, l := range lines {
		if n := len(redCells(l)); n > 0 {
			redLines++
			red += n
		}
	}
	fmt.Fprintf(&b, "\n%d of %d rows are red, in %d of %d cells.\n\n", redLines, len(lines), red, len(t.outcomes))
	fmt.Fprintf(&b, "| row | trouble | at | %s | rules not met |\n|---|---|---|%s---|\n",
		strings.Join(t.clients, " | "), strings.Repeat("---|", len(t.clients)))
	for _, l := range lines {
		first := l[0]
		fmt.Fprintf(&b, "| %s | %s | %v |", first.Row.ID, first.Row.Name, first.Cell)
		for _, name := range t.clients {
			fmt.Fprintf(&b, " %s |", metrics(first.Row, first.Clients[name]))
		}
		fmt.Fprintf(&b, " %s |\n", verdicts(l))
	}
	return b.String()
}

// byRow returns the outcomes of each row.
func (t *Table) byRow() (rows [][]Outcome) {
	for i, o := range t.outcomes {
		if i == 0 || o.Row != t.outcomes[i-1].Row {
			rows = append(rows, nil)
		}
		rows[len(rows)-1] = append(rows[len(rows)-1], o)
	}
	return rows
}

// metrics returns the measurements of a client: the share answered, p50 and p99, the requests per call, the time until
// 99% were answered again, and the refusals.
func metrics(r *Row, m *Measurement) string {
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

// verdicts returns the number of red cells of a row, and the rules that the first one does not meet.
func verdicts(cells []Outcome) string {
	red := redCells(cells)
	if len(red) == 0 {
		return ""
	}
	text := "**red**"
	if len(cells) > 1 {
		text = fmt.Sprintf("**red** in %d of %d cells", len(red), len(cells))
	}
	if red[0].Package != "" {
		text += ", until `" + red[0].Package + "` changes"
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
