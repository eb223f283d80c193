package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// A sqlite writes in transactions of a few statements, the first of which takes the
// write lock. Times are milliseconds since 1970.
type sqlite struct {
	started, committed, released string
	startedAt, canceling         string
	log                          *byCount
	locked, due                  string
	claimed, beat                string
	endedRoots                   string
}

func newSQLite(t tables) *sqlite {
	const fenced = "id = ? AND epoch = ? AND seq = ?"
	return &sqlite{
		started:   t.sql(sqliteStart),
		committed: t.sql(commitText(sqliteNow, false, fenced)),
		released:  t.sql(commitText(sqliteNow, true, fenced)),
		log:       newByCount(func(n int) string { return t.sql(logText(n, sqliteNow)) }),
		startedAt: t.sql("SELECT id, created_at FROM {p}saga WHERE id IN (SELECT value FROM json_each(?))"),
		canceling: t.sql("SELECT id, cancel_note FROM {p}saga WHERE id IN (SELECT value FROM json_each(?)) AND cancel_requested"),
		locked:    t.sql("UPDATE {p}saga SET seq = seq WHERE 0"),
		due:       t.sql(sqliteDue),
		claimed:   t.sql(sqliteClaim), beat: t.sql(sqliteHeartbeat),
		endedRoots: t.sql(sqliteEnded),
	}
}

const sqliteSchema = `
CREATE TABLE {p}saga (
	id               text    NOT NULL PRIMARY KEY,
	name             text    NOT NULL,
	version          integer NOT NULL,
	status           text    NOT NULL CHECK (` + isStatus + `),
	data             blob    NOT NULL,
	steps            text    NOT NULL,
	parent           text    NOT NULL DEFAULT '',
	parent_step      text    NOT NULL DEFAULT '',
	seq              integer NOT NULL,
	nonce            integer NOT NULL,
	owner            text    NOT NULL,
	epoch            integer NOT NULL,
	wake_at          integer NOT NULL,
	complete_by      integer,
	failures         integer NOT NULL DEFAULT 0,
	takeovers        integer NOT NULL DEFAULT 0,
	last_error       text    NOT NULL DEFAULT '',
	cancel_requested integer NOT NULL DEFAULT 0,
	cancel_note      text    NOT NULL DEFAULT '',
	created_at       integer NOT NULL,
	updated_at       integer NOT NULL,
	owned            integer AS (owner > '')
) STRICT;
` + indexes + `
CREATE TABLE {p}saga_log (
	saga_id text    NOT NULL,
	seq     integer NOT NULL,
	step    text    NOT NULL,
	op      text    NOT NULL,
	event   text    NOT NULL,
	attempt integer NOT NULL,
	epoch   integer NOT NULL,
	error   text    NOT NULL,
	at      integer NOT NULL,
	PRIMARY KEY (saga_id, seq)
) STRICT, WITHOUT ROWID;
` + sqliteSignals

// sqliteNow is the clock. (unixepoch has no fractions before 3.42.)
const sqliteNow = "CAST((julianday('now') - 2440587.5) * 86400000.0 + 0.5 AS INTEGER)"

func (*sqlite) schema() string { return sqliteSchema }

func (*sqlite) barrier() string { return participant.Table }

// check rejects settings that could lose a commit, or do not wait for a lock.
func (*sqlite) check(ctx context.Context, q querier) error {
	var synchronous, busy int
	if err := q.QueryRowContext(ctx, "PRAGMA synchronous").Scan(&synchronous); err != nil {
		return err
	}
	if err := q.QueryRowContext(ctx, "PRAGMA busy_timeout").Scan(&busy); err != nil {
		return err
	}
	if synchronous < 2 {
		return fmt.Errorf("PRAGMA synchronous is %d: must be 2 (FULL) or 3 (EXTRA) on every connection, since a committed step must survive a loss of power", synchronous)
	}
	if busy <= 0 {
		return errors.New("PRAGMA busy_timeout is 0: must be some seconds on every connection, since a writer must wait for those of other processes")
	}
	return nil
}

func (*sqlite) hasTable(ctx context.Context, q querier, name string) (has bool, err error) {
	return has, q.QueryRowContext(ctx, `SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?`, name).Scan(&has)
}

