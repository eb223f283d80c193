package history_test

import (
	"encoding/json"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var withMutants = flag.Bool("history.mutants", false,
	"build the mutants of the library and find them, a minute each at most")

// A mutant is a mistake in the library that the checker of a target must find.
type mutant struct {
	name    string
	target  *target
	file    string // from the root of the repository
	was, is string
}

var mutants = []mutant{
	{"a Fill ignores its generation", &cacheTarget, "cacheaside/redisstore/scripts.go",
		"	if h[1] ~= generation then return h[2] == generation and 1 or 0 end\n", ""},
	{"a fence is ignored", &cacheTarget, "cacheaside/redisstore/scripts.go",
		"	if last > now then return {'fenced', '', 0, 0, ''} end\n", ""},
	{"an invalidation leaves a load under way", &cacheTarget, "cacheaside/write.go",
		"		delete(c.flights, key)\n" +
			"		if c.tier != nil { // SkipMemory may have removed another flight of key from the map\n" +
			"			c.touch(hashes[i])\n		}\n", ""},
	{"the fence of a lease is ignored", &leaseTarget, "lease/sqllease/sqllease.go",
		"	err := tx.QueryRowContext(", "	if tx != nil {\n		return nil\n	}\n	err := tx.QueryRowContext("},
	{"a lease is renewed after it has ended", &leaseTarget, "lease/term.go",
		"why, late := h.why, !time.Now().Before(h.until)", "why, late := h.why, false"},
	{"a COMMIT without its nonce", &sagaTarget, "saga/sqlstore/write.go",
		"	if s.batches == nil || ", "	req.Nonce = 0\n	if s.batches == nil || "},
	{"a load that an invalidation overtook is cached", &cacheTarget, "cacheaside/load.go",
		"		case !isCurrent:\n", "		case !isCurrent && r.entry == nil:\n"},
}

// TestMutantsApply holds that each mutant is still one of the code as it is.
func TestMutantsApply(t *testing.T) {
	for _, m := range mutants {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", m.file))
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(string(text), m.was), "%s: %s", m.file, m.name)
		require.NotEqual(t, m.was, m.is)
	}
}

// TestMutants holds that each checker finds what it is for, within a minute.
func TestMutants(t *testing.T) {
	if !*withMutants {
		t.Skip("without -history.mutants")
	}
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			bin := build(t, m)
			begun := time.Now()
			found, did := explore(t, m.target, bin, rand.Uint64N(1_000_000), time.Minute)
			require.NotNil(t, found, "the checker does not find it: %s", list(did))
			t.Logf("found after %s: %s", time.Since(begun).Round(time.Second), found)
		})
	}
}

// build returns a program of these tests with a mutant of the library.
func build(t *testing.T, m mutant) string {
	root, err := filepath.Abs(filepath.Join("..", "..", ".."))
	require.NoError(t, err)
	dir := t.TempDir()
	file := filepath.Join(root, m.file)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	edited := filepath.Join(dir, filepath.Base(m.file))
	require.NoError(t, os.WriteFile(edited, []byte(strings.Replace(string(text), m.was, m.is, 1)), 0o600))
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{file: edited}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	bin := filepath.Join(dir, "mutant")
	out, err := exec.Command("go", "test", "-c", "-o", bin, "-overlay", filepath.Join(dir, "overlay.json"),
		".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return bin
}
