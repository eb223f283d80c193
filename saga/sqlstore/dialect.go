package sqlstore

import (
	"context"
	"database/sql"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/internal/sqltx"
)

// A dialect has the statements of one kind of database. The callers of methods that take
// a querier make their statements one transaction.
type dialect interface {
	schema() string
	barrier() string                            // the table of saga.Apply
	check(ctx context.Context, q querier) error // the connection's settings
	hasTable(ctx context.Context, q querier, name string) (bool, error)
	lockSchema(ctx context.Context, q querier) error
	unlockSchema(ctx context.Context, q querier) // after the transaction
	// isolated reports whether a statement outside of a transaction sees the newest
	// version of each row that it changes.
	isolated(ctx context.Context, q querier) (bool, error)
	txOptions() *sql.TxOptions
	lock(ctx context.Context, q querier) error // makes a transaction the writer where there is one

	// commit waits for its row, and returns ErrFenced if that does not pass the fence.
	commit(ctx context.Context, q querier, req store.CommitRequest) (store.Receipt, error)
	// commitBatch writes the commits that pass the fence and whose rows are not locked,
	// and marks them as written. An error leaves open whether any of them was.
	commitBatch(ctx context.Context, q querier, batch []*pendingCommit) error
	// startBatch writes the starts whose ids are new, all of them different, and marks
	// them as written. It may wait for a transaction that starts a saga with one of these
	// ids. An error leaves open whether any of them was written.
	startBatch(ctx context.Context, q querier, batch []*pendingStart) error
	// claim claims sagas of the first queue, then of the next, up to the limit.
	claim(ctx context.Context, q querier, req store.ClaimRequest, queues []queue) ([]store.Record, error)
	heartbeat(ctx context.Context, q querier, req store.HeartbeatRequest) ([]store.Renewed, error)
	// changed runs an UPDATE of a saga, which may make it due, and returns its record as of then,
	// or sql.ErrNoRows if that is still to be read: in the same transaction, or because there
	// was nothing to change.
	changed(ctx context.Context, q querier, text string, args ...any) (store.Record, error)
	// ended returns the ids of sagas that ended long ago and have no parent, and locks them.
	ended(ctx context.Context, q querier, status store.Status, age time.Duration, limit int) ([]string, error)

	// madeDue returns an UPDATE of at most one saga that also tells the listeners, if the
	// row then has no owner and is due.
	madeDue(update string) string

	now() string
	columns() string // of a record, in the order of scan
	bind(i int) string
	time(t time.Time) any // as a parameter
	// oneOf returns the condition that a column is one of some ids, and its parameters, which
	// are the first.
	oneOf(column string, ids []string) (condition string, args []any)
	live() string // the condition for running and compensating sagas
	// groups returns a query of the different values of the first columns of an index, and of
	// the least value of the next column in each group. It reads no more entries than it
	// returns. where is empty, or the condition of the index.
	groups(index, columns, next, where string) string
	// count returns an expression for how many entries of an index a condition admits, up to
	// store.CountLimit. order is the columns of the index that the condition does not fix.
	count(index, where, order string) string
	from(index string) string // the table, read by an index; "" is the primary key
	readNewest() string       // the end of a query that must see the newest version of a row
	forUpdate() string        // the end of a query that locks its rows
	comparesRows() bool       // whether it uses an index for (a, b) > (c, d)
}

// A querier is a *sql.DB, a *sql.Conn or a *sql.Tx.
type querier = sqltx.Querier

// countFirst is dialect.count. The order keeps planners from reading the table instead of the
// index.
func countFirst(from, where, order, limit string) string {
	return "(SELECT count(*) FROM (SELECT 1 FROM " + from + " WHERE " + where + " ORDER BY " + order + " LIMIT " + limit + ") AS c)"
}

func and(where, condition string) string {
	if where == "" {
		return condition
	}
	return where + " AND " + condition
}

// What MySQL and SQLite have in common, whose times are milliseconds.

