package sqltx

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/sqltx/standby"
)

// TestBeginAnewFindsThePrimary, if there is one. The first attempt asks nothing.
func TestBeginAnewFindsThePrimary(t *testing.T) {
	for _, kind := range []string{"PostgreSQL", "MySQL"} {
		servers := &standby.Servers{}
		db := servers.Open(t, 3)
		servers.Swap()
		tx, err := Begin(t.Context(), db, kind, nil)
		require.NoError(t, err)
		_, err = tx.Exec("UPDATE 1")
		require.ErrorIs(t, err, standby.ReadOnly)
		require.NoError(t, tx.Rollback())
		require.Equal(t, [2]int{3, 0}, servers.Conns())

		tx, err = Begin(Anew(t.Context()), db, kind, nil)
		require.NoError(t, err)
		require.Equal(t, [2]int{0, 1}, servers.Conns())
		_, err = tx.Exec("UPDATE 2")
		require.NoError(t, err)
		require.NoError(t, tx.Commit())
		require.Eventually(t, func() bool { return db.Stats().InUse == 0 }, 10*time.Second, time.Millisecond,
			"the connection is kept")
		require.Equal(t, []string{"UPDATE 2"}, servers.Writes())

		servers.Demote()
		db = servers.Open(t, 2)
		tx, err = Begin(Anew(t.Context()), db, kind, nil)
		require.NoError(t, err, "there is none")
		_, err = tx.Exec("UPDATE 3")
		require.ErrorIs(t, err, standby.ReadOnly, "which says why")
		require.NoError(t, tx.Rollback())
	}
}

// TestBeginFails returns its connection.
func TestBeginFails(t *testing.T) {
	servers := &standby.Servers{OnBegin: true}
	servers.Demote()
	db := servers.Open(t, 2)
	_, err := Begin(Anew(t.Context()), db, "PostgreSQL", nil)
	require.ErrorIs(t, err, standby.ReadOnly)
	require.Zero(t, db.Stats().InUse)
}

// TestPrimaryWithFullPool finds the primary behind the connections of others.
func TestPrimaryWithFullPool(t *testing.T) {
	servers := &standby.Servers{}
	db := servers.Open(t, 2)
	db.SetMaxOpenConns(2)
	servers.Swap()
	reader, err := db.Conn(t.Context())
	require.NoError(t, err)
	conn, err := Primary(t.Context(), db, probePostgreSQL)
	require.NoError(t, err)
	require.Equal(t, [2]int{1, 1}, servers.Conns())
	require.NoError(t, conn.Close())
	require.NoError(t, reader.Close())
	require.Equal(t, [2]int{1, 1}, servers.Conns(), "it serves reads")
}

func TestStale(t *testing.T) {
	code := func(err error) string { return map[string]string{"A": "23505"}[err.Error()] }
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false}, {&raised{"26000", ""}, true}, {&raised{"0A000", "RevalidateCachedQuery"}, true},
		{&raised{"0A000", ""}, false}, {&raised{"42601", "RevalidateCachedQuery"}, false}, {&raised{"A", ""}, false},
	} {
		require.Equal(t, c.want, Stale(c.err, code), "%v", c.err)
		require.Equal(t, c.want, Stale(c.err, nil), "%v", c.err)
	}
	require.False(t, Stale(&raised{"26000", ""}, func(error) string { return "23505" }), "Code is asked first")
}

func TestReadOnly(t *testing.T) {
	code := ReadOnly(func(err error) string { return map[string]string{"A": "25006", "B": "23505"}[err.Error()] })
	rejected, lost := &raised{"25006", ""}, &raised{"57P01", ""}
	for _, c := range []struct {
		err  error
		want string
	}{
		{rejected, "25000"}, {fmt.Errorf("write: %w", rejected), "25000"}, {errors.Join(errors.New("x"), rejected), "25000"},
		{lost, ""}, {errors.Join(rejected, lost), ""}, {errors.New("25006"), ""},
		{errors.New("A"), "25000"}, {errors.New("B"), "23505"},
	} {
		require.Equal(t, c.want, code(c.err), "%v", c.err)
	}
	require.Equal(t, "25000", ReadOnly(nil)(rejected))
}
