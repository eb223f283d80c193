package sqllease_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
	"github.com/go-resilience/resilience/lease/storetest"
)

var dialects = []sqllease.Dialect{sqllease.PostgreSQL, sqllease.MySQL, sqllease.SQLite}

// open returns the store in f, after Migrate.
func open(t *testing.T, f *fake, dialect sqllease.Dialect) *sqllease.Store {
	t.Helper()
	s := sqllease.New(f.open(), dialect, sqllease.Config{})
	require.NoError(t, s.Migrate(t.Context()))
	return s
}

func onEach(t *testing.T, test func(t *testing.T, f *fake, s *sqllease.Store)) {
	for _, dialect := range dialects {
		t.Run(string(dialect), func(t *testing.T) {
			f := newFake()
			test(t, f, open(t, f, dialect))
		})
	}
}

func TestStore(t *testing.T) {
	for _, dialect := range dialects {
		t.Run(string(dialect), func(t *testing.T) {
			storetest.Run(t, func(t *testing.T) lease.Store { return open(t, newFake(), dialect) })
		})
	}
}

func TestMigrateCreatesTablesOnce(t *testing.T) {
	onEach(t, func(t *testing.T, f *fake, s *sqllease.Store) {
		require.NotEmpty(t, f.log)
		for statement := range strings.SplitSeq(s.Schema(), ";") {
			require.Contains(t, strings.Join(f.log, "\n"), strings.TrimSpace(statement))
		}
		f.log = nil
		require.NoError(t, s.Migrate(t.Context()))
		require.NotContains(t, strings.Join(f.log, "\n"), "CREATE", "a right to create is not needed")
	})
}

// A newer version of the tables determines which programs can use them.
func TestVersionsOfTheTables(t *testing.T) {
	for version, ok := range map[[2]int64]bool{{1, 1}: true, {2, 1}: true, {7, 1}: true, {2, 2}: false, {3, 2}: false} {
		for _, dialect := range dialects {
			f := newFake()
			open(t, f, dialect)
			f.version = version
			f.log = nil
			err := sqllease.New(f.open(), dialect, sqllease.Config{}).Migrate(t.Context())
			require.Equal(t, ok, err == nil, "%v: %v", version, err)
			if !ok {
				want := "they are of version %d, for programs from version %d on, and this program is of version 1"
				require.ErrorContains(t, err, fmt.Sprintf(want, version[0], version[1]))
			}
			require.NotContains(t, strings.Join(f.log, "\n"), "CREATE")
		}
	}
}

func TestNewPanicsOnInvalidArguments(t *testing.T) {
	db := newFake().open()
	panics := func(want string, c sqllease.Config, db *sql.DB, dialect sqllease.Dialect) {
		t.Helper()
		require.PanicsWithValue(t, want, func() { sqllease.New(db, dialect, c) })
	}
	panics("sqllease: *sql.DB is nil: must be set", sqllease.Config{}, nil, sqllease.PostgreSQL)
	panics(`sqllease: dialect is "Oracle": must be PostgreSQL, MySQL or SQLite`, sqllease.Config{}, db, "Oracle")
	for _, prefix := range []string{"9a", "A", "a-b", "a;", strings.Repeat("x", 33)} {
		want := fmt.Sprintf("sqllease: Config.Prefix is %.40q: must be up to 32 of a-z, 0-9 and _, not a digit first", prefix)
		panics(want, sqllease.Config{Prefix: prefix}, db, sqllease.PostgreSQL)
	}
}

func TestMigrateErrors(t *testing.T) {
	migrate := func(ctx context.Context, f *fake, dialect sqllease.Dialect) error {
		s := sqllease.New(f.open(), dialect, sqllease.Config{})
		return s.Migrate(ctx)
	}
	for _, dialect := range dialects {
		f := newFake()
		f.fail = func(string) error { return errors.New("permission denied") }
		err := migrate(t.Context(), f, dialect)
		require.ErrorContains(t, err, "sqllease: migrate: ")
		require.ErrorContains(t, err, "permission denied")
		require.ErrorContains(t, err, "Config.Prefix")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, migrate(ctx, newFake(), dialect), context.Canceled)
	}
	f := newFake()
	f.busy = 0
	require.ErrorContains(t, migrate(t.Context(), f, sqllease.SQLite), "busy_timeout")
	f.fail = func(statement string) error {
		if strings.HasPrefix(statement, "PRAGMA") {
			return errDown
		}
		return nil
	}
	require.ErrorIs(t, migrate(t.Context(), f, sqllease.SQLite), errDown)
}

