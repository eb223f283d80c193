package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestSnippetsCompile checks that each Go snippet of README.md and docs is part of a file that the
// compiler has seen: a file snippets*_test.go or an example. Indentation may differ.
func TestSnippetsCompile(t *testing.T) {
	t.Chdir("..")
	var compiled strings.Builder
	files, err := filepath.Glob("docs/snippets*_test.go")
	require.NoError(t, err)
	nested, err := filepath.Glob("*/snippets_test.go")
	require.NoError(t, err)
	programs, err := filepath.Glob("examples/*/*.go")
	require.NoError(t, err)
	for _, file := range slices.Concat(files, nested, programs, []string{"internal/integration/fleet/snippets_test.go"}) {
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
			require.Contains(t, flush(compiled.String()), flush(snippet[1]), "%s: this snippet is not compiled:\n%s", page,
				snippet[1])
		}
	}
}

// TestPagesNameWhatExists checks that each test that a page names exists, and each file that a page
// links to. CHANGELOG.md is exempt, because it names things that are gone.
func TestPagesNameWhatExists(t *testing.T) {
	t.Chdir("..")
	tests := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark|Example)\w*)\(`)
	var pages []string
	require.NoError(t, filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		switch {
		case strings.HasSuffix(path, "_test.go"):
			text, err := os.ReadFile(path)
			for _, name := range declared.FindAllStringSubmatch(string(text), -1) {
				tests[name[1]] = true
			}
			return err
		case strings.HasSuffix(path, ".md") && path != "CHANGELOG.md":
			pages = append(pages, path)
		}
		return nil
	}))
	named := regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w*)`") // not "TestUpdate...", a family of tests
	fenced := regexp.MustCompile("(?s)```.*?```")
	link := regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, name := range named.FindAllStringSubmatch(string(text), -1) {
			assert.True(t, tests[name[1]], "%s names the test %s, which does not exist", page, name[1])
		}
		for _, target := range link.FindAllStringSubmatch(fenced.ReplaceAllString(string(text), ""), -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(page), target[1]))
			assert.NoError(t, err, "%s links to %s", page, target[1])
		}
	}
}

// TestUnstablePackagesSayThatTheyAre checks that the package comment of each package that README.md marks as unstable
// says so, because users read it on pkg.go.dev.
func TestUnstablePackagesSayThatTheyAre(t *testing.T) {
	t.Chdir("..")
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	marked := regexp.MustCompile(`\]\((\w+(?:/\w+)*)\)\\\*`).FindAllStringSubmatch(string(readme), -1)
	require.Greater(t, len(marked), 12)
	comment := regexp.MustCompile(`(?m)^// Th(?:is|e) package is unstable until`)
	for _, m := range marked {
		files, err := filepath.Glob(m[1] + "/*.go")
		require.NoError(t, err)
		assert.True(t, slices.ContainsFunc(files, func(file string) bool {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			return comment.Match(text)
		}), m[1])
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