// lockSchema makes the transaction the writer. That takes a real write.
func (*sqlite) lockSchema(ctx context.Context, q querier) error {
	_, err := q.ExecContext(ctx, `CREATE TABLE saga_migrating (id integer)`)
	if err == nil {
		_, err = q.ExecContext(ctx, `DROP TABLE saga_migrating`)
	}
	return err
}

func (*sqlite) unlockSchema(context.Context, querier) {}

func (*sqlite) readNewest() string { return "" }

func (*sqlite) isolated(context.Context, querier) (bool, error) { return true, nil }

func (*sqlite) txOptions() *sql.TxOptions { return nil }

// lock makes a transaction the writer before it has read anything. Then it reads the
// newest rows, and cannot fail to become the writer later.
func (d *sqlite) lock(ctx context.Context, q querier) error {
	_, err := q.ExecContext(ctx, d.locked)
	return err
}

func (*sqlite) madeDue(update string) string { return update }

func (*sqlite) now() string { return sqliteNow }

func (*sqlite) columns() string {
	return recordColumns + ", " + sqliteNow + " AS store_now, '' AS previous"
}

func (*sqlite) bind(int) string { return "?" }

func (*sqlite) time(t time.Time) any { return t.UnixMilli() }

func (*sqlite) oneOf(column string, ids []string) (string, []any) {
	return column + " IN (SELECT value FROM json_each(?))", []any{jsonText(ids)}
}

func (*sqlite) forUpdate() string { return "" }

func (*sqlite) live() string { return isLive }

func (*sqlite) comparesRows() bool { return true }

// groups asks the index for the first entry after each group. Without the plus signs, which
// remove the affinities of the columns, SQLite would use only the first column of the index.
// It begins at the first entry that is not less than the row, even where it wants a greater
// one. So the row ends with a blob, which is greater than every number and text: it is past
// all entries of the group.
func (d *sqlite) groups(index, columns, next, where string) string {
	order := columns + ", " + next
	first := func(condition string) string {
		return "(SELECT rowid FROM " + d.from(index) + " WHERE " + and(where, condition) + " ORDER BY " + order + " LIMIT 1)"
	}
	return "WITH RECURSIVE g(first) AS (SELECT " + first("name > ''") + " UNION ALL SELECT " +
		first("("+order+") > (+s."+strings.ReplaceAll(columns, ", ", ", +s.")+", x'')") + " FROM g CROSS JOIN {p}saga s ON s.rowid = g.first)" +
		" SELECT " + order + " FROM g CROSS JOIN {p}saga ON rowid = g.first"
}

// from names the index: until someone has run ANALYZE, SQLite might take another and sort.
func (*sqlite) from(index string) string {
	if index == "" {
		return "{p}saga"
	}
	return "{p}saga INDEXED BY {p}" + index
}

func (d *sqlite) count(index, where, order string) string {
	return countFirst(d.from(index), where, order, strconv.Itoa(store.CountLimit))
}

// hot returns the statements that are worth preparing.
func (d *sqlite) hot() []string {
	return append(d.log.texts(), d.started, d.startedAt, d.committed, d.released, d.canceling, d.locked, d.due, d.claimed, d.beat)
}

// RETURNING would cost each of these statements a temporary table, and a journal of its own.
const sqliteStart = `INSERT INTO {p}saga (id, name, version, status, data, steps, seq, owner, epoch, wake_at, complete_by, nonce,
	parent, parent_step, created_at, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ` + sqliteNow + ` + ?, ` + sqliteNow + ` + ?, ?, ?, ?, ` + sqliteNow + `, ` + sqliteNow + `)
ON CONFLICT (id) DO NOTHING`

func (d *sqlite) startBatch(ctx context.Context, q querier, batch []*pendingStart) error {
	var log logRows
	created := make(map[string]*pendingStart, len(batch))
	for _, p := range batch {
		args, epoch := startArgs(p.req)
		switch changed, err := changes(q.ExecContext(ctx, d.started, args...)); {
		case err != nil:
			return err
		case changed:
			created[p.req.ID] = p
			log.add(p.req.ID, 0, epoch, p.req.Log)
		}
	}
	if len(created) == 0 {
		return nil
	}
	rows, err := q.QueryContext(ctx, d.startedAt, jsonText(slices.Collect(maps.Keys(created))))
	if err := answerStarts(rows, err, created); err != nil {
		return err
	}
	return log.insert(ctx, q, d.log)
}

