package resiliencesql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
)

// The errors of the drivers, by what the package reads of them.
type (
	state        string                           // pgx, lib/pq
	number       struct{ Number uint16 }          // go-sql-driver/mysql
	code         int                              // modernc.org/sqlite
	mattn        struct{ Code, ExtendedCode int } // mattn/go-sqlite3
	unsent       bool                             // pgconn
	ConnectError struct{ error }                  // pgconn
)

func (e state) Error() string         { return "SQLSTATE " + string(e) }
func (e state) SQLState() string      { return string(e) }
func (e *number) Error() string       { return fmt.Sprint("Error ", e.Number) }
func (e code) Error() string          { return fmt.Sprint("code ", int(e)) }
func (e code) Code() int              { return int(e) }
func (e mattn) Error() string         { return fmt.Sprint("code ", e.ExtendedCode) }
func (e unsent) Error() string        { return "conn busy" }
func (e unsent) SafeToRetry() bool    { return bool(e) }
func (e *ConnectError) Unwrap() error { return e.error }

// A hostile error embeds a driver's that is not there.
type hostile struct{ *number }

func (*hostile) Error() string { return "hostile" }

const (
	answered    = "answered"
	again       = "again"
	unavailable = "unavailable"
	timeout     = "unavailable, a timeout"
	unknown     = "outcome unknown"
	unchanged   = "unchanged"
)

// verdict returns what the policies read.
func verdict(in, out error) string {
	var late interface{ Timeout() bool }
	switch retryable := resilience.Retryable(out); {
	case in == out:
		return unchanged
	case !errors.Is(out, in):
		return "lost"
	case errors.Is(out, resiliencesql.ErrOutcomeUnknown) && !retryable && !resilience.Answered(out):
		return unknown
	case resilience.Answered(out) && retryable:
		return again
	case resilience.Answered(out):
		return answered
	case errors.As(out, &late) && late.Timeout() && retryable:
		return timeout
	case retryable:
		return unavailable
	}
	return "contradictory"
}

var verdicts = map[string][]error{
	answered: {
		sql.ErrNoRows, fmt.Errorf("load: %w", sql.ErrNoRows),
		state("00000"), state("01000"), state("02000"), state("0A000"), state("21000"), state("22P02"), state("23505"),
		state("23P01"), state("25P02"), state("26000"), state("28P01"), state("3D000"), state("40002"), state("42601"),
		state("42P05"), state("54000"), state("55006"), state("P0001"), state("7"),
		&number{1062}, &number{1064}, &number{1451}, &number{1792}, &number{3819},
		code(1), code(4), code(19), code(2067), code(18), mattn{19, 1555},
	},
	again: {
		state("40001"), state("40P01"), state("40000"), state("55P03"),
		&number{1213}, &number{1205}, &number{1020}, &number{1614}, &number{3101}, &number{3572},
		code(5), code(517), code(261), code(6), code(262), mattn{5, 517},
		errors.Join(errors.New("rollback failed"), state("40001")), errors.Join(state("25P02"), state("40001")),
	},
	unavailable: {
		state("08000"), state("08001"), state("08003"), state("08004"), state("08006"), state("08P01"),
		state("53000"), state("53100"), state("53200"), state("53300"), state("53400"),
		state("57000"), state("57P01"), state("57P02"), state("57P03"), state("57P04"), state("57P05"),
		state("58000"), state("58030"), state("58P01"), state("F0000"), state("XX000"), state("XX001"), state("25006"),
		&number{1021}, &number{1040}, &number{1041}, &number{1047}, &number{1053}, &number{1114}, &number{1129}, &number{1203},
		&number{1226}, &number{1290}, &number{1836}, &number{2002}, &number{2003}, &number{2006}, &number{3032}, &number{3168},
		code(2), code(7), code(8), code(1032), code(10), code(3338), code(11), code(13), code(14), code(15), code(26), mattn{13, 13},
		errors.Join(sql.ErrNoRows, state("57P01")), errors.Join(state("23505"), &number{1040}),
		driver.ErrBadConn, unsent(true), &ConnectError{io.EOF},
		&net.OpError{Op: "dial", Err: errors.New("refused")}, &net.DNSError{},
	},
	timeout: {
		state("57014"), &number{1317}, &number{1969}, &number{3024}, code(9),
		&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded},
	},
	unknown: {
		state("40003"), state("08007"), fmt.Errorf("%w, %w", state("40001"), state("08007")),
		&number{1180}, &number{1927}, &number{2013}, &number{3169},
		io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, fmt.Errorf("read: %w", io.EOF),
		&net.OpError{Op: "read", Err: errors.New("reset")}, &net.OpError{Op: "write", Err: errors.New("broken pipe")},
	},
	unchanged: {
		errors.New("SQLSTATE 40001"), context.Canceled, context.DeadlineExceeded, sql.ErrTxDone, sql.ErrConnDone,
		fmt.Errorf("timeout: %w", context.DeadlineExceeded), resilience.Answer(errors.New("no such seat")),
		state(""), unsent(false), code(404), code(500), code(0), code(100), struct{ error }{errors.New("x")},
		errors.Join(errors.New("a"), errors.New("b")), &hostile{}, (*hostile)(nil),
	},
}

