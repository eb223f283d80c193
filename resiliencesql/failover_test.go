package resiliencesql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/sqltx/standby"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
)

func insert(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, "INSERT")
	return err
}

// TestFailoverLeavesNoConnectionToAReader: each kind of "not the primary any more", wherever in the
// transaction the server says so. Without a Retry there is one attempt.
func TestFailoverLeavesNoConnectionToAReader(t *testing.T) {
	ofMySQL := errors.New("Error 1290")
	cfg := resiliencesql.Config{Code: func(err error) string {
		if errors.Is(err, ofMySQL) {
			return "25006"
		}
		return ""
	}}
	for name, s := range map[string]*standby.Servers{
		"a statement":               {},
		"BEGIN ISOLATION LEVEL":     {OnBegin: true, Refuse: &standby.Error{Code: "0A000", Routine: "call_enum_check_hook"}},
		"BEGIN READ WRITE":          {OnBegin: true, Refuse: &standby.Error{Code: "0A000", Routine: "call_bool_check_hook"}},
		"an old snapshot":           {Refuse: &standby.Error{Code: "0A000", Routine: "GetSerializableTransactionSnapshot"}},
		"a large object":            {Refuse: &standby.Error{Code: "XX000", Routine: "GetNewObjectId"}},
		"COMMIT":                    {OnCommit: true},
		"a driver that Code knows":  {Refuse: ofMySQL},
		"COMMIT, and Code knows it": {OnCommit: true, Refuse: ofMySQL},
	} {
		t.Run(name, func(t *testing.T) {
			db := s.Open(t, 4)
			s.Swap()
			require.NoError(t, resiliencesql.InTx(t.Context(), db, cfg, insert))
			require.Equal(t, [2]int{0, 1}, s.Conns())
			require.Zero(t, db.Stats().InUse)
			require.NoError(t, resiliencesql.InTx(t.Context(), db, cfg, insert))
			require.Equal(t, [2]int{0, 1}, s.Conns(), "connections to the primary stay")
		})
	}
}

// TestFailoverWithoutAPrimaryIsAFailure that may be retried, and keeps what still serves reads.
func TestFailoverWithoutAPrimaryIsAFailure(t *testing.T) {
	s := &standby.Servers{}
	db := s.Open(t, 4)
	s.Swap()
	db.SetMaxOpenConns(4)
	other, err := db.Conn(t.Context()) // a reader's, in use
	require.NoError(t, err)
	require.NoError(t, resiliencesql.InTx(t.Context(), db, resiliencesql.Config{}, insert))
	require.Equal(t, [2]int{1, 1}, s.Conns())
	require.NoError(t, other.Close())

	s = &standby.Servers{Refuse: &standby.Error{Code: "25006"}}
	db = s.Open(t, 2)
	s.Demote()
	runs := 0
	err = resiliencesql.InTx(t.Context(), db, resiliencesql.Config{}, func(ctx context.Context, tx *sql.Tx) error {
		runs++
		return insert(ctx, tx)
	})
	require.ErrorIs(t, err, s.Refuse)
	require.True(t, resilience.Retryable(err) && !resilience.Answered(err))
	require.Equal(t, 1, runs)
	require.Equal(t, 1, s.Conns()[0], "the newest connection stays")
}

// TestWriteInReadOnlyTxIsAnswered: a primary also rejects it, so another server would be no better.
func TestWriteInReadOnlyTxIsAnswered(t *testing.T) {
	known := errors.New("read-only")
	for _, rejected := range []error{standby.ReadOnly, known, fmt.Errorf("update: %w", state("25006"))} {
		s := &standby.Servers{Refuse: rejected}
		db := s.Open(t, 3)
		s.Swap()
		cfg := resiliencesql.Config{Options: &sql.TxOptions{ReadOnly: true}, Code: func(err error) string {
			if errors.Is(err, known) {
				return "25006"
			}
			return ""
		}}
		runs := 0
		err := resiliencesql.InTx(t.Context(), db, cfg, func(ctx context.Context, tx *sql.Tx) error {
			runs++
			return insert(ctx, tx)
		})
		require.ErrorIs(t, err, rejected)
		require.True(t, resilience.Answered(err) && !resilience.Retryable(err))
		require.Equal(t, 1, runs)
		require.Equal(t, [2]int{3, 0}, s.Conns(), "no connection is closed")
	}
}

// TestFailoverHeedsAMark: what fn says of an error counts.
func TestFailoverHeedsAMark(t *testing.T) {
	s := &standby.Servers{}
	db := s.Open(t, 1)
	s.Swap()
	runs := 0
	err := resiliencesql.InTx(t.Context(), db, resiliencesql.Config{}, func(ctx context.Context, tx *sql.Tx) error {
		runs++
		return retry.Permanent(insert(ctx, tx))
	})
	require.ErrorIs(t, err, standby.ReadOnly)
	require.Equal(t, 1, runs)
}

// TestAStaleStatementIsTriedAgainOnce: a migration has changed a table, or a pooler has lent the
// connection to another session. A failure after that is the caller's.
func TestAStaleStatementIsTriedAgainOnce(t *testing.T) {
	for _, stale := range []error{state("26000"), &raised{"0A000", "RevalidateCachedQuery"}} {
		for fails, want := range map[int]int{1: 2, 5: 2} {
			runs := 0
			err := resiliencesql.InTx(t.Context(), newFake(t).open(), resiliencesql.Config{},
				func(context.Context, *sql.Tx) error {
					if runs++; runs <= fails {
						return stale
					}
					return nil
				})
			require.Equal(t, want, runs)
			require.Equal(t, fails == 1, err == nil)
			if err != nil {
				require.Equal(t, again, verdict(stale, err))
			}
		}
	}
}

// TestTransactionsWithoutAPrimary of a driver that has no way to ask for one: the error says why.
func TestTransactionsWithoutAPrimary(t *testing.T) {
	begun := 0
	in := resiliencesql.Transactions[noTx]{Begin: func(context.Context) (noTx, error) { begun++; return noTx{}, nil }}
	err := in.InTx(t.Context(), nil, func(context.Context, noTx) error { return standby.ReadOnly })
	require.ErrorIs(t, err, standby.ReadOnly)
	require.Equal(t, 1, begun)
}

// TestPrimaryThatIsFoundAsTheCtxEnds leaves no transaction open: its connection would be lost to the pool.
func TestPrimaryThatIsFoundAsTheCtxEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	open := 0
	begin := func(context.Context) (openTx, error) { open++; return openTx{open: &open}, nil }
	in := resiliencesql.Transactions[openTx]{Begin: begin, Primary: func(ctx context.Context, _ string) (openTx, error) {
		cancel()
		return begin(ctx)
	}}
	err := in.InTx(ctx, nil, func(context.Context, openTx) error { return standby.ReadOnly })
	require.Error(t, err)
	require.Zero(t, open)
}

type openTx struct {
	noTx
	open *int
}

func (tx openTx) Rollback(context.Context) error { *tx.open--; return nil }

type noTx struct{}

func (noTx) Commit(context.Context) error   { return nil }
func (noTx) Rollback(context.Context) error { return nil }
