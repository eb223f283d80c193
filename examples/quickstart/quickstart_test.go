package main

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestQuickstartShowsTheDifference runs it as -json does and holds what does not
// depend on how fast the machine is.
func TestQuickstartShowsTheDifference(t *testing.T) {
	var r report
	require.NoError(t, json.Unmarshal([]byte(output(t, true)), &r))

	require.Len(t, r.Phases, len(badHalfMinute))
	var outage, outageResilient int64
	for i, p := range r.Phases {
		require.Equal(t, badHalfMinute[i].Name, p.Name)
		if badHalfMinute[i].Outage {
			outage += p.Plain.BackendRequests
			outageResilient += p.Resilient.BackendRequests
		}
	}
	for _, s := range []summary{r.Plain, r.Resilient} {
		require.Equal(t, s.Calls, s.Answered+s.Failed)
		require.LessOrEqual(t, s.Stale, s.Answered)
	}
	require.Equal(t, r.Plain.Calls, r.Resilient.Calls)
	require.Zero(t, r.Plain.Stale)
	require.Greater(t, r.Resilient.Answered, r.Plain.Answered)
	require.Less(t, outageResilient, outage)
}

func TestQuickstartDrawsPlainLinesIntoAFile(t *testing.T) {
	text := output(t, false)
	for _, p := range badHalfMinute {
		require.Contains(t, text, "\n"+p.Name+" ")
	}
	require.NotContains(t, text, "\x1b")
	require.Contains(t, text, "breaker: ")
	require.True(t, strings.HasSuffix(text, ".\n"))
}

func output(t *testing.T, asJSON bool) string {
	t.Helper()
	t.Parallel()
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, show(7, asJSON, f))
	_, err = f.Seek(0, io.SeekStart)
	require.NoError(t, err)
	out, err := io.ReadAll(f)
	require.NoError(t, err)
	return string(out)
}
