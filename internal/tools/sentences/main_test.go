package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSentencesOfPage(t *testing.T) {
	page := "# A title of a page\n\nThe first sentence\nhas two lines. Too short.\n\n" +
		"```go\nthis is not a sentence\n```\n\n" +
		"- A **promise** with [its](page.md) tests: `TestA`, `TestB`\n- Another item of the list.\n\n" +
		"## Cells\n\n| a heading of four words | b |\n|---|---|\n| x | this cell of a table is long enough |\n\n" +
		"<!-- table -->\n| a generated table is skipped | y |\n<!-- end of table -->\nThe line after the table.\n"
	found := sentencesOfPage("p.md", page)
	require.Equal(t, []string{
		"p.md:3: The first sentence has two lines.",
		"p.md:10: A promise with its tests",
		"p.md:11: Another item of the list.",
		"p.md:17: x: this cell of a table is long enough",
		"p.md:22: The line after the table.",
	}, texts(found))
	require.Equal(t, "# A title of a page\n\nThe first sentence has two lines. Too short.", found[0].around)
	require.Equal(t, "# A title of a page\nThe first sentence has two lines. Too short.\nAnother item of the list.",
		found[2].around)
	require.Equal(t, "## Cells\n\n| a heading of four words | b |\n| x | this cell of a table is long enough |",
		found[3].around)
}

func TestSentencesOfGo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.go")
	require.NoError(t, os.WriteFile(file, []byte(`// Package x is an example.
package x

// F is a function that is exported. It returns.
//
//	code is not a sentence
//
// # A heading of the comment
//
// See [F] for more about it.
func F() {
	// A comment inside a function.
}

// g is a function that is not exported.
func g() {}

type T struct {
	A int // the number of the field A
	b int // the number of the field b
}
`), 0o644))
	found, err := sentencesOfGo(file)
	require.NoError(t, err)
	require.Equal(t, []string{
		file + ":1: Package x is an example.",
		file + ":4: F is a function that is exported.",
		file + ":4: See F for more about it.",
		file + ":19: A: the number of the field A",
	}, texts(found))
	require.Equal(t, "Package x is an example.\npackage x", found[0].around)
	require.Equal(t, "# A heading of the comment\n\nSee [F] for more about it.\nfunc F() {", found[2].around)
	require.Equal(t, "the number of the field A\nA int // the number of the field A", found[3].around)
}

// texts returns the places and the texts of sentences.
func texts(all []sentence) (texts []string) {
	for _, s := range all {
		texts = append(texts, s.place+": "+s.text)
	}
	return texts
}

func TestTakeRemovesSentences(t *testing.T) {
	all := []sentence{{text: "a"}, {text: "b"}, {text: "c"}, {text: "d"}, {text: "e"}}
	want := slices.Clone(all)
	first := take(&all, 1, 3)
	second := take(&all, 1, 3)
	require.Len(t, first, 3)
	require.Len(t, second, 2)
	require.ElementsMatch(t, want, append(first, second...))
	require.Empty(t, all)
}
