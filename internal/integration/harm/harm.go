// Package harm tests that the policies do no harm while a server or a network is in trouble: a
// program that uses them must be served at least as well as one that does not. It has tables for
// gRPC, caches in Redis, limits of a fleet, leases and sagas. Each row is one trouble.
//
//	go test -v -run TestHarm ./harm           # all tables
//	go test -v -run TestHarm/gRPC ./harm      # one of them
//	go test -v -run 'TestHarm/gRPC/4$' ./harm # one row
//
// # Reading a row
//
// The first cells say what the trouble is, the next ones what was measured, and the last one is
// the verdict: "ok", or "lost" and the package that has to change. [Lost] lists the lost rows. The
// test fails if a row is lost that is not listed, or if a listed row is ok. Mend a package and
// delete its entries in the same commit.
//
// A row of gRPC compares three clients: plain grpc-go, one with a retrier alone, and one with the
// policies that the doc of resiliencegrpc recommends. Three rules judge the third one:
//
//   - Answers: it answers at least as many calls as the better one of the others, less the calls
//     that arrive within the recovery time of the row, less 1% of all calls.
//   - Refusals: no call is refused if a retry repairs the trouble, or if only a few calls fail.
//   - Load: it makes at most 1.2 attempts per call, plus 10 a second. While the server is down,
//     or fails half of the calls or more, it makes fewer attempts than there are calls. From half
//     of the calls on the rule of answers does not apply, because a breaker should open.
//
// Rows of other tables have a rule of their own, which the table states in its title.
//
// # Adding a row
//
// Add a [Row] to the table, or a grpcRow to that of gRPC. Its Run makes the trouble and returns
// the cells and the broken rules. Judge by counts, such as refused calls or round trips, because
// they do not depend on the speed of the machine. If only a time can show the harm, choose a limit
// at least twice as long as a good run takes, and give the reason for it. Run the row 20 times,
// also while other tests run, before you commit it. If the row is lost, add it to [Lost]. Then bring
// docs/BENCHMARKS.md up to date.
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
	Name  string   // of the subtest
	Title string   // what is measured, and the rule
	Head  []string // of the cells that a Row returns
	Rows  []Row
}

// A Row is one trouble.
type Row struct {
	Name    string // of the subtest, unique in the table
	Trouble string
	Run     func(t *testing.T) Result
}

// A Result is what a row has measured.
type Result struct {
	Cells  []string
	Broken []string // the rules that were broken, with the numbers that show it
}

// Break adds a broken rule to the result, unless ok.
func (r *Result) Break(ok bool, format string, args ...any) {
	if !ok {
		r.Broken = append(r.Broken, fmt.Sprintf(format, args...))
	}
}

// key returns the key of a row in [Lost].
func (tb *Table) key(r Row) string { return tb.Name + "/" + r.Name }

// Run runs all rows in parallel, fails t if a verdict is not the expected one, and logs the table.
// A row that is skipped has no verdict.
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

// markdown returns the table with the rows that have been measured.
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
