package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// A dialect has the statements of one kind of database. The callers of methods that take
// a querier make their statements one transaction.
type dialect interface {
	schema() string
	barrier() string                            // the table of saga.Barrier
	check(ctx context.Context, q querier) error // the connection's settings
	hasTable(ctx context.Context, q querier, name string) (bool, error)
	lockSchema(ctx context.Context, q querier) error
	unlockSchema(ctx context.Context, q querier) // after the transaction
	// isolated reports whether a statement outside of a transaction sees the newest
	// version of each row that it changes.
	isolated(ctx context.Context, q querier) (bool, error)
	txOptions() *sql.TxOptions
	lock(ctx context.Context, q querier) error
	// mayRepeat reports whether the database has rolled a transaction back that may be
	// repeated: a deadlock.
	mayRepeat(err error) bool

	start(ctx context.Context, q querier, req saga.StartRequest) (now time.Time, created bool, err error)
	commit(ctx context.Context, q querier, req saga.CommitRequest) (saga.Receipt, error)
	// commitBatch writes the commits that pass the fence and whose rows are not locked,
	// and marks them as written. An error leaves open whether any of them was.
	commitBatch(ctx context.Context, q querier, batch []*pendingCommit) error
	// startBatch writes the starts whose ids are new, all of them different, and marks
	// them as written. It may wait for a transaction that starts a saga with one of these
	// ids. An error leaves open whether any of them was written.
	startBatch(ctx context.Context, q querier, batch []*pendingStart) error
	claim(ctx context.Context, q querier, req saga.ClaimRequest) ([]saga.Record, error)
	heartbeat(ctx context.Context, q querier, req saga.HeartbeatRequest) ([]saga.Renewed, error)
	// cancel returns sql.ErrNoRows if the record is still to be read.
	cancel(ctx context.Context, q querier, id, note string) (saga.Record, error)
	// deleteEnded also removes the sagas that it deletes from their children.
	deleteEnded(ctx context.Context, q querier, status saga.Status, age time.Duration, limit int) (int64, error)

	// madeDue returns an UPDATE of at most one saga that also tells the listeners, if the
	// row then has no owner and is due.
	madeDue(update string) string

	now() string
	columns() string // of a record, in the order of scan
	bind(i int) string
	time(t time.Time) any                // as a parameter
	contains(column, text string) string // a condition
	live() string                        // the condition for running and compensating sagas
	readNewest() string                  // the end of a query that must see the newest version of a row
	comparesRows() bool                  // whether it uses an index for (a, b) > (c, d)
}

// A querier is a *sql.DB or a *sql.Tx.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// logArgs returns the columns of log entries, without their time.
func logArgs(id string, seq, epoch int64, log []saga.Entry) []any {
	args := make([]any, 0, 8*len(log))
	for i := range log {
		e := &log[i]
		args = append(args, id, seq+1+int64(i), e.Step, string(e.Op), string(e.Kind), e.Attempt, epoch, e.Error)
	}
	return args
}

// startEach starts sagas one after the other in one transaction.
func startEach(ctx context.Context, q querier, d dialect, batch []*pendingStart) error {
	for _, p := range batch {
		now, created, err := d.start(ctx, q, p.req)
		if err != nil {
			return err
		}
		if p.written = created; created {
			p.answer = newRecord(p.req, now)
		}
	}
	return nil
}

// pick returns the ids of the sagas to claim, and their owners before. The queries are for
// those of crashed owners and for those without one.
func pick(ctx context.Context, q querier, crashed, waiting string, req saga.ClaimRequest) (ids []string, previous map[string]string, err error) {
	picked, err := due(ctx, q, crashed, req.Definitions, req.Limit)
	if err == nil && len(picked) < req.Limit {
		var more []dueSaga
		more, err = due(ctx, q, waiting, req.Definitions, req.Limit-len(picked))
		picked = append(picked, more...)
	}
	previous = make(map[string]string)
	for _, p := range picked {
		ids = append(ids, p.id)
		previous[p.id] = p.owner
	}
	return ids, previous, err
}

type dueSaga struct {
	id     string
	wakeAt int64
	owner  string
}

// due returns the first sagas that query finds for each definition. The index has the
// order.
func due(ctx context.Context, q querier, query string, definitions []saga.Definition, limit int) ([]dueSaga, error) {
	var found []dueSaga
	for _, d := range definitions {
		rows, err := q.QueryContext(ctx, query, d.Saga, d.Version, limit)
		list, err := collect(rows, err, func(rows *sql.Rows) (s dueSaga, err error) {
			return s, rows.Scan(&s.id, &s.wakeAt, &s.owner)
		})
		if err != nil {
			return nil, err
		}
		found = append(found, list...)
	}
	slices.SortStableFunc(found, func(a, b dueSaga) int { return cmp.Compare(a.wakeAt, b.wakeAt) })
	return found[:min(limit, len(found))], nil
}
