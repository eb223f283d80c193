package whole_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCIStartsTheServicesThatItsScriptDemands: without one of them, the script fails in every run
// of the workflow, and nobody sees it here, where all of them are running.
func TestCIStartsTheServicesThatItsScriptDemands(t *testing.T) {
	script, err := os.ReadFile("../../.ci/run")
	require.NoError(t, err)
	demanded := regexp.MustCompile(`(?m)^services=\((.*)\)$`).FindSubmatch(script)
	require.NotNil(t, demanded)

	workflow, err := os.ReadFile("../../.github/workflows/ci.yml")
	require.NoError(t, err)
	_, services, ok := strings.Cut(string(workflow), "\n    services:\n")
	require.True(t, ok)
	services, _, ok = strings.Cut(services, "\n    steps:\n")
	require.True(t, ok)
	var started []string
	name := ""
	for line := range strings.Lines(services) {
		if is := regexp.MustCompile(`^      ([a-z]+):$`).FindStringSubmatch(strings.TrimRight(line, "\n")); is != nil {
			name = is[1]
		}
		if port := regexp.MustCompile(`^        ports: \["(\d+):\d+"\]`).FindStringSubmatch(line); port != nil {
			started = append(started, name+":"+port[1])
		}
	}
	want := strings.Fields(string(demanded[1]))
	slices.Sort(want)
	slices.Sort(started)
	require.Equal(t, want, started)
}
