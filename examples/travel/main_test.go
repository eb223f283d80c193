package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMain runs the tests. If a test has started the test binary, it runs the program instead.
func TestMain(m *testing.M) {
	if os.Getenv("TRAVEL") != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func travel(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "TRAVEL=1")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// requireEnd checks the results of both trips. Bob still owes the part of his flights that the
// companies do not refund.
func requireEnd(t *testing.T, out string) {
	t.Helper()
	require.Contains(t, out, "ada: error <nil>; not paid yet: 0.00\n")
	require.Contains(t, out,
		"bob: error saga: trip \"bob\": compensated: step charge: card declined; not paid yet: 70.00\n")
}

func TestTravel(t *testing.T) {
	out, err := travel(t, "-db", filepath.Join(t.TempDir(), "travel.db"))
	require.NoError(t, err, out)
	requireEnd(t, out)
}

func TestTravelFinishesAfterCrash(t *testing.T) {
	for _, point := range []string{
		"outward/do", "onward/do", "return/do", "hotel/do", "charge/do", "ticket/do",
		"hotel/undo", "return/undo", "onward/undo", "outward/undo",
	} {
		t.Run(strings.ReplaceAll(point, "/", "-"), func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "travel.db")
			out, err := travel(t, "-db", file, "-crash", point)
			require.ErrorContains(t, err, "killed", out)
			require.FileExists(t, file)
			out, err = travel(t, "-db", file)
			require.NoError(t, err, out)
			requireEnd(t, out)
			require.NoFileExists(t, file)
		})
	}
}
