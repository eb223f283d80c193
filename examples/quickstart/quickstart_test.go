package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
)

// TestQuickstartShowsTheDifference checks only results that do not depend on the machine's speed.
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

// TestQuickstartServesBothSides checks the data that the page of -serve draws.
func TestQuickstartServesBothSides(t *testing.T) {
	t.Parallel()
	s := newScenario(7)
	defer s.close()
	policies := console.New(s.policies, console.Config{})
	defer policies.Close()
	r := newRecorder(s)
	server := httptest.NewServer(pages(r, policies))
	defer server.Close()
	get := func(path string) string {
		res, err := http.Get(server.URL + path)
		require.NoError(t, err)
		defer res.Body.Close()
		require.Equal(t, http.StatusOK, res.StatusCode, path)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		return string(body)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	_ = s.run(ctx, 7, func(phase int) {
		if r.record(phase); phase == 1 {
			stop()
		}
	})
	r.conclude()
	var live struct {
		Phases []phaseReport
		Slices []slice
		Last   string
	}
	require.NoError(t, json.Unmarshal([]byte(get("/live")), &live))
	require.Len(t, live.Phases, len(badHalfMinute))
	require.NotEmpty(t, live.Slices)
	require.Contains(t, live.Last, "Of the same")
	calls := 0
	for _, s := range live.Slices {
		require.Positive(t, s.Seconds)
		calls += s.Plain.Answered + s.Plain.Failed
	}
	require.Positive(t, calls)
	require.Contains(t, get("/"), "compare.js")
	require.Contains(t, get("/console/"), "breaker")
}

func output(t *testing.T, asJSON bool) string {
	t.Helper()
	t.Parallel()
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, show(t.Context(), 7, asJSON, f))
	_, err = f.Seek(0, io.SeekStart)
	require.NoError(t, err)
	out, err := io.ReadAll(f)
	require.NoError(t, err)
	return string(out)
}
