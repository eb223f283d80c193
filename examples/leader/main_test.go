package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMain runs the tests or, where a test starts it again, the program, which starts
// itself again too.
func TestMain(m *testing.M) {
	if os.Getenv("LEADER") != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestLeader(t *testing.T) {
	cmd := exec.Command(os.Args[0], "-kills", "2")
	cmd.Env = append(os.Environ(), "LEADER=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	text := string(out)
	require.Equal(t, 2, strings.Count(text, "kill "), text)
	require.Equal(t, 3, strings.Count(text, "nobody has led for"), text)
	require.Regexp(t, `[1-9][0-9]* ticks of [1-9][0-9]* leaders, 0 out of order`, text)
}