func (d *sqlite) commit(ctx context.Context, q querier, req store.CommitRequest) (store.Receipt, error) {
	p := &pendingCommit{req: req}
	err := d.commitBatch(ctx, q, []*pendingCommit{p})
	if err == nil && !p.written {
		err = store.ErrFenced
	}
	return p.answer, err
}

func (d *sqlite) commitBatch(ctx context.Context, q querier, batch []*pendingCommit) error {
	var log logRows
	written := make(map[string]*pendingCommit, len(batch))
	for _, p := range batch {
		text, req := d.committed, p.req
		if req.Release {
			text = d.released
		}
		switch changed, err := changes(q.ExecContext(ctx, text, append(commitArgs(req), req.ID, req.Epoch, req.Seq)...)); {
		case err != nil:
			return err
		case changed: // and otherwise it is fenced
			p.written, written[req.ID] = true, p
			log.add(req.ID, req.Seq, req.Epoch, req.Log)
		}
	}
	if len(written) == 0 {
		return nil
	}
	rows, err := q.QueryContext(ctx, d.canceling, jsonText(slices.Collect(maps.Keys(written))))
	if _, err = collect(rows, err, func(rows *sql.Rows) (id string, err error) {
		var note string
		if err = rows.Scan(&id, &note); err == nil && written[id] != nil {
			written[id].answer = store.Receipt{CancelRequested: true, CancelNote: note}
		}
		return id, err
	}); err != nil {
		return err
	}
	return log.insert(ctx, q, d.log)
}

const sqliteDue = `SELECT id, owner FROM {p}saga
WHERE ` + isLive + ` AND name = ? AND version = ? AND owned = ? AND wake_at <= ` + sqliteNow + `
ORDER BY wake_at LIMIT ?`

const sqliteClaim = `UPDATE {p}saga SET epoch = epoch + 1, owner = ?, wake_at = ` + sqliteNow + ` + ?,
	takeovers = takeovers + (owner > '' AND owner <> ?)
WHERE id IN (SELECT value FROM json_each(?)) RETURNING ` + recordColumns + ", " + sqliteNow + ", ''"

func (d *sqlite) claim(ctx context.Context, q querier, req store.ClaimRequest, queues []queue) ([]store.Record, error) {
	if err := d.lock(ctx, q); err != nil {
		return nil, err
	}
	ids, previous, err := pick(ctx, q, d.due, queues, req.Limit)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	rows, err := q.QueryContext(ctx, d.claimed, req.Owner, req.LeaseTTL.Milliseconds(), req.Owner, jsonText(ids))
	return collect(rows, err, func(rows *sql.Rows) (store.Record, error) {
		rec, err := scan(rows)
		rec.Previous = previous[rec.ID]
		return rec, err
	})
}

const sqliteHeartbeat = `UPDATE {p}saga SET wake_at = ` + sqliteNow + ` + ?
WHERE owner = ? AND (id, epoch) IN (SELECT json_extract(value, '$.id'), json_extract(value, '$.epoch') FROM json_each(?))
RETURNING id, epoch, 0, cancel_requested, cancel_note`

func (d *sqlite) heartbeat(ctx context.Context, q querier, req store.HeartbeatRequest) ([]store.Renewed, error) {
	rows, err := q.QueryContext(ctx, d.beat, req.LeaseTTL.Milliseconds(), req.Owner, jsonHeld(req.Held))
	return collect(rows, err, scanRenewed)
}

const sqliteEnded = `SELECT id FROM {p}saga
WHERE ` + isDeletable + ` AND status = ? AND wake_at <= ` + sqliteNow + ` - ? ORDER BY wake_at LIMIT ?`

func (d *sqlite) ended(ctx context.Context, q querier, status store.Status, age time.Duration, limit int) ([]string, error) {
	rows, err := q.QueryContext(ctx, d.endedRoots, string(status), age.Milliseconds(), limit)
	return collect(rows, err, scanID)
}

func (*sqlite) changed(ctx context.Context, q querier, text string, args ...any) (store.Record, error) {
	return execOnly(ctx, q, text, args)
}
