package docs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// The policy and the adapter of adapter.md are built, vetted and tested in a separate module, as a
// user's would be, so they cannot import internal packages.
func TestCodeOfAdapterPage(t *testing.T) {
	page, err := os.ReadFile("adapter.md")
	require.NoError(t, err)
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	dir := t.TempDir()
	files := regexp.MustCompile("(?ms)^```go (\\S+)\n(.*?)^```$").FindAllSubmatch(page, -1)
	require.Len(t, files, 3)
	for _, file := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, string(file[1])), file[2], 0o600))
	}
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.sum"), sums, 0o600))
	const module = "github.com/go-resilience/resilience"
	run := func(args ...string) {
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		cmd.Env = append(cmd.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
		out, err := cmd.CombinedOutput()
		require.NoErrorf(t, err, "go %v\n%s", args, out)
	}
	run("mod", "init", "example.com/adapter")
	run("mod", "edit", "-replace", module+"="+root, "-require", module+"@v0.0.0")
	run("vet", ".")
	run("test", ".")
}
