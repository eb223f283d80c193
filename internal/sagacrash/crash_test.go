package sagacrash

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCrashesRejectsUnknownShapes(t *testing.T) {
	all := []scenario{{name: "chain"}, {name: "pivot"}}
	list, err := selected(all, []string{"pivot"})
	require.NoError(t, err)
	require.Len(t, list, 1)
	list, err = selected(all, nil)
	require.NoError(t, err)
	require.Len(t, list, 2)
	_, err = selected(all, []string{"chain", "pivots"})
	require.EqualError(t, err, `sagacrash: there is no shape "pivots" for this store`)
}
