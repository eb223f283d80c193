package saga_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"modernc.org/libc"
	sqlite3 "modernc.org/sqlite/lib"
)

// stepsOfARow is more than what SQLite's machine does for a row that it reads, and less than
// what it does for three.
const stepsOfARow = 50

// steps runs statements once more, on a connection of its own, and returns how many steps
// SQLite's machine took. What they write is rolled back.
func steps(t *testing.T, file string, statements []statement) (n int) {
	t.Helper()
	tls := libc.NewTLS()
	defer tls.Close()
	var allocated []uintptr
	text := func(s string) uintptr {
		p, err := libc.CString(s)
		require.NoError(t, err)
		allocated = append(allocated, p)
		return p
	}
	out := libc.Xcalloc(tls, 1, 8)
	allocated = append(allocated, out)
	defer func() {
		for _, p := range allocated {
			libc.Xfree(tls, p)
		}
	}()
	require.EqualValues(t, sqlite3.SQLITE_OK,
		sqlite3.Xsqlite3_open_v2(tls, text(file), out, sqlite3.SQLITE_OPEN_READWRITE, 0))
	db := libc.AtomicLoadPUintptr(out)
	defer sqlite3.Xsqlite3_close_v2(tls, db)
	sqlite3.Xsqlite3_busy_timeout(tls, db, 60_000)
	run := func(s statement) int {
		require.EqualValues(t, sqlite3.SQLITE_OK, sqlite3.Xsqlite3_prepare_v2(tls, db, text(s.text), -1, out, 0), s.text)
		stmt := libc.AtomicLoadPUintptr(out)
		defer sqlite3.Xsqlite3_finalize(tls, stmt)
		for i, arg := range s.args {
			switch arg := arg.(type) {
			case int64:
				sqlite3.Xsqlite3_bind_int64(tls, stmt, int32(i+1), arg)
			case string:
				sqlite3.Xsqlite3_bind_text(tls, stmt, int32(i+1), text(arg), int32(len(arg)), 0)
			case []byte:
				sqlite3.Xsqlite3_bind_blob(tls, stmt, int32(i+1), text(string(arg)), int32(len(arg)), 0)
			default:
				require.Nil(t, arg, s.text)
			}
		}
		for {
			switch rc := sqlite3.Xsqlite3_step(tls, stmt); rc {
			case sqlite3.SQLITE_ROW:
				continue
			case sqlite3.SQLITE_DONE:
			default:
				require.Fail(t, libc.GoString(sqlite3.Xsqlite3_errmsg(tls, db)), s.text)
			}
			return int(sqlite3.Xsqlite3_stmt_status(tls, stmt, sqlite3.SQLITE_STMTSTATUS_VM_STEP, 0))
		}
	}
	run(statement{text: "BEGIN IMMEDIATE"})
	for _, s := range statements {
		n += run(s)
	}
	run(statement{text: "ROLLBACK"})
	return n
}
