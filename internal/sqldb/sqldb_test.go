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

func TestTextsReplaceWords(t *testing.T) {
	texts := sqldb.NewTexts("a_", true, "{now}", "now()", "{twice}", "{now}, {now}")
	for range 2 {
		require.Equal(t, "SELECT now(), now() FROM a_lease WHERE a = $1 AND b = $2",
			texts.Of("SELECT {twice} FROM {p}lease WHERE a = ? AND b = ?"))
	}
	require.Equal(t, "a = ? {none}", sqldb.NewTexts("", false).Of("a = ? {none}"))
}

func TestStatementsOfASchema(t *testing.T) {
	require.Equal(t, []string{"A", "\nB"}, slices.Collect(sqldb.Statements("A;\nB;\n")))
}

func TestNewerVersionExcludesOldPrograms(t *testing.T) {
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

func TestUnsupportedServers(t *testing.T) {
	for version, kind := range map[string]string{
		"8.0.11-TiDB-v7.5.1 TiDB Server (Apache License 2.0) Community Edition":                      "MySQL",
		"8.0.30-Vitess Version: 19.0.0":                                                              "MySQL",
		"5.7.25-OceanBase_CE-v4.2.1.0":                                                               "MySQL",
		"5.7.32 SingleStoreDB source distribution (compatible; MySQL Enterprise & MySQL Commercial)": "MySQL",
		"CockroachDB CCL v23.2.3 (x86_64-pc-linux-gnu)":                                              "PostgreSQL",
		"PostgreSQL 11.2-YB-2.20.1.3-b0 on x86_64-pc-linux-gnu":                                      "PostgreSQL",
		"PostgreSQL 9.4.26 (Greenplum Database 6.25.3)":                                              "PostgreSQL",
	} {
		err := sqldb.ServerOf(kind, version)
		require.ErrorIs(t, err, sqldb.ErrServer, version)
		require.ErrorContains(t, err, version)
	}
	for version, kind := range map[string]string{
		"8.4.3 MySQL Community Server - GPL":                                        "MySQL",
		"8.0.36-28 Percona Server (GPL), Release 28":                                "MySQL",
		"10.11.6-MariaDB-0+deb12u1 Debian 12":                                       "MySQL",
		"8.0.35 Source distribution":                                                "MySQL",
		"PostgreSQL 16.2 (Debian 16.2-1.pgdg120+2) on x86_64-pc-linux-gnu":          "PostgreSQL",
		"PostgreSQL 15.4 (EnterpriseDB Advanced Server 15.4.0) on x86_64-pc-linux":  "PostgreSQL",
		"PostgreSQL 15.4 on aarch64-unknown-linux-gnu, compiled by gcc, 64-bit, YB": "PostgreSQL",
	} {
		require.NoError(t, sqldb.ServerOf(kind, version), version)
	}
}