// The first attempt fails, as PostgreSQL lets it when two create a table at the same time.
func TestAnotherProcessMayCreateTables(t *testing.T) {
	f := newFake()
	f.fail = func(statement string) error {
		if strings.HasPrefix(statement, "CREATE") && !f.tables {
			f.tables = true
			return errors.New("duplicate key")
		}
		return nil
	}
	open(t, f, sqllease.PostgreSQL)
}

var errDown = errors.New("down")

// Each statement fails in turn.
func TestErrorsNameMethod(t *testing.T) {
	onEach(t, func(t *testing.T, f *fake, s *sqllease.Store) {
		ctx := t.Context()
		req := lease.Request{Name: "a", Token: "x", TTL: time.Hour}
		n := 0
		failing := func(at int) {
			n = 0
			f.fail = func(string) error { n++; return map[bool]error{true: errDown}[n == at] }
		}
		for at := 1; at < 9; at++ {
			failing(at)
			_, err := s.Acquire(ctx, req)
			if err != nil {
				require.ErrorIs(t, err, errDown)
				require.ErrorContains(t, err, "sqllease: acquire: ")
			}
			f.fail = nil
			rec, err := s.Acquire(ctx, req)
			require.NoError(t, err)
			require.Equal(t, "x", rec.Token)
			failing(1)
			require.ErrorContains(t, s.Renew(ctx, lease.Request{Name: "a", Token: "x", TTL: time.Hour}), "sqllease: renew: ")
			failing(1)
			require.ErrorContains(t, s.Release(ctx, "a", "x"), "sqllease: release: ")
			failing(1)
			_, err = s.Load(ctx, "a")
			require.ErrorContains(t, err, "sqllease: load: ")
			f.fail = nil
			require.NoError(t, s.Release(ctx, "a", "x"))
			delete(f.rows, "a")
		}
		f.fail = nil
		require.ErrorIs(t, s.Renew(ctx, lease.Request{Name: "b", Token: "x", TTL: time.Hour}), lease.ErrLost)
		failing(2)
		require.ErrorIs(t, s.Renew(ctx, lease.Request{Name: "b", Token: "x", TTL: time.Hour}), errDown)
	})
}

// A page may show a lease of any name.
func TestLoadWritesNothing(t *testing.T) {
	onEach(t, func(t *testing.T, f *fake, s *sqllease.Store) {
		rec, err := s.Load(t.Context(), "none")
		require.NoError(t, err)
		require.Equal(t, lease.Record{Name: "none"}, rec)
		require.Empty(t, f.rows)
	})
}

// MySQL does not count a row that an UPDATE has not changed.
func TestRenewalThatChangesNothingSucceeds(t *testing.T) {
	onEach(t, func(t *testing.T, f *fake, s *sqllease.Store) {
		_, err := s.Acquire(t.Context(), lease.Request{Name: "a", Token: "x", TTL: time.Hour})
		require.NoError(t, err)
		f.same = true
		require.NoError(t, s.Renew(t.Context(), lease.Request{Name: "a", Token: "x", TTL: time.Hour}))
		require.ErrorIs(t, s.Renew(t.Context(), lease.Request{Name: "a", Token: "y", TTL: time.Hour}), lease.ErrLost)
	})
}

// Other databases have no such setting.
func TestOnlySQLiteNeedsBusyTimeout(t *testing.T) {
	for _, dialect := range dialects {
		f := newFake()
		f.busy = 0
		err := sqllease.New(f.open(), dialect, sqllease.Config{}).Migrate(t.Context())
		require.Equal(t, dialect != sqllease.SQLite, err == nil, "%s: %v", dialect, err)
	}
}
