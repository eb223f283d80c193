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

func TestPlaceholdersAreNumbered(t *testing.T) {
	require.Equal(t, "a = $1 AND b = $2", sqldb.Number("a = ? AND b = ?"))
	require.Equal(t, "now()", sqldb.Number("now()"))
}

func TestStatementsOfASchema(t *testing.T) {
	require.Equal(t, []string{"A", "\nB"}, slices.Collect(sqldb.Statements("A;\nB;\n")))
}

func TestVersionAcceptsWhatSaysThatItCanBeUsed(t *testing.T) {
	for found, ok := range map[sqldb.Version]bool{
		{3, 2}: true, {3, 3}: true, {3, 1}: true, // its own
		{4, 3}: true, {9, 1}: true, {4, 4}: false, // newer
		{2, 1}: false, // older: Migrate adds what is missing
	} {
		err := sqldb.Version{Is: 3, From: 2}.Accepts(found)
		require.Equal(t, ok, err == nil, "%v: %v", found, err)
		if err != nil {
			want := sqldb.ErrVersion
			if found.Is < 3 {
				want = sqldb.ErrMissing
			}
			require.ErrorIs(t, err, want)
		}
	}
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
		err := sqldb.Write(t.Context(), (&standby.Servers{}).Open(t, 1), func(context.Context, sqldb.Querier) error {
			if runs++; runs <= fails {
				return &standby.Error{Code: "26000"}
			}
			return nil
		})
		require.Equal(t, want, runs)
		require.Equal(t, fails < 2, err == nil)
	}
}
