package registry_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each Reason for which a policy counts refused calls has a figure, zeros included.
func TestEveryReasonHasAFigure(t *testing.T) {
	h := newHouse()
	defer h.close()
	counted := map[string][]string{}
	for e := range h.reg.All() {
		for f := range e.Figures() {
			for _, a := range f.Attrs {
				if a.Key == "reason" && a.Value != "" {
					counted[e.Kind] = append(counted[e.Kind], a.Value)
				}
			}
		}
	}
	for kind, file := range map[string]string{"bulkhead": "../bulkhead/errors.go", "throttle": "../throttle/errors.go"} {
		source, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		require.NoError(t, err)
		var reasons []string
		ast.Inspect(source, func(n ast.Node) bool {
			if v, ok := n.(*ast.ValueSpec); ok {
				if of, ok := v.Type.(*ast.Ident); ok && of.Name == "Reason" {
					text, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
					require.NoError(t, err)
					reasons = append(reasons, strings.ReplaceAll(text, " ", "_"))
				}
			}
			return true
		})
		slices.Sort(counted[kind])
		require.ElementsMatch(t, reasons, slices.Compact(counted[kind]), kind)
	}
}
