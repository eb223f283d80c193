package main

import (
	"bytes"
	"context"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const guess = "testdata/guess/guess.go"

func TestMutantsAreBehindSwitchesAndPositionsStay(t *testing.T) {
	src, err := os.ReadFile(guess)
	require.NoError(t, err)
	out, found, err := mutate("guess.go", src, 1, nil)
	require.NoError(t, err)
	_, err = parser.ParseFile(token.NewFileSet(), "guess.go", out, 0)
	require.NoError(t, err)
	require.Equal(t, bytes.Count(src, []byte("\n")), bytes.Count(out, []byte("\n")))
	var names []string
	for i, m := range found {
		require.Equal(t, i+1, m.Number)
		names = append(names, m.Name)
	}
	require.ElementsMatch(t, []string{
		"guess.go Range.Tell: without the lock r.mu",
		"guess.go Range.Tell: without r.asked++",
		"guess.go Range.Tell: not n < r.Low",
		"guess.go Range.Tell: <= instead of < in n < r.Low",
		"guess.go Range.Tell: not n > r.High && !r.forgiven",
		"guess.go Range.Tell: left out in n > r.High && !r.forgiven: n > r.High",
		"guess.go Range.Tell: left out in n > r.High && !r.forgiven: !r.forgiven",
		"guess.go Range.Tell: >= instead of > in n > r.High",
		"guess.go Range.Asked: without the lock r.mu",
		"guess.go Range.Asked: without defer func() { n = r.asked }()",
		"guess.go Range.Asked: at once: defer func() { n = r.asked }()",
		"guess.go Range.Asked: without n = r.asked",
		"guess.go Range.Forgive: without r.forgiven = true",
	}, names)
}

func TestLineThatDoesNotCompileIsLeftAlone(t *testing.T) {
	src, err := os.ReadFile(guess)
	require.NoError(t, err)
	out, found, err := mutate("guess.go", src, 1, map[string]bool{"guess.go:23": true})
	require.NoError(t, err)
	require.Len(t, found, 9)
	require.Contains(t, string(out), "\tif n > r.High && !r.forgiven {")
}

// The tests of guess know neither the bound 9, nor Forgive, nor a lock that Asked needs.
func TestMutantThatNoTestNoticesSurvives(t *testing.T) {
	p, err := build("./testdata/guess", t.TempDir(), true)
	require.NoError(t, err)
	require.NoError(t, p.measure(context.Background(), 2))
	require.Empty(t, p.failing)
	var found bytes.Buffer
	count := p.tryAll(p.mutants, options{budget: time.Hour, most: time.Nanosecond, jobs: 2}, &found)
	require.Equal(t, map[verdict]int{caught: len(p.mutants) - 4, survived: 3, unreached: 1}, count)
	for _, left := range []string{
		"survived guess.go:23: guess.go Range.Tell: >= instead of > in n > r.High",
		"survived guess.go:23: guess.go Range.Tell: left out in n > r.High && !r.forgiven: !r.forgiven",
		"survived guess.go:32: guess.go Range.Asked: without the lock r.mu",
		"unreached guess.go:39: guess.go Range.Forgive: without r.forgiven = true",
	} {
		require.Contains(t, found.String(), left)
	}
}

func TestMutantBeyondTheTimeIsUntried(t *testing.T) {
	count := new(program).tryAll(make([]mutant, 7), options{jobs: 2}, nil)
	require.Equal(t, map[verdict]int{untried: 7}, count)
}

func TestSurvivorHasAReason(t *testing.T) {
	file := t.TempDir() + "/guess.txt"
	require.NoError(t, os.WriteFile(file, []byte("// Why.\n\na fault: x — nobody sees it\n"), 0o644))
	reasons, err := known(file)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"a fault: x": "nobody sees it"}, reasons)
	require.NoError(t, os.WriteFile(file, []byte("a fault\n"), 0o644))
	_, err = known(file)
	require.ErrorContains(t, err, "a line is a fault")
}

// A reason whose fault is gone is no reason any more.
func TestEachReasonHasItsFault(t *testing.T) {
	files, err := filepath.Glob("survivors/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		reasons, err := known(file)
		require.NoError(t, err)
		var p program
		pkg := strings.ReplaceAll(strings.TrimSuffix(filepath.Base(file), ".txt"), "-", "/")
		require.NoError(t, p.list("github.com/go-resilience/resilience/"+pkg))
		for _, r := range p.rooms {
			for _, name := range r.GoFiles {
				src, err := os.ReadFile(filepath.Join(r.Dir, name))
				require.NoError(t, err)
				_, found, err := mutate(filepath.Join(r.path, name), src, 1, nil)
				require.NoError(t, err)
				for _, m := range found {
					delete(reasons, m.Name)
				}
			}
		}
		require.Empty(t, slices.Sorted(maps.Keys(reasons)), file)
	}
}
