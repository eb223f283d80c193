package main

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestClientOfOneLineAnswersAsOftenAsTheQuickstarts runs both at the same time.
func TestClientOfOneLineAnswersAsOftenAsTheQuickstarts(t *testing.T) {
	t.Parallel()
	quickstart := exec.CommandContext(t.Context(), "go", "run", "../quickstart", "-json", "-seed", "7")
	var stdout, stderr strings.Builder
	quickstart.Stdout, quickstart.Stderr = &stdout, &stderr
	require.NoError(t, quickstart.Start())

	var out strings.Builder
	phases, err := run(&out)
	require.NoError(t, err)
	calls, answered := 0, 0
	for _, p := range phases {
		calls += p.calls
		answered += p.answered
		require.Contains(t, out.String(), "\n"+p.name+" ")
		require.LessOrEqual(t, p.stale, p.answered)
	}
	require.Equal(t, 2100, calls)
	require.Contains(t, out.String(), "breaker.transitions{state=open}")

	require.NoError(t, quickstart.Wait(), stderr.String())
	var own struct {
		Resilient struct{ Calls, Answered int }
	}
	require.NoError(t, json.Unmarshal([]byte(stdout.String()), &own))
	require.Equal(t, calls, own.Resilient.Calls)
	require.GreaterOrEqual(t, share(answered, calls), share(own.Resilient.Answered, own.Resilient.Calls)-0.02)
}

func share(n, of int) float64 { return float64(n) / float64(of) }
