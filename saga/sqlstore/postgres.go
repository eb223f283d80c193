package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// postgres makes each write one statement: what belongs together is a CTE that
// modifies data.
type postgres struct{}

// In postgresSchema ids compare as bytes. The rows of saga have room for the
// versions that the steps leave behind, which then touch no index.
const postgresSchema = `
CREATE TABLE IF NOT EXISTS saga (
	id               text COLLATE "C" PRIMARY KEY,
	name             text        NOT NULL,
	version          bigint      NOT NULL,
	status           text        NOT NULL,
	data             bytea       NOT NULL,
	steps            text        NOT NULL,
	seq              bigint      NOT NULL,
	nonce            bigint      NOT NULL,
	owner            text        NOT NULL,
	epoch            bigint      NOT NULL,
	wake_at          timestamptz NOT NULL,
	complete_by      timestamptz,
	failures         bigint      NOT NULL DEFAULT 0,
	takeovers        bigint      NOT NULL DEFAULT 0,
	last_error       text        NOT NULL DEFAULT '',
	cancel_requested boolean     NOT NULL DEFAULT false,
	cancel_note      text        NOT NULL DEFAULT '',
	created_at       timestamptz NOT NULL,
	updated_at       timestamptz NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX IF NOT EXISTS saga_live ON saga (name, version, owner, wake_at) WHERE ` + isLive + `;
CREATE INDEX IF NOT EXISTS saga_stuck ON saga (id) WHERE ` + isStuck + `;
CREATE TABLE IF NOT EXISTS saga_log (
	saga_id text COLLATE "C" NOT NULL,
	seq     bigint      NOT NULL,
	step    text        NOT NULL,
	op      text        NOT NULL,
	event   text        NOT NULL,
	attempt bigint      NOT NULL,
	epoch   bigint      NOT NULL,
	error   text        NOT NULL,
	at      timestamptz NOT NULL,
	PRIMARY KEY (saga_id, seq)
);
` + saga.BarrierTable