// TestVerdicts has each class of SQLSTATE, and each number and code that is named.
func TestVerdicts(t *testing.T) {
	guard := resiliencesql.Middleware(resiliencesql.Config{})
	for want, errs := range verdicts {
		for _, err := range errs {
			out := guard(func(context.Context) error { return err })(t.Context())
			require.Equal(t, want, verdict(err, out), "%T %v", err, err)
			require.Equal(t, out, guard(func(context.Context) error { return out })(t.Context()), "a verdict stays")
		}
	}
	require.NoError(t, guard(func(context.Context) error { return nil })(t.Context()))
}

// TestUntilCommitNothingHasTakenEffect: what is unknown outside a transaction is not inside.
func TestUntilCommitNothingHasTakenEffect(t *testing.T) {
	db := newFake(t)
	for want, errs := range verdicts {
		if want == unknown {
			want = unavailable
		}
		for _, err := range errs {
			got := resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{}, func(context.Context, *sql.Tx) error { return err })
			require.Equal(t, want, verdict(err, got), "%T %v", err, err)
		}
	}
	require.Zero(t, db.commits)
	require.Equal(t, db.begins, db.rollbacks)
}

// TestOnlyAnAnswerToCommitSaysThatNothingWasCommitted includes what is retryable elsewhere.
func TestOnlyAnAnswerToCommitSaysThatNothingWasCommitted(t *testing.T) {
	for want, errs := range verdicts {
		for _, err := range errs {
			db := newFake(t)
			db.onCommit = func() error { return err }
			got := resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{}, nothing)
			expected := unknown
			if want == answered || want == again {
				expected = want
			}
			require.Equal(t, expected, verdict(err, got), "%T %v", err, err)
		}
	}
}

// TestAMarkStays: what fn says of an error counts before what the database does.
func TestAMarkStays(t *testing.T) {
	db := newFake(t)
	for _, err := range []error{
		retry.Permanent(state("40001")), fmt.Errorf("book: %w", retry.Permanent(io.EOF)),
		resilience.Answer(state("57P03")), &breaker.OpenError{},
	} {
		got := resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{}, func(context.Context, *sql.Tx) error { return err })
		require.Equal(t, err, got)
	}
}

func TestCodeIsAskedFirst(t *testing.T) {
	lost := errors.New("invalid connection")
	guard := resiliencesql.Middleware(resiliencesql.Config{Code: func(err error) string {
		switch {
		case errors.Is(err, lost):
			return "08007"
		case errors.Is(err, state("23505")):
			return "40001"
		}
		return ""
	}})
	for err, want := range map[error]string{lost: unknown, state("23505"): again, state("23503"): answered} {
		require.Equal(t, want, verdict(err, guard(func(context.Context) error { return err })(t.Context())))
	}
}

// TestACancelIsTheCallers: the database tells a cancel and its own timeout by one code.
func TestACancelIsTheCallers(t *testing.T) {
	why := errors.New("the client has gone")
	for _, err := range []error{state("57014"), &number{1317}, code(9), sql.ErrTxDone} {
		ctx, cancel := context.WithCancelCause(t.Context())
		got := resiliencesql.Middleware(resiliencesql.Config{})(func(context.Context) error {
			cancel(why)
			return err
		})(ctx)
		require.ErrorIs(t, got, context.Canceled)
		require.ErrorIs(t, got, why)
		require.ErrorIs(t, got, err)
		require.False(t, resilience.Answered(got))
	}
}
