package harm

import (
	"fmt"
	"strings"
	"time"
)

// A Table holds the measurements of rows, and formats them in Markdown.
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

// Add adds an outcome. The outcomes of a row must be added one after another, the outcome of the cell
// [Row.Quick] first.
func (t *Table) Add(o Outcome) { t.outcomes = append(t.outcomes, o) }

// String returns the table in Markdown. It has a line for each row, with the measurements of the row's Quick
// cell and the verdicts of all its cells.
func (t *Table) String() string {
	var b strings.Builder
	lines := t.byRow()
	t.head(&b, lines, "rules not met")
	for _, l := range lines {
		t.line(&b, l[0], verdicts(l))
	}
	return b.String()
}

// Summary returns the table for docs/BENCHMARKS.md. It has a line for each fault: the rows of a fault have
// the same number in their ID. A line shows the measurements of the fault's row whose Quick cell is the worst
// for NewClient, and the number of red cells in all rows of the fault. If there are none, and if the clients'
// shares of answered calls in the shown cell differ by less than 1%, the fault is only listed below the
// table.
func (t *Table) Summary() string {
	var b, same strings.Builder
	lines := t.byRow()
	t.head(&b, lines, "red cells")
	for len(lines) > 0 {
		number, _, _ := strings.Cut(lines[0][0].Row.ID, "/")
		var worst Outcome
		cells, red := 0, 0
		for len(lines) > 0 && strings.HasPrefix(lines[0][0].Row.ID, number+"/") {
			if o := lines[0][0]; worst.Row == nil || o.lead() < worst.lead() {
				worst = o
			}
			cells += len(lines[0])
			red += len(redCells(lines[0]))
			lines = lines[1:]
		}
		if red == 0 && worst.spread() < 0.01 {
			fmt.Fprintf(&same, "- %s: %s\n", worst.Row.ID, worst.Row.Name)
			continue
		}
		t.line(&b, worst, fmt.Sprintf("%d of %d", red, cells))
	}
	if same.Len() > 0 {
		fmt.Fprintf(&b, "\nIn these rows the shares of answered calls differ by less than 1%%:\n\n%s", same.String())
	}
	return b.String()
}

// lead returns NewClient's share of answered calls minus the best share of the other clients.
func (o Outcome) lead() float64 {
	best := 0.0
	for name, m := range o.Clients {
		if name != NewClient.Name {
			best = max(best, m.Share())
		}
	}
	return o.Clients[NewClient.Name].Share() - best
}

// spread returns the difference between the best and the worst share of answered calls.
func (o Outcome) spread() float64 {
	least, most := 1.0, 0.0
	for _, m := range o.Clients {
		least, most = min(least, m.Share()), max(most, m.Share())
	}
	return most - least
}

// head writes the number of red rows and cells, and the header of the table.
func (t *Table) head(b *strings.Builder, lines [][]Outcome, last string) {
	redLines, red := 0, 0
	for _, l := range lines {
		if n := len(redCells(l)); n > 0 {
			redLines++
			red += n
		}
	}
	fmt.Fprintf(b, "\n%d of %d rows are red, in %d of %d cells.\n\n", redLines, len(lines), red, len(t.outcomes))
	fmt.Fprintf(b, "| row | trouble | at | %s | %s |\n|---|---|---|%s---|\n",
		strings.Join(t.clients, " | "), last, strings.Repeat("---|", len(t.clients)))
}

// line writes the line of an outcome. last is the text of the last column.
func (t *Table) line(b *strings.Builder, o Outcome, last string) {
	fmt.Fprintf(b, "| %s | %s | %v |", o.Row.ID, o.Row.Name, o.Cell)
	for _, name := range t.clients {
		fmt.Fprintf(b, " %s |", metrics(o.Row, o.Clients[name]))
	}
	fmt.Fprintf(b, " %s |\n", last)
}

// byRow groups the outcomes by row.
func (t *Table) byRow() (rows [][]Outcome) {
	for i, o := range t.outcomes {
		if i == 0 || o.Row != t.outcomes[i-1].Row {
			rows = append(rows, nil)
		}
		rows[len(rows)-1] = append(rows[len(rows)-1], o)
	}
	return rows
}

// metrics formats the measurements of a client: the share of answered calls, the 50th and 99th percentiles of
// their time, the requests per call, the time until 99% of calls were answered again, and the number of
// refused calls.
func metrics(r *Row, m *Measurement) string {
	if m == nil {
		return ""
	}
	words := []string{fmt.Sprintf("%.1f%%", 100*m.Share())}
	if m.Answered > 0 {
		words = append(words, fmt.Sprintf("%s/%s", seconds(m.P50()), seconds(m.P99())))
	}
	words = append(words, fmt.Sprintf("x%.2f", m.SentPerCall()))
	if r.FaultEnd > 0 && m.Back > 0 {
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

// verdicts returns a text with the number of red cells of a row, and the rules that NewClient did not meet in
// the first red cell.
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