func (postgres) migrate(ctx context.Context, db *sql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	// IF NOT EXISTS alone lets two that create the same table collide.
	if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock(7234061925530741)`); err != nil {
		return err
	}
	for statement := range strings.SplitSeq(postgresSchema, ";") {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// txOptions asks for the isolation under which an UPDATE sees the newest
// version of its row, whatever the default of the database.
func (postgres) txOptions() *sql.TxOptions {
	return &sql.TxOptions{Isolation: sql.LevelReadCommitted}
}

func (postgres) lock(context.Context, querier) error { return nil }

func (postgres) columns() string { return recordColumns + ", statement_timestamp(), ''" }

func (postgres) bind(i int) string { return "$" + strconv.Itoa(i) }

func (postgres) start(ctx context.Context, q querier, req saga.StartRequest) (now time.Time, created bool, err error) {
	epoch := 0
	if req.Owner != "" {
		epoch = 1
	} else {
		req.Lease = 0
	}
	args := []any{req.ID, req.Saga, req.Version, string(req.Status), nonNil(req.Data), string(req.Steps),
		len(req.Log), req.Owner, epoch, req.Lease.Microseconds(), req.CompleteIn.Microseconds(), req.Nonce}
	err = q.QueryRowContext(ctx, postgresStart.text(len(req.Log)), appendLog(args, req.Log)...).Scan(&now)
	if errors.Is(err, sql.ErrNoRows) {
		return now, false, nil
	}
	return now, err == nil, err
}

// postgresStart and postgresCommit are written for a log of n entries.
var (
	postgresStart = newByCount(func(n int) string {
		return `WITH t AS (SELECT statement_timestamp() AS now),
s AS (INSERT INTO saga (id, name, version, status, data, steps, seq, owner, epoch, wake_at, complete_by, nonce, created_at, updated_at)
	SELECT $1, $2, $3::bigint, $4, $5::bytea, $6, $7::bigint, $8, $9::bigint, now + $10::bigint * interval '1 microsecond',
		CASE WHEN $11::bigint > 0 THEN now + $11::bigint * interval '1 microsecond' END, $12::bigint, now, now
	FROM t ON CONFLICT (id) DO NOTHING
	RETURNING epoch, created_at AS now),
` + postgresLog("0", 13, n) + `
SELECT now FROM s`
	})
	postgresCommit        = newByCount(func(n int) string { return postgresCommitText(n, "", 12) })
	postgresCommitRelease = newByCount(func(n int) string {
		return postgresCommitText(n, ", owner = '', wake_at = statement_timestamp() + $12::bigint * interval '1 microsecond'", 13)
	})
)

func postgresCommitText(n int, release string, next int) string {
	return `WITH s AS (UPDATE saga SET status = $4, data = $5, steps = $6, seq = $7, failures = $8, takeovers = $9,
		last_error = $10, nonce = $11, updated_at = statement_timestamp()` + release + `
	WHERE id = $1 AND epoch = $2 AND seq = $3
	RETURNING epoch, updated_at AS now, cancel_requested, cancel_note),
` + postgresLog("$3::bigint", next, n) + `
SELECT cancel_requested, cancel_note FROM s`
}

// postgresLog is a CTE that appends n entries, whose parameters begin at next,
// to the log of the saga in s.
func postgresLog(seq string, next, n int) string {
	var b strings.Builder
	b.WriteString("l AS (INSERT INTO saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)\n" +
		"	SELECT $1, v.seq, v.step, v.op, v.event, v.attempt, s.epoch, v.error, s.now FROM s, (VALUES ")
	for i := range n {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString("(" + seq + " + " + strconv.Itoa(i+1))
		for _, typ := range []string{"", "", "", "::bigint", ""} {
			b.WriteString(", $" + strconv.Itoa(next) + typ)
			next++
		}
		b.WriteString(")")
	}
	b.WriteString(") AS v(seq, step, op, event, attempt, error))")
	return b.String()
}

func (postgres) commit(ctx context.Context, q querier, req saga.CommitRequest) (rc saga.Receipt, err error) {
	args := make([]any, 0, 16)
	args = append(args, req.ID, req.Epoch, req.Seq, string(req.Status), nonNil(req.Data), string(req.Steps),
		req.After(), req.Failures, req.Takeovers, req.LastError, req.Nonce)
	text := postgresCommit
	if req.Release {
		text = postgresCommitRelease
		args = append(args, req.WakeIn.Microseconds())
	}
	err = q.QueryRowContext(ctx, text.text(len(req.Log)), appendLog(args, req.Log)...).Scan(&rc.CancelRequested, &rc.CancelNote)
	if errors.Is(err, sql.ErrNoRows) {
		err = saga.ErrFenced
	}
	return rc, err
}

// postgresBatch is the commit of many sagas. It passes over those that are not
// as the fence wants them, and those that another has locked: it never waits,
// so neither one slow owner nor a deadlock can hold up a batch. The condition on
// "one" lets the planner expect one row, and so look each id up in the index: a
// plan that is made, and kept, while the table is new would else read all of it.
const postgresBatch = `WITH k AS MATERIALIZED (
	SELECT r.* FROM json_to_recordset($1::json) AS r(one bigint, i bigint, id text, epoch bigint, seq bigint,
		nonce bigint, status text, data text, steps text, after bigint, failures bigint, takeovers bigint, last_error text,
		release boolean, wake_in bigint, log json)
	JOIN saga s ON s.id = r.id AND s.epoch = r.epoch AND s.seq = r.seq
	WHERE r.one = 1 FOR UPDATE OF s SKIP LOCKED),
s AS (UPDATE saga s SET status = k.status, data = decode(k.data, 'base64'), steps = k.steps, seq = k.after,
		failures = k.failures, takeovers = k.takeovers, last_error = k.last_error, nonce = k.nonce, updated_at = statement_timestamp(),
		owner = CASE WHEN k.release THEN '' ELSE s.owner END,
		wake_at = CASE WHEN k.release THEN statement_timestamp() + k.wake_in * interval '1 microsecond' ELSE s.wake_at END
	FROM k WHERE s.id = k.id
	RETURNING k.i, k.id, k.epoch, k.seq, k.log, s.updated_at AS now, s.cancel_requested, s.cancel_note),
l AS (INSERT INTO saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)
	SELECT s.id, s.seq + v.n, v.step, v.op, v.event, v.attempt, s.epoch, v.error, s.now FROM s,
	json_to_recordset(s.log) AS v(n bigint, step text, op text, event text, attempt bigint, error text))
