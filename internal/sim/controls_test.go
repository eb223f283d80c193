package sim

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var withMutants = flag.Bool("sim.mutants", false,
	"build the mutants of the library and find them, a minute each at most")

// A mutant is a mistake in the library that a simulation must find.
type mutant struct {
	name    string
	pkg     string // from the root of the repository
	test    string
	file    string // of pkg
	was, is string
}

var mutants = []mutant{
	// One that was in the library, and the promise that came instead of another.
	{"a saga with children beside a longer wait is claimed and written back without end", "saga",
		"TestSagaSimulation", "machine.go",
		`	case m.next(0, now) >= 0: // an attempt can start now, even if it only reads children
		return released, 0, stops
	}
	at, timed := m.wake(now, false)
	if timed {
		wakeIn = max(at.Sub(now), 0)
	}
	park := wakeIn > lease/3 || m.onSignal(now) // the saga releases its place for another saga
	if m.onOutside(now) {
`, `	}
	at, timed := m.wake(now, false)
	if timed {
		wakeIn = max(at.Sub(now), 0)
	}
	park := wakeIn > lease/3 || m.onSignal(now) // the saga releases its place for another saga
	if m.onOutside(now) && m.next(0, now) < 0 {
`},
	{"a load that an invalidation overtook is cached", "cacheaside", "TestCacheSimulation", "load.go",
		"		case !isCurrent:\n", "		case !isCurrent && r.entry == nil:\n"},

	{"an invalidation leaves a load under way", "cacheaside", "TestCacheSimulation", "write.go",
		"		delete(c.flights, key)\n" +
			"		if c.tier != nil { // SkipMemory may have removed another flight of key from the map\n" +
			"			c.touch(hashes[i])\n		}\n", ""},
}

// TestMutantsApply holds that each mutant is still one of the code as it is.
func TestMutantsApply(t *testing.T) {
	for _, m := range mutants {
		text, err := os.ReadFile(filepath.Join("..", "..", m.pkg, m.file))
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(string(text), m.was), "%s: %s", m.file, m.name)
		require.NotEqual(t, m.was, m.is)
	}
}

// TestMutants holds that each simulation finds what it is for, within a minute, and makes it
// short.
func TestMutants(t *testing.T) {
	if !*withMutants {
		t.Skip("without -sim.mutants")
	}
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			bin := build(t, m)
			begun := time.Now()
			cmd := exec.Command(bin, "-test.run", "^"+m.test+"$", "-test.v", "-sim.search", "-sim.for", "1m")
			cmd.Dir = filepath.Join("..", "..", m.pkg)
			out, err := cmd.CombinedOutput()
			require.Error(t, err, "the simulation does not find it:\n%s", out)
			text := string(out)
			at := strings.Index(text, "simulation ")
			require.Positive(t, at, text)
			t.Logf("found and made short in %v:\n%s", time.Since(begun).Round(100*time.Millisecond), text[at:])
		})
	}
}

// build returns a test binary of the package with the mutant in it.
func build(t *testing.T, m mutant) string {
	t.Helper()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	require.NoError(t, err)
	dir := t.TempDir()
	file := filepath.Join(root, m.pkg, m.file)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	mutated := filepath.Join(dir, "mutant.go")
	require.NoError(t, os.WriteFile(mutated, []byte(strings.Replace(string(text), m.was, m.is, 1)), 0o600))
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{file: mutated}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	bin := filepath.Join(dir, "mutant.test")
	cmd := exec.Command("go", "test", "-vet=off", "-c", "-overlay", filepath.Join(dir, "overlay.json"), "-o", bin,
		"./"+m.pkg)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return bin
}
