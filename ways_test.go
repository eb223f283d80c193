package resilience_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A stop is a line of a way: its number, the file and the function.
var stop = regexp.MustCompile("^([0-9]+)\\. `([^`]+\\.go)` `([^`]+)`: .")

// TestWaysOfACall holds the ways of docs/ARCHITECTURE.md against the code: each function is
// where the page says, a way passes through at most eight files, and it does not climb back to
// a file that it has left.
func TestWaysOfACall(t *testing.T) {
	page, err := os.ReadFile("docs/ARCHITECTURE.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(page), "\n## The way of a call\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	ways := strings.Split(section, "\n### ")[1:]
	require.NotEmpty(t, ways)
	for _, way := range ways {
		name, list, _ := strings.Cut(way, "\n")
		t.Run(name, func(t *testing.T) {
			var files []string
			for line := range strings.Lines(list) {
				if line[0] < '0' || line[0] > '9' {
					continue
				}
				m := stop.FindStringSubmatch(line)
				require.NotNil(t, m, "%q is not: number, file, function, colon", line)
				file, function := m[2], m[3]
				if len(files) == 0 || files[len(files)-1] != file {
					require.NotContains(t, files, file, "%s climbs back", line)
					files = append(files, file)
				}
				require.Contains(t, functions(t, file), function, "in %s", file)
			}
			require.NotEmpty(t, files)
			require.LessOrEqual(t, len(files), 8, "%s", files)
		})
	}
}

// functions returns the functions of a file as "f", and its methods as "(*T).m" or "T.m".
func functions(t *testing.T, file string) (names []string) {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok {
			names = append(names, receiver(fn)+fn.Name.Name)
		}
	}
	return names
}

func receiver(fn *ast.FuncDecl) string {
	if fn.Recv == nil {
		return ""
	}
	switch typ := fn.Recv.List[0].Type.(type) {
	case *ast.StarExpr:
		return "(*" + typeName(typ.X) + ")."
	default:
		return typeName(typ) + "."
	}
}

// typeName returns the name of a type without its parameters.
func typeName(typ ast.Expr) string {
	switch typ := typ.(type) {
	case *ast.IndexExpr:
		return typeName(typ.X)
	case *ast.IndexListExpr:
		return typeName(typ.X)
	}
	return typ.(*ast.Ident).Name
}
