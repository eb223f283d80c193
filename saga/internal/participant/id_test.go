package participant_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga/internal/participant"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// TestLongIDs: what is as long as may be is an id, and one byte more is none.
func TestLongIDs(t *testing.T) {
	id, name := strings.Repeat("i", participant.MaxID), strings.Repeat("n", 100)
	for what, c := range map[string]struct {
		saga, step string
		ok         bool
	}{
		"as long as may be": {id, name, true},
		"a longer saga":     {id + "i", name, false},
		"a longer step":     {id, name + "n", false},
	} {
		t.Run(what, func(t *testing.T) {
			saga, step, op, err := participant.Split(participant.ID(c.saga, c.step, store.OpUndo))
			if !c.ok {
				require.ErrorContains(t, err, "is not the id of a command: it is too long")
				return
			}
			require.NoError(t, err)
			require.Equal(t, []any{c.saga, c.step, store.OpUndo}, []any{saga, step, op})
		})
	}
	require.NoError(t, participant.CheckID(id))
	require.ErrorContains(t, participant.CheckID(id+"i"), "id is 201 bytes long")
	parent := id[:participant.MaxID-len("/s/0")]
	require.Equal(t, parent+"/s/0", participant.Child(parent, "s", 0))
	require.Contains(t, participant.Child(parent+"i", "s", 0), "~")
}

func TestSameRequest(t *testing.T) {
	form := func(boundary int, length int64) string { return participant.WithLength("form", boundary, length) }
	for _, c := range []struct {
		before, now string
		want        bool
	}{
		{"room", "room", true},
		{"room", "suite", false},
		{form(0, 9), form(0, 9), true},
		{form(0, 9), form(0, 10), false},
		{form(20, 9), form(20, 9), true},
		{form(20, 9), form(20, 10), false},
		{form(20, 9), form(25, 10), true}, // the lengths of the boundaries may account for the difference
		{form(20, 9), participant.WithLength("other", 25, 10), false},
		{form(20, 9), "form", false},
		{"form", form(20, 9), false},
	} {
		require.Equal(t, c.want, participant.SameRequest(c.before, c.now), "%q and %q", c.before, c.now)
	}
}
