// Package harm tests that the policies do no harm while a server or a network is in trouble: a program that uses the
// policies must be served at least as well as a program that does not. There are tables for gRPC, caches in Redis,
// limits of package fleet, leases and sagas. Each row of a table is one trouble.
//
//	go test -v -run TestHarm ./harm           # all tables
//	go test -v -run TestHarm/gRPC ./harm      # one table
//	go test -v -run 'TestHarm/gRPC/4$' ./harm # one row
//
// # Reading a row
//
// The first cells of a row describe the trouble. The next cells contain the measurements. The last cell is the
// verdict: "ok", or "lost" and the package that must be fixed. [Lost] lists the rows that are known to be lost. The
// test fails if a row is lost that is not listed, or if a listed row is ok. If you fix a package, delete its entries
// in the same commit.
//
// A row of the gRPC table compares three clients: plain grpc-go, a client with only a retrier, and a client with the
// policies that the documentation of resiliencegrpc recommends. Three rules apply to the client with the policies:
//
//   - Answers: the client answers at least as many calls as the better one of the other clients. Two numbers are
//     subtracted from that number: the calls that arrive within the recovery time of the row, and 1% of all calls.
//   - Refusals: no call is refused if a retry repairs the trouble, or if only a few calls fail.
//   - Load: the client makes at most 1.2 attempts per call, plus 10 per second. If the server is down, or if at least
//     half of the calls fail, the client makes fewer attempts than there are calls. In this case, a breaker should
//     open, so the rule about answers does not apply.
//
// Each of the other tables has its own rule, which is in the table's title.
//
// # Adding a row
//
// Add a [Row] to a table, or a grpcRow to the gRPC table. The row's Run function causes the trouble and returns the
// cells and the broken rules. Let the rules depend on counts, such as refused calls or round trips, because counts do
// not depend on the speed of the machine. If only a time can show the harm, choose a limit that is at least twice as
// long as a good run takes, and give the reason for the limit. Before you commit the row, run it 20 times, including
// runs in parallel with other tests. If the row is lost, add it to [Lost]. Then update docs/BENCHMARKS.md.
package harm

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
)

// A Table is a list of troubles that are judged by the same rule.
type Table struct {
	Name  string   // name of the subtest
	Title string   // describes the measurements and the rule
	Head  []string // headings of the cells that a Row returns
	Rows  []Row
}

// A Row is one trouble and its test.
type Row struct {
	Name    string // name of the subtest, unique in the table
	Trouble string
	Run     func(t *testing.T) Result
}

// A Result contains the measurements of a row.
type Result struct {
	Cells  []string
	Broken []string // the broken rules, with the numbers that show the violation
}

// Break adds a broken rule to the result unless ok is true.
func (r *Result) Break(ok bool, format string, args ...any) {
	if !ok {
		r.Broken = append(r.Broken, fmt.Sprintf(format, args...))
	}
}

// key returns the key of a row in [Lost].
func (tb *Table) key(r Row) string { return tb.Name + "/" + r.Name }

// Run runs all rows in parallel. It fails t if a verdict is not the expected verdict, and logs the table. A row that
// is skipped has no verdict.
func (tb *Table) Run(t *testing.T) {
	cells := make([][]string, len(tb.Rows))
	var mu sync.Mutex
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		t.Log("\n" + tb.markdown(cells))
	})
	for i, row := range tb.Rows {
		t.Run(row.Name, func(t *testing.T) {
			t.Parallel()
			result := row.Run(t)
			fault, listed := Lost[tb.key(row)]
			verdict := "ok"
			if len(result.Broken) > 0 {
				verdict = "lost: " + fault
				if !listed {
					t.Errorf("%s (%s): %s", tb.key(row), row.Trouble, strings.Join(result.Broken, "; "))
				}
				t.Log(strings.Join(result.Broken, "; "))
			} else if listed {
				t.Errorf("%s (%s) is no longer lost: delete its entry in lost.go", tb.key(row), row.Trouble)
			}
			mu.Lock()
			defer mu.Unlock()
			cells[i] = slices.Concat([]string{row.Name, row.Trouble}, result.Cells, []string{verdict})
		})
	}
}

// markdown returns the table as Markdown, with the rows that have been measured.
func (tb *Table) markdown(rows [][]string) string {
	var b strings.Builder
	head := slices.Concat([]string{"row", "trouble"}, tb.Head, []string{"verdict"})
	fmt.Fprintf(&b, "### %s\n\n%s\n\n| %s |\n|%s\n", tb.Name, tb.Title, strings.Join(head, " | "),
		strings.Repeat("---|", len(head)))
	for _, row := range rows {
		if row != nil {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		}
	}
	return b.String()
}
