package resilience_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSnippetsCompile holds each Go snippet of README.md and docs to the library as
// it is: it stands, but for its indentation, in a file snippets*_test.go, which the compiler
// has seen.
func TestSnippetsCompile(t *testing.T) {
	var compiled strings.Builder
	files, err := filepath.Glob("snippets*_test.go")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		compiled.Write(text)
	}
	pages, err := filepath.Glob("docs/*.md")
	require.NoError(t, err)
	decisions, err := filepath.Glob("docs/decisions/*.md")
	require.NoError(t, err)
	fence := regexp.MustCompile("(?s)```go\n(.*?)```")
	for _, page := range append(append(pages, decisions...), "README.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, snippet := range fence.FindAllStringSubmatch(string(text), -1) {
			require.Contains(t, flush(compiled.String()), flush(snippet[1]), "%s: this snippet is not in snippets*_test.go:\n%s", page, snippet[1])
		}
	}
}

// flush returns code without indentation and blank lines.
func flush(code string) string {
	var lines []string
	for line := range strings.Lines(code) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n")
}
