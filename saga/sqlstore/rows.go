package sqlstore

import (
	"database/sql"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// scan reads a record from a row with the columns of dialect.columns.
func scan(row interface{ Scan(...any) error }) (store.Record, error) {
	var r store.Record
	var wakeAt, completeBy, createdAt, updatedAt, now moment
	err := row.Scan(&r.ID, &r.Saga, &r.Version, &r.Status, &r.Data, &r.Steps, &r.Parent, &r.ParentStep, &r.Seq, &r.Nonce, &r.Owner, &r.Epoch,
		&wakeAt, &completeBy, &r.Failures, &r.Takeovers, &r.LastError, &r.CancelRequested, &r.CancelNote,
		&createdAt, &updatedAt, &now, &r.Previous)
	r.WakeAt, r.CompleteBy, r.CreatedAt, r.UpdatedAt, r.Now =
		wakeAt.Time, completeBy.Time, createdAt.Time, updatedAt.Time, now.Time
	return r, err
}

// recordColumns are the columns of scan, without the clock and the previous owner.
const recordColumns = `id, name, version, status, data, steps, parent, parent_step, seq, nonce, owner, epoch, wake_at, complete_by,
	failures, takeovers, last_error, cancel_requested, cancel_note, created_at, updated_at`

// isText reports whether a column can have s. PostgreSQL has no other texts: to look for one,
// such as an id from a request, is an error that aborts the transaction.
func isText(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }

func scanID(rows *sql.Rows) (id string, err error) { return id, rows.Scan(&id) }

func scanRenewed(rows *sql.Rows) (n store.Renewed, err error) {
	return n, rows.Scan(&n.ID, &n.Epoch, &n.Locked, &n.CancelRequested, &n.CancelNote)
}

// collect returns all rows. err is the error of the query, which collect passes on.
func collect[T any](rows *sql.Rows, err error, scan func(*sql.Rows) (T, error)) ([]T, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var list []T
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, rows.Err()
}

// A moment scans a time from a timestamp, from milliseconds since 1970, or from NULL.
type moment struct{ time.Time }

// Scan implements [sql.Scanner].
func (m *moment) Scan(v any) error {
	switch v := v.(type) {
	case nil:
		m.Time = time.Time{}
	case time.Time:
		m.Time = v
	case int64:
		m.Time = time.UnixMilli(v)
	case []byte: // a number, as MySQL writes it
		n, err := strconv.ParseInt(string(v), 10, 64)
		m.Time = time.UnixMilli(n)
		return err
	default:
		return fmt.Errorf("%T is not a time", v)
	}
	return nil
}

// orNull returns b, or NULL for nil.
func orNull(b []byte) any {
	if b == nil {
		return nil
	}
	return b
}

// nonNil returns b, or an empty slice for nil, since the column is NOT NULL.
func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}
