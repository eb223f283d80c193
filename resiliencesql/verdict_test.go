package resiliencesql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
)

// The errors of the drivers, by what the package reads of them. Those that have numbers are known by
// the packages of their types: see internal/sqltx, and internal/integration/data for real ones.
type (
	state        string          // pgx, lib/pq
	unsent       bool            // pgconn
	ConnectError struct{ error } // pgconn
)

func (e state) Error() string         { return "SQLSTATE " + string(e) }
func (e state) SQLState() string      { return string(e) }
func (e unsent) Error() string        { return "conn busy" }
func (e unsent) SafeToRetry() bool    { return bool(e) }
func (e *ConnectError) Unwrap() error { return e.error }

// A raised error says which function of PostgreSQL has raised it, as those of pgx and lib/pq do.
type raised struct{ Code, Routine string }

func (e *raised) Error() string    { return e.Code + " " + e.Routine }
func (e *raised) SQLState() string { return e.Code }

// Errors of an application that have a number or a code, and are no database's.
type (
	numbered struct{ Number uint16 }
	coded    int
	extended struct{ Code, ExtendedCode int }
)

func (e *numbered) Error() string { return "page not found" }
func (e coded) Error() string     { return "no such seat" }
func (e coded) Code() int         { return int(e) }
func (e extended) Error() string  { return "no such seat" }

const (
	answered    = "answered"
	again       = "again"
	unavailable = "unavailable"
	readOnly    = "unavailable: the server only reads"
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

// seen returns what the policies read of it: they do not tell a server that only reads from others.
func seen(want string) string {
	if want == readOnly {
		return unavailable
	}
	return want
}

var verdicts = map[string][]error{
	answered: {
		sql.ErrNoRows, fmt.Errorf("load: %w", sql.ErrNoRows),
		state("00000"), state("01000"), state("02000"), state("0A000"), state("21000"), state("22P02"), state("23505"),
		state("23P01"), state("25P02"), state("28P01"), state("3D000"), state("40002"), state("42601"),
		state("42P05"), state("54000"), state("55006"), state("P0001"), state("7"),
		&raised{"0A000", "transformFrameOffset"}, &raised{"23505", "RevalidateCachedQuery"},
	},
	again: {
		state("40001"), state("40P01"), state("40000"), state("55P03"),
		state("26000"), &raised{"26000", "FetchPreparedStatement"}, &raised{"0A000", "RevalidateCachedQuery"},
		errors.Join(errors.New("rollback failed"), state("40001")), errors.Join(state("25P02"), state("40001")),
	},
	unavailable: {
		state("08000"), state("08001"), state("08003"), state("08004"), state("08006"), state("08P01"),
		state("53000"), state("53100"), state("53200"), state("53300"), state("53400"),
		state("57000"), state("57P01"), state("57P02"), state("57P03"), state("57P04"), state("57P05"),
		state("58000"), state("58030"), state("58P01"), state("F0000"), state("XX000"), state("XX001"),
		state("25P03"), state("25P04"),
		errors.Join(sql.ErrNoRows, state("57P01")), errors.Join(state("23505"), state("53300")),
		driver.ErrBadConn, unsent(true), &ConnectError{io.EOF},
		&net.OpError{Op: "dial", Err: errors.New("refused")}, &net.DNSError{},
	},
	readOnly: {
		state("25006"), &raised{"25006", "PreventCommandIfReadOnly"}, &raised{"0A000", "call_enum_check_hook"},
		&raised{"0A000", "call_bool_check_hook"},
	},
	timeout: {
		state("57014"),
		&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded},
	},
	unknown: {
		state("40003"), state("08007"), fmt.Errorf("%w, %w", state("40001"), state("08007")),
		io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, fmt.Errorf("read: %w", io.EOF),
		syscall.ECONNRESET, fmt.Errorf("write: %w", syscall.EPIPE),
		&net.OpError{Op: "read", Err: errors.New("reset")}, &net.OpError{Op: "write", Err: errors.New("broken pipe")},
	},
	unchanged: {
		errors.New("SQLSTATE 40001"), context.Canceled, context.DeadlineExceeded, sql.ErrTxDone, sql.ErrConnDone,
		fmt.Errorf("timeout: %w", context.DeadlineExceeded), resilience.Answer(errors.New("no such seat")),
		state(""), unsent(false), &numbered{404}, &numbered{1290}, coded(5), coded(19), coded(404), extended{19,
			2067}, struct{ error }{errors.New("x")},
		errors.Join(errors.New("a"), errors.New("b")),
		syscall.EMFILE, &fs.PathError{Op: "open", Path: "ca.pem", Err: syscall.ENOENT},
	},
}

// TestVerdicts has each class of SQLSTATE.
func TestVerdicts(t *testing.T) {
	guard := resiliencesql.Middleware(resiliencesql.Config{})
	for want, errs := range verdicts {
		for _, err := range errs {
			out := guard(func(context.Context) error { return err })(t.Context())
			require.Equal(t, seen(want), verdict(err, out), "%T %v", err, err)
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
			got := resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{},
				func(context.Context, *sql.Tx) error { return err })
			require.Equal(t, seen(want), verdict(err, got), "%T %v", err, err)
		}
	}
	require.Zero(t, db.commits)
	require.Equal(t, db.begins, db.rollbacks)
}

// TestOnlyAnAnswerToCommitMeansNotCommitted includes what is retryable elsewhere.
func TestOnlyAnAnswerToCommitMeansNotCommitted(t *testing.T) {
	for want, errs := range verdicts {
		for _, err := range errs {
			db := newFake(t)
			db.onCommit = func() error { return err }
			got := resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{}, nothing)
			expected := unknown
			if want == answered || want == again || want == readOnly {
				expected = seen(want)
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
		got := resiliencesql.InTx(t.Context(), db.open(), resiliencesql.Config{},
			func(context.Context, *sql.Tx) error { return err })
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
	for _, err := range []error{state("57014"), sql.ErrTxDone} {
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
