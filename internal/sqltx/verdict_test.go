package sqltx

import (
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVerdictsOfMySQL(t *testing.T) {
	for want, numbers := range map[verdict][]int{
		answered: {1062, 1064, 1451, 3819, 0},
		again:    {1213, 1205, 1020, 1614, 3101, 3572},
		unavailable: {1021, 1040, 1041, 1047, 1053, 1114, 1129, 1203, 1226, 1290, 1792, 1836, 2002, 2003, 2006,
			3032, 3168},
		interrupted: {1317, 1969, 3024},
		unknown:     {1180, 1927, 2013, 3169},
	} {
		for _, n := range numbers {
			require.Equal(t, want, mysqlVerdict(n), n)
		}
	}
}

func TestVerdictsOfSQLite(t *testing.T) {
	for want, codes := range map[verdict][]int{
		answered:    {1, 4, 19, 2067, 18, 28},
		again:       {5, 517, 261, 6, 262},
		unavailable: {2, 7, 8, 1032, 10, 3338, 11, 13, 14, 15, 26},
		interrupted: {9},
		none:        {0, 29, 100, 404, 500},
	} {
		for _, code := range codes {
			require.Equal(t, want, sqliteVerdict(code), code)
		}
	}
}

// The errors of drivers, and what looks like them.
type (
	mysqlError  struct{ Number uint16 }
	mattnError  struct{ Code, ExtendedCode int }
	modernError struct{ code int }
	embeds      struct{ *mysqlError }
)

func (*mysqlError) Error() string    { return "" }
func (mattnError) Error() string     { return "" }
func (*modernError) Error() string   { return "" }
func (e *modernError) Code() int     { return e.code }
func (*embeds) Error() string        { return "" }
func (*mysqlError) SQLState() string { return "" }

// TestNumbersNeedDriverPackages: the package of the type says whose a number is.
func TestNumbersNeedDriverPackages(t *testing.T) {
	const mysql, mattn = "github.com/go-sql-driver/mysql", "github.com/mattn/go-sqlite3"
	const modern, glebarez = "modernc.org/sqlite", "github.com/glebarez/go-sqlite"
	for _, c := range []struct {
		pkg    string
		err    error
		kind   numbered
		number int
	}{
		{mysql, &mysqlError{1290}, isMySQL, 1290},
		{mysql, &embeds{}, 0, 0},
		{mysql, &modernError{5}, 0, 0},
		{mattn, mattnError{5, 517}, isSQLite, 517},
		{mattn, &mysqlError{5}, 0, 0},
		{modern, &modernError{2067}, isSQLite, 2067},
		{glebarez, &modernError{2067}, isSQLite, 2067},
		{"example.com/shop", &mysqlError{1290}, 0, 0},
		{"example.com/shop", mattnError{5, 517}, 0, 0},
		{"example.com/shop", &modernError{5}, 0, 0},
	} {
		kind, number := numberIn(c.pkg, c.err, reflect.Indirect(reflect.ValueOf(c.err)))
		require.Equal(t, []any{c.kind, c.number}, []any{kind, number}, "%s %T", c.pkg, c.err)
	}
	for _, err := range []error{&mysqlError{1290}, mattnError{5, 517}, &modernError{5}, (*modernError)(nil)} {
		require.Equal(t, none, first(err, codeVerdict), "%T", err)
	}
}

func TestReaderNumbers(t *testing.T) {
	for _, n := range []int{1290, 1836, 1792, 1047} {
		require.True(t, readerNumber(n), n)
		require.Equal(t, unavailable, mysqlVerdict(n), n)
	}
	for _, n := range []int{1213, 1040, 1053, 2006, 0} {
		require.False(t, readerNumber(n), n)
	}
}

type raised struct{ Code, Routine string }

func (e *raised) Error() string    { return e.Code }
func (e *raised) SQLState() string { return e.Code }

func TestReader(t *testing.T) {
	code := func(err error) string { return map[string]string{"A": "25006", "B": "23505"}[err.Error()] }
	for _, c := range []struct {
		err  error
		want string
	}{
		{nil, ""}, {errors.New("25006"), ""},
		{&raised{"25006", ""}, probePostgreSQL}, {fmt.Errorf("write: %w", &raised{"25006", ""}), probePostgreSQL},
		{errors.Join(errors.New("x"), &raised{"25006", ""}), probePostgreSQL},
		{&raised{"0A000", "call_enum_check_hook"}, probePostgreSQL}, {&raised{"0A000", "transformFrameOffset"}, ""},
		{&raised{"0A000", "call_bool_check_hook"}, probePostgreSQL},
		{&raised{"0A000", "GetSerializableTransactionSnapshot"}, probePostgreSQL},
		{&raised{"XX000", "GetNewObjectId"}, probePostgreSQL}, {&raised{"XX000", "heap_update"}, ""},
		{&raised{"23505", ""}, ""}, {fmt.Errorf("%w: %w", &raised{"23505", ""}, errors.New("x")), ""},
		{errors.New("A"), probePostgreSQL}, {errors.New("B"), ""},
	} {
		require.Equal(t, c.want, Reader(c.err, code), "%v", c.err)
	}
	require.Empty(t, Reader(&raised{"25006", ""}, func(error) string { return "23505" }), "Code is asked first")
}