SELECT i, cancel_requested, cancel_note FROM s`

func (postgres) commitBatch(ctx context.Context, q querier, batch []*pending) error {
	rows, err := q.QueryContext(ctx, postgresBatch, jsonCommits(batch))
	_, err = collect(rows, err, func(rows *sql.Rows) (i int, err error) {
		var rc saga.Receipt
		if err = rows.Scan(&i, &rc.CancelRequested, &rc.CancelNote); err == nil {
			batch[i].receipt, batch[i].written = rc, true
		}
		return i, err
	})
	return err
}

func appendLog(args []any, log []saga.Entry) []any {
	for i := range log {
		e := &log[i]
		args = append(args, e.Step, string(e.Op), e.Event, e.Attempt, e.Error)
	}
	return args
}

// postgresClaim takes the crashed first, and for the rest of the limit those
// that wait. A definition at a time, the index has them in the right order.
// The UPDATE names its rows as an array: were they a subquery, a plan could ask
// it again and lock more.
const postgresClaim = `WITH d AS MATERIALIZED (
	SELECT d.name, d.version FROM json_to_recordset($4::json) AS d(name text, version bigint)),
crashed AS MATERIALIZED (SELECT s.* FROM d CROSS JOIN LATERAL (
	SELECT id, wake_at, owner FROM saga
	WHERE ` + isLive + ` AND name = d.name AND version = d.version AND owner > '' AND wake_at <= statement_timestamp()
	ORDER BY wake_at LIMIT $3::bigint FOR UPDATE SKIP LOCKED) s
	ORDER BY wake_at LIMIT $3::bigint),
waiting AS MATERIALIZED (SELECT s.* FROM d CROSS JOIN LATERAL (
	SELECT id, wake_at FROM saga
	WHERE ` + isLive + ` AND name = d.name AND version = d.version AND owner = '' AND wake_at <= statement_timestamp()
	ORDER BY wake_at LIMIT $3::bigint - (SELECT count(*) FROM crashed) FOR UPDATE SKIP LOCKED) s
	ORDER BY wake_at LIMIT $3::bigint - (SELECT count(*) FROM crashed))
UPDATE saga s SET epoch = epoch + 1, owner = $1, wake_at = statement_timestamp() + $2::bigint * interval '1 microsecond',
	takeovers = takeovers + CASE WHEN owner > '' AND owner <> $1 THEN 1 ELSE 0 END
WHERE id = ANY (ARRAY(SELECT id FROM crashed UNION ALL SELECT id FROM waiting))
RETURNING ` + recordColumns + `, statement_timestamp(), COALESCE((SELECT c.owner FROM crashed c WHERE c.id = s.id), '')`

func (postgres) claim(ctx context.Context, q querier, req saga.ClaimRequest) ([]saga.Record, error) {
	rows, err := q.QueryContext(ctx, postgresClaim, req.Owner, req.Lease.Microseconds(), req.Limit, jsonDefinitions(req.Definitions))
	return collect(rows, err, func(rows *sql.Rows) (saga.Record, error) { return scan(rows) })
}

// postgresHeartbeat waits for no row. One that is locked it reads as it was
// committed last. The condition on "one" is that of postgresBatch.
const postgresHeartbeat = `WITH h AS MATERIALIZED (
	SELECT s.id, s.epoch, s.cancel_requested, s.cancel_note FROM json_to_recordset($3::json) AS h(one bigint, id text, epoch bigint)
	JOIN saga s ON s.id = h.id AND s.epoch = h.epoch AND s.owner = $1
	WHERE h.one = 1),
free AS MATERIALIZED (
	SELECT s.id FROM h JOIN saga s ON s.id = h.id AND s.epoch = h.epoch AND s.owner = $1
	FOR NO KEY UPDATE OF s SKIP LOCKED),
renewed AS (UPDATE saga s SET wake_at = statement_timestamp() + $2::bigint * interval '1 microsecond'
	FROM free WHERE s.id = free.id
	RETURNING s.id)
SELECT h.id, h.epoch, r.id IS NULL, h.cancel_requested, h.cancel_note FROM h LEFT JOIN renewed r ON r.id = h.id`

func (postgres) heartbeat(ctx context.Context, q querier, req saga.HeartbeatRequest) (*sql.Rows, error) {
	return q.QueryContext(ctx, postgresHeartbeat, req.Owner, req.Lease.Microseconds(), jsonHeld(req.Held))
}

const postgresCancel = `UPDATE saga SET cancel_requested = true, cancel_note = $2, updated_at = statement_timestamp(),
	wake_at = CASE WHEN owner = '' THEN statement_timestamp() ELSE wake_at END
