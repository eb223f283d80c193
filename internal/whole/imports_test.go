package whole_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/go-resilience/resilience"

// engines are the modules that a pattern may link, besides the standard library
// and this module's internal packages.
var engines = map[string][]string{
	"":                      nil,
	"retry":                 {"github.com/cenkalti/backoff/v4"},
	"breaker":               {"github.com/sony/gobreaker/v2"},
	"hedge":                 nil,
	"bulkhead":              nil,
	"bulkhead/adaptive":     nil,
	"throttle":              nil,
	"cacheaside":            {"github.com/maypok86/otter/v2"},
	"cacheaside/redisstore": {"github.com/maypok86/otter/v2"},
	"cacheaside/storetest":  {"github.com/maypok86/otter/v2"},
	"saga":                  {"golang.org/x/sync"},
	"saga/sagahttp":         {"github.com/cenkalti/backoff/v4", "github.com/sony/gobreaker/v2", "golang.org/x/sync"},
	"saga/sagatest":         {"golang.org/x/sync"},
	"saga/sagastore":        nil,
	"saga/storetest":        {"golang.org/x/sync"},
	"saga/enginetest":       {"golang.org/x/sync"},
	"saga/sqlstore":         nil,
	"faults":                nil,
	"registry":              {"github.com/go-viper/mapstructure/v2"},
	"resiliencesql":         nil,
	"resiliencehttp":        {"github.com/cenkalti/backoff/v4", "github.com/sony/gobreaker/v2"},
	"lease":                 nil,
	"throttle/adaptive":     nil,
	"throttle/fleet":        {"golang.org/x/sync"},
	"lease/sqllease":        nil,
	"lease/redislease":      nil,
	"lease/storetest":       nil,
	"policy":                nil,
	"docs":                  nil,
}

// patterns are the packages that must not know each other.
var patterns = []string{"retry", "hedge", "breaker", "bulkhead", "throttle", "cacheaside", "saga", "lease"}

// TestImports holds the arrows of the house: a pattern imports neither another
// pattern nor the root, links no more than its engine, and only resiliencehttp,
// saga/sagahttp and faults link net/http.
func TestImports(t *testing.T) {
	links := packages(t)
	for pkg, allowed := range engines {
		t.Run("resilience/"+pkg, func(t *testing.T) {
			require.Contains(t, links, pkg)
			for _, dep := range links[pkg] {
				require.Truef(t, mayLink(pkg, dep, allowed), "%s links %s", "resilience/"+pkg, dep)
			}
		})
	}
}

func mayLink(pkg, dep string, engines []string) bool {
	own, isOurs := strings.CutPrefix(dep, module+"/")
	switch {
	case dep == module:
		return pkg == "" || pkg == "resiliencehttp" || pkg == "saga/sagahttp"
	case pkg == "resiliencehttp" && (dep == "database/sql" || own == "saga"):
		return false
	case isOurs && slices.Contains(patterns, strings.Split(own, "/")[0]):
		return strings.Split(own, "/")[0] == strings.Split(pkg, "/")[0] || pkg == "resiliencehttp" || pkg == "saga/sagahttp"
	case isOurs:
		return own == pkg || own == "policy" || pkg == "saga/sagahttp" && own == "resiliencehttp" ||
			strings.HasPrefix(own, "internal/") ||
			pkg == "saga/sqlstore" && own == "resiliencesql"
	case dep == "net/http":
		return pkg == "resiliencehttp" || pkg == "faults" || pkg == "saga/sagahttp"
	case !strings.Contains(strings.Split(dep, "/")[0], "."): // the standard library
		return true
	case strings.HasPrefix(dep, "vendor/"):
		return true
	default:
		return slices.ContainsFunc(engines, func(m string) bool { return dep == m || strings.HasPrefix(dep, m+"/") })
	}
}

// TestImportsAreAllHeld fails when a package is added whose imports nobody holds.
func TestImportsAreAllHeld(t *testing.T) {
	for pkg := range packages(t) {
		if !strings.Contains("/"+pkg, "/internal/") {
			require.Contains(t, engines, pkg, "add %s to engines", pkg)
		}
	}
}

// TestRequirements holds the promise of six requirements: what a user of this
// module gets in his go.mod.
func TestRequirements(t *testing.T) {
	direct := goList(t, "-m", "-f", "{{if not (or .Main .Indirect)}}{{.Path}}{{end}}", "all")
	require.ElementsMatch(t, []string{
		"github.com/cenkalti/backoff/v4",
		"github.com/go-viper/mapstructure/v2",
		"github.com/maypok86/otter/v2",
		"github.com/sony/gobreaker/v2",
		"github.com/stretchr/testify",
		"golang.org/x/sync",
	}, direct)
}

// TestAdaptersImportNothingInternal holds that each published module builds with a newer root: the
// internal packages of the root may change with every release.
func TestAdaptersImportNothingInternal(t *testing.T) {
	mods, err := filepath.Glob("../../*/go.mod")
	require.NoError(t, err)
	require.Len(t, mods, 9)
	for _, mod := range mods {
		if filepath.Base(filepath.Dir(mod)) == "examples" {
			continue // which nobody imports
		}
		err := filepath.WalkDir(filepath.Dir(mod), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			src, err := os.ReadFile(path)
			require.NotContains(t, string(src), `"`+module+"/internal/", path)
			return err
		})
		require.NoError(t, err)
	}
}

// packages returns those of this module, by their paths in it, with all that they link.
func packages(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	pkg := ""
	for _, word := range goList(t, "-f", `{{.ImportPath}}: {{join .Deps " "}}`, "./...") {
		if path, isPackage := strings.CutSuffix(word, ":"); isPackage {
			pkg = strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
			all[pkg] = nil
			continue
		}
		all[pkg] = append(all[pkg], word)
	}
	return all
}

// goList runs go list in this module, without the workspace, and returns its words.
func goList(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = "../.."
	cmd.Env = append(cmd.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		t.Fatalf("go list %v: %v\n%s", args, err, exit.Stderr)
	}
	require.NoError(t, err)
	return strings.Fields(string(out))
}
