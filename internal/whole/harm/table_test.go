package harm

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTable(t *testing.T) {
	down := &Row{ID: "4/refused", Name: "down", FaultEnd: s}
	well := &Row{ID: "1/0.5", Name: "none"}
	mine := measured(900, func(m *Measurement) { m.Back, m.Refused = 2*s, 5 })
	table := NewTable(Plain)
	clients := map[string]*Measurement{NewClient.Name: mine, Plain.Name: measured(1000)}
	table.Add(Outcome{Row: well, Cell: Cell{10, s}, Clients: clients, Verdict: Green})
	table.Add(Outcome{Row: down, Cell: Cell{10, s}, Clients: clients, Verdict: Close})
	table.Add(Outcome{
		Row: down, Cell: Cell{20, s}, Clients: map[string]*Measurement{NewClient.Name: mine},
		Verdict: Red, Failures: "5 refused", Package: "breaker",
	})
	require.Equal(t, []string{
		"1 of 2 rows are red, in 1 of 3 cells.",
		"",
		"| row | trouble | at | NewClient | plain | rules not met |",
		"|---|---|---|---|---|---|",
		"| 1/0.5 | none | 10/s 1s | 90.0%, 1s/1s, x1.00, 5 refused | 100.0%, 1s/1s, x1.00 |  |",
		"| 4/refused | down | 10/s 1s | 90.0%, 1s/1s, x1.00, +2.0s, 5 refused | 100.0%, 1s/1s, x1.00 | " +
			"**red** in 1 of 2 cells, until `breaker` changes; 20/s 1s: 5 refused |",
	}, strings.Split(strings.TrimSpace(table.String()), "\n"))

	unlucky := &Row{ID: "4/503", Name: "503"}
	behind := map[string]*Measurement{NewClient.Name: measured(800), Plain.Name: measured(1000)}
	table.Add(Outcome{Row: unlucky, Cell: Cell{10, s}, Clients: behind, Verdict: Green})
	same := &Row{ID: "7/hole", Name: "a black hole"}
	table.Add(Outcome{Row: same, Cell: Cell{10, s}, Clients: map[string]*Measurement{
		NewClient.Name: measured(995), Plain.Name: measured(1000),
	}, Verdict: Green})
	require.Equal(t, []string{
		"1 of 4 rows are red, in 1 of 5 cells.",
		"",
		"| row | trouble | at | NewClient | plain | red cells |",
		"|---|---|---|---|---|---|",
		"| 1/0.5 | none | 10/s 1s | 90.0%, 1s/1s, x1.00, 5 refused | 100.0%, 1s/1s, x1.00 | 0 of 1 |",
		"| 4/503 | 503 | 10/s 1s | 80.0%, 1s/1s, x1.00 | 100.0%, 1s/1s, x1.00 | 1 of 3 |",
		"",
		"In these rows the shares of answered calls differ by less than 1%:",
		"",
		"- 7/hole: a black hole",
	}, strings.Split(strings.TrimSpace(table.Summary()), "\n"))
}
