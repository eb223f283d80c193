package whole_test

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// exampled are the packages of which each constructor, and each function that a program calls first, has a runnable
// example, by the names of the examples. An example without an Output comment is compiled and not run.
var exampled = map[string][]string{
	"saga": {
		"", "Run", "NewRunner", "NewMemory", "Register", "Handle_Start", "Handle_Result", "Handle_Get", "Handle_Signal",
		"Handle_Cancel", "Runner_Operate", "Runner_Observe", "Runner_List", "Runner_History", "ChildOf", "ChildrenOf",
		"Exponential", "WithCommand", "Definition_Decide", "Step_middleware", "Step_await", "Step_parallel",
		"Declined", "IsDeclined", "Permanent", "MaybeApplied", "Error", "Saga", "Runner_Operate_abandon",
	},
	"saga/sqlstore":           {"New", "Store_Schema"},
	"saga/sagahttp":           {"Send", "Result", "Handler"},
	"saga/sagatest":           {"Check"},
	"resiliencegrpc/sagagrpc": {"Send", "Context", "Error", "Result"},
	"sagatemporal":            {"New"},
}

func TestPackagesHaveExamples(t *testing.T) {
	for dir, want := range exampled {
		files, err := filepath.Glob(filepath.Join("../..", dir, "*_test.go"))
		require.NoError(t, err)
		fset, found := token.NewFileSet(), map[string]bool{}
		for _, name := range files {
			file, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
			require.NoError(t, err)
			for _, e := range doc.Examples([]*ast.File{file}...) {
				found[e.Name] = found[e.Name] || e.Output != "" || e.EmptyOutput
			}
		}
		for _, name := range want {
			require.True(t, found[name], "package %s has no example with an output: %s", dir,
				strings.TrimSuffix("Example"+name, "_"))
		}
		for name, runs := range found {
			require.True(t, runs, "package %s: Example%s has no output", dir, name)
		}
	}
}
