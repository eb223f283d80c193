package benchmarks

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/failsafe-go/failsafe-go/failsafehttp"
	"github.com/hashicorp/go-retryablehttp"

	"github.com/go-resilience/resilience/internal/whole/harm"
)

var harmTable = flag.String("harm", "",
	"run all cells of the rows under faults and write a line for each trouble to this file; - prints all rows")

// peers are the clients of other modules that NewClient is compared to under faults, as their documentation
// recommends them.
var peers = []harm.Client{
	{Name: harm.Failsafe, New: func(base *http.Transport, _ harm.Config) *http.Client {
		policy := failsafehttp.NewRetryPolicyBuilder().Build()
		return &http.Client{Transport: failsafehttp.NewRoundTripper(base, policy)}
	}},
	{Name: harm.RetryableHTTP, New: func(base *http.Transport, _ harm.Config) *http.Client {
		client := retryablehttp.NewClient()
		client.HTTPClient = &http.Client{Transport: base}
		client.Logger = nil
		return client.StandardClient()
	}},
}

// TestHarm runs the rows of package harm beside the peers. With -harm it runs all cells and writes the table "Under
// faults" of docs/BENCHMARKS.md.
func TestHarm(t *testing.T) {
	others := append([]harm.Client{harm.Plain, harm.Retries}, peers...)
	full := *harmTable != ""
	rows := harm.Rows()
	outcomes := make([][]harm.Outcome, len(rows))
	t.Run("rows", func(t *testing.T) {
		for i, r := range rows {
			if r.Long && !full {
				continue
			}
			t.Run(r.ID, func(t *testing.T) {
				t.Parallel()
				outcomes[i] = compare(t, r, full, others)
			})
		}
	})
	if !full || t.Failed() && *harmTable != "-" {
		return
	}
	table := harm.NewTable(others...)
	for _, row := range outcomes {
		for _, o := range row {
			table.Add(o)
		}
	}
	if *harmTable == "-" {
		fmt.Print(table)
		return
	}
	if err := os.WriteFile(*harmTable, []byte(table.Summary()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// compare runs a row in its quick cell, or in all its cells if full is set.
func compare(t *testing.T, r *harm.Row, full bool, others []harm.Client) (outcomes []harm.Outcome) {
	cells := []harm.Cell{r.Quick()}
	if full {
		cells = r.Cells()
	}
	for i, cell := range cells {
		start := time.Now()
		outcomes = append(outcomes, r.Compare(t, cell, full && i == 0, others...))
		if o := outcomes[i]; full {
			progress.Lock()
			fmt.Fprintln(os.Stderr, r.ID, cell, o.Verdict, o.Failures, time.Since(start).Round(time.Millisecond))
			progress.Unlock()
		}
	}
	return outcomes
}

// progress keeps the lines of a long run apart.
var progress sync.Mutex