WHERE id = $1 AND status = 'running' AND NOT cancel_requested
RETURNING ` + recordColumns + `, statement_timestamp(), ''`

func (postgres) cancel(ctx context.Context, q querier, id, note string) *sql.Row {
	return q.QueryRowContext(ctx, postgresCancel, id, note)
}

const postgresUnregistered = `SELECT name, version, count(*), min(wake_at), statement_timestamp() FROM saga
WHERE ` + isLive + ` AND wake_at <= statement_timestamp() AND NOT EXISTS (
	SELECT FROM json_to_recordset($1::json) AS d(name text, version bigint)
	WHERE d.name = saga.name AND d.version = saga.version)
GROUP BY name, version ORDER BY name COLLATE "C", version`

func (postgres) unregistered(ctx context.Context, q querier, registered []saga.Definition) (*sql.Rows, error) {
	return q.QueryContext(ctx, postgresUnregistered, jsonDefinitions(registered))
}

const postgresDelete = `WITH gone AS (DELETE FROM saga WHERE id = ANY (ARRAY(
	SELECT id FROM saga WHERE ` + isEnded + ` AND updated_at <= statement_timestamp() - $1::bigint * interval '1 microsecond'
	LIMIT $2::bigint FOR UPDATE SKIP LOCKED)) RETURNING id),
l AS (DELETE FROM saga_log WHERE saga_id = ANY (ARRAY(SELECT id FROM gone)))
SELECT count(*) FROM gone`

func (postgres) deleteEnded(ctx context.Context, q querier, age time.Duration, limit int) (n int64, err error) {
	err = q.QueryRowContext(ctx, postgresDelete, age.Microseconds(), limit).Scan(&n)
	return n, err
}

// byCount are the texts of a statement by the number of its log's entries. The
// text of a number is always the same, so that drivers prepare it once.
type byCount struct {
	build func(n int) string
	few   [6]string
}

func newByCount(build func(n int) string) *byCount {
	c := &byCount{build: build}
	for n := range c.few {
		c.few[n] = build(n)
	}
	return c
}

func (c *byCount) text(n int) string {
	if n < len(c.few) {
		return c.few[n]
	}
	return c.build(n)
}

func jsonDefinitions(list []saga.Definition) string {
	type definition struct {
		Name    string `json:"name"`
		Version int    `json:"version"`
	}
	out := make([]definition, len(list))
	for i, d := range list {
		out[i] = definition{d.Saga, d.Version}
	}
	return jsonText(out)
}

func jsonHeld(list []saga.Held) string {
	type held struct {
		One   int    `json:"one"`
		ID    string `json:"id"`
		Epoch int64  `json:"epoch"`
	}
	out := make([]held, len(list))
	for i, h := range list {
		out[i] = held{1, h.ID, h.Epoch}
	}
	return jsonText(out)
}

func jsonCommits(batch []*pending) string {
	type entry struct {
		N       int     `json:"n"`
		Step    string  `json:"step"`
		Op      saga.Op `json:"op"`
		Event   string  `json:"event"`
		Attempt int     `json:"attempt"`
		Error   string  `json:"error"`
	}
	type commit struct {
		One       int         `json:"one"`
		I         int         `json:"i"`
		ID        string      `json:"id"`
		Epoch     int64       `json:"epoch"`
		Seq       int64       `json:"seq"`
		Nonce     int64       `json:"nonce"`
		Status    saga.Status `json:"status"`
		Data      []byte      `json:"data"` // in base64
		Steps     string      `json:"steps"`
		After     int64       `json:"after"`
		Failures  int         `json:"failures"`
		Takeovers int         `json:"takeovers"`
		LastError string      `json:"last_error"`
		Release   bool        `json:"release"`
		WakeIn    int64       `json:"wake_in"`
		Log       []entry     `json:"log"`
	}
	out := make([]commit, len(batch))
	for i, p := range batch {
		c := &p.req
		log := make([]entry, len(c.Log))
		for k, e := range c.Log {
			log[k] = entry{k + 1, e.Step, e.Op, e.Event, e.Attempt, e.Error}
		}
		out[i] = commit{1, i, c.ID, c.Epoch, c.Seq, c.Nonce, c.Status, nonNil(c.Data), string(c.Steps), c.After(),
			c.Failures, c.Takeovers, c.LastError, c.Release, c.WakeIn.Microseconds(), log}
	}
	return jsonText(out)
}

func jsonText(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and numbers
	}
	return string(text)
}