// startArgs returns the parameters of a start, and the epoch of the saga.
func startArgs(req store.StartRequest) (args []any, epoch int64) {
	if req.Owner != "" {
		epoch = 1
	} else {
		req.LeaseTTL = 0
	}
	var completeIn any
	if req.CompleteIn > 0 {
		completeIn = req.CompleteIn.Milliseconds()
	}
	return []any{req.ID, req.Saga, req.Version, string(req.Status), nonNil(req.Data), string(req.Steps), len(req.Log),
		req.Owner, epoch, req.LeaseTTL.Milliseconds(), completeIn, req.Nonce, req.Parent, req.ParentStep}, epoch
}

// commitText returns the statement of a commit that releases the saga, or does not, for the
// parameters of commitArgs and those of the condition.
func commitText(now string, release bool, condition string) string {
	released := ""
	if release {
		released = ", owner = '', wake_at = " + now + " + ?"
	}
	return `UPDATE {p}saga SET status = ?, data = COALESCE(?, data), steps = ?, seq = ?, failures = ?, takeovers = ?, last_error = ?, nonce = ?,
	updated_at = ` + now + released + ` WHERE ` + condition
}

// commitArgs returns the parameters of what a commit sets.
func commitArgs(req store.CommitRequest) []any {
	args := append(make([]any, 0, 12), string(req.Status), orNull(req.Data), string(req.Steps), req.After(),
		req.Failures, req.Takeovers, req.LastError, req.Nonce)
	if req.Release {
		args = append(args, req.WakeIn.Milliseconds())
	}
	return args
}

// answerStarts reads when the sagas were started, and marks them as written.
func answerStarts(rows *sql.Rows, err error, created map[string]*pendingStart) error {
	_, err = collect(rows, err, func(rows *sql.Rows) (id string, err error) {
		var at moment
		err = rows.Scan(&id, &at)
		if p := created[id]; p != nil {
			p.answer, p.written = newRecord(p.req, at.Time), true
		}
		return id, err
	})
	return err
}

// changes reports whether a statement has changed a row.
func changes(res sql.Result, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

// A logRows has entries of the logs of sagas, eight values for each.
type logRows []any

// logText returns the statement that inserts n of them.
func logText(n int, now string) string {
	return "INSERT INTO {p}saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at) VALUES " +
		strings.TrimPrefix(strings.Repeat(", (?, ?, ?, ?, ?, ?, ?, ?, "+now+")", n), ", ")
}

func (l *logRows) add(id string, seq, epoch int64, log []store.Entry) {
	for i := range log {
		e := &log[i]
		*l = append(*l, id, seq+1+int64(i), e.Step, string(e.Op), string(e.Kind), e.Attempt, epoch, e.Error)
	}
}

// insert makes as few statements as it can with those that are prepared.
func (l logRows) insert(ctx context.Context, q querier, texts *byCount) error {
	for len(l) > 0 {
		n := min(len(l)/8, maxBatch)
		for texts.few[n] == "" {
			n--
		}
		if _, err := q.ExecContext(ctx, texts.few[n], l[:8*n]...); err != nil {
			return err
		}
		l = l[8*n:]
	}
	return nil
}

// pick returns the ids of the sagas to claim, and their owners before. The query is for the
// first of a queue. The index has the order.
func pick(ctx context.Context, q querier, query string, queues []queue, limit int) (ids []string, previous map[string]string, err error) {
	previous = make(map[string]string)
	for _, d := range queues {
		if len(ids) == limit {
			break
		}
		rows, err := q.QueryContext(ctx, query, d.Name, d.Version, d.Owned, limit-len(ids))
		_, err = collect(rows, err, func(rows *sql.Rows) (_ bool, err error) {
			var id, owner string
			if err = rows.Scan(&id, &owner); err == nil {
				ids, previous[id] = append(ids, id), owner
			}
			return true, err
		})
		if err != nil {
			return nil, nil, err
		}
	}
	return ids, previous, nil
}

// execOnly is changed in a transaction, in which the record can be read afterwards.
func execOnly(ctx context.Context, q querier, text string, args []any) (rec store.Record, err error) {
	if _, err = q.ExecContext(ctx, text, args...); err == nil {
		err = sql.ErrNoRows
	}
	return rec, err
}
