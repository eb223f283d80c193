package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga/internal/participant"
	"github.com/go-resilience/resilience/saga/store"
)

// A sqlite writes in transactions of two or three statements, the first of which takes the
// write lock. Times are milliseconds since 1970.
type sqlite struct {
	started, committed, released string
	log                          *byCount
	locked, due                  string
	claimed, beat, canceled      string
	deletedSaga, deletedLog      string
	deletedSignals, orphaned     string
	endedRoots, endedKids        string
}

func newSQLite(t tables) *sqlite {
	return &sqlite{
		started: t.sql(sqliteStart), committed: t.sql(sqliteCommitText("")),
		released: t.sql(sqliteCommitText(", owner = '', wake_at = " + sqliteNow + " + ?")),
		log:      newByCount(func(n int) string { return t.sql(logText(n, sqliteNow)) }),
		locked:   t.sql("UPDATE {p}saga SET seq = seq WHERE 0"),
		due:      t.sql(sqliteDue),
		claimed:  t.sql(sqliteClaim), beat: t.sql(sqliteHeartbeat), canceled: t.sql(sqliteCancel),
		endedRoots: t.sql(sqliteEnded),
		endedKids: t.sql(`SELECT id FROM {p}saga WHERE ` + isChild + ` AND ` + isEnded +
			` AND parent IN (SELECT value FROM json_each(?)) LIMIT ?`),
		deletedSaga:    t.sql(`DELETE FROM {p}saga WHERE id IN (SELECT value FROM json_each(?))`),
		deletedLog:     t.sql(`DELETE FROM {p}saga_log WHERE saga_id IN (SELECT value FROM json_each(?))`),
		deletedSignals: t.sql(`DELETE FROM {p}saga_signal WHERE saga_id IN (SELECT value FROM json_each(?))`),
		orphaned: t.sql(`UPDATE {p}saga SET parent = '', parent_step = '' WHERE ` + isChild +
			` AND parent IN (SELECT value FROM json_each(?))`),
	}
}

const sqliteSchema = `
CREATE TABLE {p}saga (
	id               text    NOT NULL PRIMARY KEY,
	name             text    NOT NULL,
	version          integer NOT NULL,
	status           text    NOT NULL,
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
	reported         integer NOT NULL DEFAULT 0,
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
CREATE TABLE {p}saga_schema (version integer NOT NULL);
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

func (*sqlite) contains(column, text string) string { return "instr(" + column + ", " + text + ") > 0" }

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
	return append(d.log.texts(), d.started, d.committed, d.released, d.locked, d.due, d.claimed, d.beat)
}

const sqliteStart = `INSERT INTO {p}saga (id, name, version, status, data, steps, seq, owner, epoch, wake_at, complete_by, nonce,
	parent, parent_step, created_at, updated_at)
SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, now + ?, now + ?, ?, ?, ?, now, now FROM (SELECT ` + sqliteNow + ` AS now) WHERE true
ON CONFLICT (id) DO NOTHING RETURNING created_at`

func (d *sqlite) startBatch(ctx context.Context, q querier, batch []*pendingStart) error {
	var log logRows
	for _, p := range batch {
		args, epoch := startArgs(p.req)
		var at moment
		switch err := q.QueryRowContext(ctx, d.started, args...).Scan(&at); {
		case errors.Is(err, sql.ErrNoRows): // it exists
		case err != nil:
			return err
		default:
			p.answer, p.written = newRecord(p.req, at.Time), true
			log.add(p.req.ID, 0, epoch, p.req.Log)
		}
	}
	return log.insert(ctx, q, d.log)
}

func sqliteCommitText(release string) string {
	return `UPDATE {p}saga SET status = ?, data = COALESCE(?, data), steps = ?, seq = ?, failures = ?, takeovers = ?, last_error = ?, nonce = ?, reported = 0,
	updated_at = ` + sqliteNow + release + `
WHERE id = ? AND epoch = ? AND seq = ? RETURNING cancel_requested, cancel_note`
}

func (d *sqlite) commit(ctx context.Context, q querier, req store.CommitRequest) (rc store.Receipt, err error) {
	var log logRows
	if rc, err = d.update(ctx, q, req, &log); err != nil {
		return rc, err
	}
	return rc, log.insert(ctx, q, d.log)
}

// update writes a commit, except for its log.
func (d *sqlite) update(ctx context.Context, q querier, req store.CommitRequest, log *logRows) (rc store.Receipt, err error) {
	text := d.committed
	if req.Release {
		text = d.released
	}
	err = q.QueryRowContext(ctx, text, append(commitArgs(req), req.ID, req.Epoch, req.Seq)...).Scan(&rc.CancelRequested, &rc.CancelNote)
	if errors.Is(err, sql.ErrNoRows) {
		return rc, store.ErrFenced
	}
	log.add(req.ID, req.Seq, req.Epoch, req.Log)
	return rc, err
}

func (d *sqlite) commitBatch(ctx context.Context, q querier, batch []*pendingCommit) error {
	var log logRows
	for _, p := range batch {
		rc, err := d.update(ctx, q, p.req, &log)
		if err == store.ErrFenced {
			continue // nothing was changed
		}
		if err != nil {
			return err
		}
		p.answer, p.written = rc, true
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

const sqliteCancel = `UPDATE {p}saga SET cancel_requested = 1, cancel_note = ?, updated_at = ` + sqliteNow + `,
	wake_at = CASE WHEN owner = '' THEN ` + sqliteNow + ` ELSE wake_at END
WHERE id = ? AND status = 'running' AND NOT cancel_requested
RETURNING ` + recordColumns + ", " + sqliteNow + ", ''"

func (d *sqlite) cancel(ctx context.Context, q querier, id, note string) (store.Record, error) {
	return scan(q.QueryRowContext(ctx, d.canceled, note, id))
}

const sqliteEnded = `SELECT id FROM {p}saga
WHERE ` + isDeletable + ` AND status = ? AND wake_at <= ` + sqliteNow + ` - ? ORDER BY wake_at LIMIT ?`

func (d *sqlite) ended(ctx context.Context, q querier, status store.Status, age time.Duration, limit int) ([]string, error) {
	rows, err := q.QueryContext(ctx, d.endedRoots, string(status), age.Milliseconds(), limit)
	return collect(rows, err, scanID)
}

func (d *sqlite) endedChildren(ctx context.Context, q querier, ids []string, limit int) ([]string, error) {
	rows, err := q.QueryContext(ctx, d.endedKids, jsonText(ids), limit)
	return collect(rows, err, scanID)
}

func (d *sqlite) remove(ctx context.Context, q querier, ids []string) error {
	for _, text := range []string{d.deletedSaga, d.deletedLog, d.deletedSignals, d.orphaned} {
		if _, err := q.ExecContext(ctx, text, jsonText(ids)); err != nil {
			return err
		}
	}
	return nil
}
