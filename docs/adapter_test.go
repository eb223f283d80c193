package docs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The policy and the adapter of adapter.md are built, vetted and tested in a separate module, as a
// user's would be, so they cannot import internal packages.
func TestAdapterInSeparateModule(t *testing.T) {
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	dir := t.TempDir()
	files, err := filepath.Glob(filepath.Join(root, "examples/adapter/*.go"))
	require.NoError(t, err)
	require.Len(t, files, 3)
	for _, file := range files {
		code, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, filepath.Base(file)), code, 0o600))
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
