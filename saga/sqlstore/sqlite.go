package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// sqlite writes in transactions of two or three statements, of which the first
// takes the lock of the only writer. Times are milliseconds since 1970.
type sqlite struct{}

const sqliteSchema = `
CREATE TABLE IF NOT EXISTS saga (
	id               text    NOT NULL PRIMARY KEY,
	name             text    NOT NULL,
	version          integer NOT NULL,
	status           text    NOT NULL,
	data             blob    NOT NULL,
	steps            text    NOT NULL,
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
	updated_at       integer NOT NULL
);
CREATE INDEX IF NOT EXISTS saga_live ON saga (name, version, owner, wake_at) WHERE ` + isLive + `;
CREATE INDEX IF NOT EXISTS saga_stuck ON saga (id) WHERE ` + isStuck + `;
CREATE TABLE IF NOT EXISTS saga_log (
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
) WITHOUT ROWID;
` + saga.BarrierTable

// sqliteNow is the clock. (unixepoch knows fractions only since 3.42.)
const sqliteNow = "CAST((julianday('now') - 2440587.5) * 86400000.0 + 0.5 AS INTEGER)"

func (d sqlite) migrate(ctx context.Context, db *sql.DB) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	var synchronous, busy int
	if err := conn.QueryRowContext(ctx, "PRAGMA synchronous").Scan(&synchronous); err != nil {
		return err
	}
	if err := conn.QueryRowContext(ctx, "PRAGMA busy_timeout").Scan(&busy); err != nil {
		return err
	}
	if synchronous < 2 {
		return fmt.Errorf("PRAGMA synchronous is %d: must be 2 (FULL) or 3 (EXTRA) on every connection, for a committed step must survive a loss of power", synchronous)
	}
	if busy <= 0 {
		return errors.New("PRAGMA busy_timeout is 0: must be some seconds on every connection, for a writer must wait for another process's")
	}
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for statement := range strings.SplitSeq(sqliteSchema, ";") {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func (sqlite) txOptions() *sql.TxOptions { return nil }

const sqliteLock = "UPDATE saga SET seq = seq WHERE 0"

// lock makes a transaction a writer before it has read anything: what it reads
// is then the newest there is, and it cannot fail to become one later.
func (sqlite) lock(ctx context.Context, q querier) error {
	_, err := q.ExecContext(ctx, sqliteLock)
	return err
}

func (sqlite) columns() string { return recordColumns + ", " + sqliteNow + ", ''" }

func (sqlite) bind(int) string { return "?" }

// sqliteHot are the statements that are worth preparing.
var sqliteHot = []string{
	sqliteStart, sqliteCommit, sqliteCommitRelease, sqliteLog.text(1), sqliteLog.text(2),
	sqliteLock, sqliteCrashed, sqliteWaiting, sqliteClaim, sqliteHeartbeat,
}

const sqliteStart = `INSERT INTO saga (id, name, version, status, data, steps, seq, owner, epoch, wake_at, complete_by, nonce, created_at, updated_at)
SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, now + ?, now + ?, ?, now, now FROM (SELECT ` + sqliteNow + ` AS now) WHERE true
ON CONFLICT (id) DO NOTHING RETURNING created_at`

func (sqlite) start(ctx context.Context, q querier, req saga.StartRequest) (now time.Time, created bool, err error) {
	var epoch int64
	if req.Owner != "" {
		epoch = 1
	} else {
		req.Lease = 0
	}
	var completeIn any
	if req.CompleteIn > 0 {
		completeIn = req.CompleteIn.Milliseconds()
	}
	var at moment
	err = q.QueryRowContext(ctx, sqliteStart, req.ID, req.Saga, req.Version, string(req.Status), nonNil(req.Data),
		string(req.Steps), len(req.Log), req.Owner, epoch, req.Lease.Milliseconds(), completeIn, req.Nonce).Scan(&at)
	if errors.Is(err, sql.ErrNoRows) {
		return now, false, nil
	}
	if err == nil {
		err = sqliteAppend(ctx, q, req.ID, 0, epoch, req.Log)
	}
	return at.Time, err == nil, err
}

var (
	sqliteCommit        = sqliteCommitText("")
	sqliteCommitRelease = sqliteCommitText(", owner = '', wake_at = " + sqliteNow + " + ?")
)

func sqliteCommitText(release string) string {
	return `UPDATE saga SET status = ?, data = ?, steps = ?, seq = ?, failures = ?, takeovers = ?, last_error = ?, nonce = ?,
	updated_at = ` + sqliteNow + release + `
WHERE id = ? AND epoch = ? AND seq = ? RETURNING cancel_requested, cancel_note`
}

func (sqlite) commit(ctx context.Context, q querier, req saga.CommitRequest) (rc saga.Receipt, err error) {
	args := make([]any, 0, 12)
	args = append(args, string(req.Status), nonNil(req.Data), string(req.Steps), req.After(), req.Failures, req.Takeovers, req.LastError, req.Nonce)
	text := sqliteCommit
	if req.Release {
		text = sqliteCommitRelease
		args = append(args, req.WakeIn.Milliseconds())
	}
	args = append(args, req.ID, req.Epoch, req.Seq)
	err = q.QueryRowContext(ctx, text, args...).Scan(&rc.CancelRequested, &rc.CancelNote)
	if errors.Is(err, sql.ErrNoRows) {
		return rc, saga.ErrFenced
	}
	if err != nil {
		return rc, err
	}
	return rc, sqliteAppend(ctx, q, req.ID, req.Seq, req.Epoch, req.Log)
}

func (d sqlite) commitBatch(ctx context.Context, q querier, batch []*pending) error {
	for _, p := range batch {
		rc, err := d.commit(ctx, q, p.req)
		if err == saga.ErrFenced {
			continue // it has changed nothing
		}
		if err != nil {
			return err
		}
		p.receipt, p.written = rc, true
	}
	return nil
}

var sqliteLog = newByCount(func(n int) string {
	return "INSERT INTO saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at) VALUES " +
		strings.TrimPrefix(strings.Repeat(", (?, ?, ?, ?, ?, ?, ?, ?, "+sqliteNow+")", n), ", ")
})

func sqliteAppend(ctx context.Context, q querier, id string, seq, epoch int64, log []saga.Entry) error {
	args := make([]any, 0, 8*len(log))
	for i := range log {
		e := &log[i]
		args = append(args, id, seq+1+int64(i), e.Step, string(e.Op), e.Event, e.Attempt, epoch, e.Error)
	}
	_, err := q.ExecContext(ctx, sqliteLog.text(len(log)), args...)
	return err
}

const sqliteDue = `SELECT id, wake_at, owner FROM saga
WHERE ` + isLive + ` AND name = ? AND version = ? AND owner %s '' AND wake_at <= ` + sqliteNow + `
ORDER BY wake_at LIMIT ?`

var (
	sqliteCrashed = fmt.Sprintf(sqliteDue, ">")
	sqliteWaiting = fmt.Sprintf(sqliteDue, "=")
)

const sqliteClaim = `UPDATE saga SET epoch = epoch + 1, owner = ?, wake_at = ` + sqliteNow + ` + ?,
	takeovers = takeovers + (owner > '' AND owner <> ?)
WHERE id IN (SELECT value FROM json_each(?)) RETURNING ` + recordColumns + ", " + sqliteNow + ", ''"

func (d sqlite) claim(ctx context.Context, q querier, req saga.ClaimRequest) ([]saga.Record, error) {
	if err := d.lock(ctx, q); err != nil {
		return nil, err
	}
	picked, err := d.due(ctx, q, sqliteCrashed, req.Definitions, req.Limit)
	if err == nil && len(picked) < req.Limit {
		var waiting []dueSaga
		waiting, err = d.due(ctx, q, sqliteWaiting, req.Definitions, req.Limit-len(picked))
		picked = append(picked, waiting...)
	}
	if err != nil || len(picked) == 0 {
		return nil, err
	}
	ids := make([]string, len(picked))
	previous := make(map[string]string)
	for i, p := range picked {
		ids[i] = p.id
		previous[p.id] = p.owner
	}
	rows, err := q.QueryContext(ctx, sqliteClaim, req.Owner, req.Lease.Milliseconds(), req.Owner, jsonText(ids))
	return collect(rows, err, func(rows *sql.Rows) (saga.Record, error) {
		rec, err := scan(rows)
		rec.Previous = previous[rec.ID]
		return rec, err
	})
}

type dueSaga struct {
	id     string
	wakeAt int64
	owner  string
}

// due returns the first of what query finds for each definition, of which the
// index has the order.
func (sqlite) due(ctx context.Context, q querier, query string, definitions []saga.Definition, limit int) ([]dueSaga, error) {
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

const sqliteHeartbeat = `UPDATE saga SET wake_at = ` + sqliteNow + ` + ?
WHERE owner = ? AND (id, epoch) IN (SELECT json_extract(value, '$.id'), json_extract(value, '$.epoch') FROM json_each(?))
RETURNING id, epoch, 0, cancel_requested, cancel_note`

func (sqlite) heartbeat(ctx context.Context, q querier, req saga.HeartbeatRequest) (*sql.Rows, error) {
	return q.QueryContext(ctx, sqliteHeartbeat, req.Lease.Milliseconds(), req.Owner, jsonHeld(req.Held))
}

const sqliteCancel = `UPDATE saga SET cancel_requested = 1, cancel_note = ?, updated_at = ` + sqliteNow + `,
	wake_at = CASE WHEN owner = '' THEN ` + sqliteNow + ` ELSE wake_at END
WHERE id = ? AND status = 'running' AND NOT cancel_requested
RETURNING ` + recordColumns + ", " + sqliteNow + ", ''"

func (sqlite) cancel(ctx context.Context, q querier, id, note string) *sql.Row {
	return q.QueryRowContext(ctx, sqliteCancel, note, id)
}

const sqliteUnregistered = `SELECT name, version, count(*), min(wake_at), ` + sqliteNow + ` FROM saga
WHERE ` + isLive + ` AND wake_at <= ` + sqliteNow + ` AND (name, version) NOT IN (
	SELECT json_extract(value, '$.name'), json_extract(value, '$.version') FROM json_each(?))
GROUP BY name, version ORDER BY name, version`

func (sqlite) unregistered(ctx context.Context, q querier, registered []saga.Definition) (*sql.Rows, error) {
	return q.QueryContext(ctx, sqliteUnregistered, jsonDefinitions(registered))
}

func (sqlite) deleteEnded(ctx context.Context, q querier, age time.Duration, limit int) (int64, error) {
	rows, err := q.QueryContext(ctx, `DELETE FROM saga WHERE rowid IN (SELECT rowid FROM saga
	WHERE `+isEnded+` AND updated_at <= `+sqliteNow+` - ? LIMIT ?) RETURNING id`, age.Milliseconds(), limit)
	ids, err := collect(rows, err, func(rows *sql.Rows) (id string, err error) { return id, rows.Scan(&id) })
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	_, err = q.ExecContext(ctx, `DELETE FROM saga_log WHERE saga_id IN (SELECT value FROM json_each(?))`, jsonText(ids))
	return int64(len(ids)), err
}
