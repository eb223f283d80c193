package console_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The console reads policies by their descriptions. It knows only sagas.
func TestImportsNoPatternButSaga(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, ".").Output()
	require.NoError(t, err)
	const module = "github.com/go-resilience/resilience/"
	var ours []string
	for pkg := range strings.FieldsSeq(string(out)) {
		if own, ok := strings.CutPrefix(pkg, module); ok {
			ours = append(ours, own)
			continue
		}
		require.NotContains(t, pkg, ".", "nothing but the standard library")
	}
	require.ElementsMatch(t, []string{"policy", "registry", "saga"}, ours)
}
