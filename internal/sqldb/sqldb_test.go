package sqldb_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/sqldb"
	"github.com/go-resilience/resilience/internal/sqltx/standby"
)

func TestPrefixesOfTables(t *testing.T) {
	for s, ok := range map[string]bool{
		"": true, "a": true, "_9z": true, "9": false, "A": false, "a-b": false, "ä": false,
		strings.Repeat("x", 32): true, strings.Repeat("x", 33): false,
	} {
		require.Equal(t, ok, sqldb.IsPrefix(s), s)
	}
}

func TestTextsHaveTheWordsOfTheDatabase(t *testing.T) {
	texts := sqldb.NewTexts("a_", true, "{now}", "now()", "{twice}", "{now}, {now}")
	for range 2 {
		require.Equal(t, "SELECT now(), now() FROM a_lease WHERE a = $1 AND b = $2", texts.Of("SELECT {twice} FROM {p}lease WHERE a = ? AND b = ?"))
	}
	require.Equal(t, "a = ? {none}", sqldb.NewTexts("", false).Of("a = ? {none}"))
}

func TestStatementsOfASchema(t *testing.T) {
	require.Equal(t, []string{"A", "\nB"}, slices.Collect(sqldb.Statements("A;\nB;\n")))
}

func TestVersionThatIsNewerSaysWhichProgramsCanUseIt(t *testing.T) {
	for found, ok := range map[[2]int]bool{
		{3, 3}: true, {3, 1}: true, // its own
		{4, 3}: true, {9, 1}: true, {4, 4}: false, // newer
	} {
		err := sqldb.Usable(found[0], found[1], 3)
		require.Equal(t, ok, err == nil, "%v: %v", found, err)
		if err != nil {
			require.ErrorIs(t, err, sqldb.ErrVersion)
		}
	}
	require.ErrorIs(t, sqldb.Usable(2, 1, 3), sqldb.ErrMissing, "Migrate makes what is newer")
}

func TestWriteFindsThePrimary(t *testing.T) {
	servers := &standby.Servers{}
	db := servers.Open(t, 3)
	changed, err := sqldb.Exec(t.Context(), db, "UPDATE 1")
	require.NoError(t, err)
	require.True(t, changed)
	require.Equal(t, [2]int{3, 0}, servers.Conns())
	servers.Swap()
	_, err = sqldb.Exec(t.Context(), db, "UPDATE 2")
	require.NoError(t, err)
	require.Equal(t, [2]int{0, 1}, servers.Conns())
	require.Equal(t, []string{"UPDATE 1", "UPDATE 2"}, servers.Writes())
	require.Zero(t, db.Stats().InUse)

	servers.Demote()
	_, err = sqldb.Exec(t.Context(), servers.Open(t, 2), "UPDATE 3")
	require.ErrorIs(t, err, standby.ReadOnly)
}

func TestWriteRepeatsAStaleStatementOnce(t *testing.T) {
	for fails, want := range map[int]int{0: 1, 1: 2, 9: 2} {
		runs := 0
		err := sqldb.Write(t.Context(), (&standby.Servers{}).Open(t, 1), func(context.Context, sqldb.Conn) error {
			if runs++; runs <= fails {
				return &standby.Error{Code: "26000"}
			}
			return nil
		})
		require.Equal(t, want, runs)
		require.Equal(t, fails < 2, err == nil)
	}
}
