package resilience_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// imported says where the packages come from that the README's snippets name.
var imported = map[string]string{
	"context":        "context",
	"errors":         "errors",
	"fmt":            "fmt",
	"http":           "net/http",
	"slog":           "log/slog",
	"sql":            "database/sql",
	"time":           "time",
	"backoff":        "github.com/cenkalti/backoff/v4",
	"resilience":     module,
	"breaker":        module + "/breaker",
	"bulkhead":       module + "/bulkhead",
	"cacheaside":     module + "/cacheaside",
	"resiliencehttp": module + "/resiliencehttp",
	"retry":          module + "/retry",
	"saga":           module + "/saga",
	"throttle":       module + "/throttle",
}

// prelude declares what the snippets use of a program around them.
const prelude = `
type User struct{ ID int }

var (
	ctx        = context.Background()
	db         *sql.DB
	ping       = func(context.Context) error { return nil }
	fetchUser  = func(context.Context, int) (*User, error) { return nil, nil }
	cachedUser = func(int) (*User, error) { return nil, nil }
	use        = func(...any) {}
)
`

// TestReadmeCompiles holds each Go snippet of the README to the library as it is.
func TestReadmeCompiles(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	snippets := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	require.NotEmpty(t, snippets)

	// An overlay puts the snippets into the module for the compiler alone.
	root, err := os.Getwd()
	require.NoError(t, err)
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	var pkgs []string
	for i, s := range snippets {
		file := filepath.Join(t.TempDir(), "snippet.go")
		require.NoError(t, os.WriteFile(file, []byte(program(s[1])), 0o600))
		pkg := fmt.Sprintf("readme%d", i+1)
		overlay.Replace[filepath.Join(root, "internal", pkg, "snippet.go")] = file
		pkgs = append(pkgs, "./internal/"+pkg)
	}
	replace, err := json.Marshal(overlay)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "overlay.json")
	require.NoError(t, os.WriteFile(file, replace, 0o600))

	out, err := exec.Command("go", append([]string{"build", "-overlay", file}, pkgs...)...).CombinedOutput()
	require.NoError(t, err, string(out))
}

// program makes a compilable file of a snippet: declarations stay as they are,
// statements go into a function that uses what they declare.
func program(snippet string) string {
	code := "func _() {\n" + snippet
	for _, m := range regexp.MustCompile(`(?m)^(\w+)(?:, (\w+))? :=`).FindAllStringSubmatch(snippet, -1) {
		for _, name := range m[1:] {
			if name != "" && name != "_" {
				code += "use(" + name + ")\n"
			}
		}
	}
	code += "}\n"
	if regexp.MustCompile(`(?m)^(func|type|var) `).MatchString(snippet) {
		code = snippet
	}
	code = prelude + code

	used := map[string]bool{}
	for _, m := range regexp.MustCompile(`\b(\w+)\.[A-Z]`).FindAllStringSubmatch(code, -1) {
		if path, ok := imported[m[1]]; ok {
			used[path] = true
		}
	}
	var file strings.Builder
	file.WriteString("package snippet\n\nimport (\n")
	for _, path := range slices.Sorted(maps.Keys(used)) {
		fmt.Fprintf(&file, "\t%q\n", path)
	}
	file.WriteString(")\n" + code)
	return file.String()
}
