package harm_test

import (
	"os"
	"runtime/debug"
	"testing"

	"github.com/go-resilience/resilience/internal/whole/harm"
)

// TestMain lets the heap grow: collecting it costs a tenth of the CPU.
func TestMain(m *testing.M) {
	debug.SetGCPercent(500)
	os.Exit(m.Run())
}

// TestRows runs each row at one rate and with one patience. With -short, as under the race detector, it runs them once,
// with NewClient only, and applies no rules.
func TestRows(t *testing.T) {
	for _, r := range harm.Rows() {
		if r.Long {
			continue
		}
		t.Run(r.ID, func(t *testing.T) {
			t.Parallel()
			if testing.Short() {
				harm.Run(t, r, r.Quick(), harm.NewClient, harm.Seeds[0])
				return
			}
			o := r.Compare(t, r.Quick(), false, harm.Plain, harm.Retries)
			t.Logf("%v %s", o.Verdict, o.Failures)
		})
	}
}
