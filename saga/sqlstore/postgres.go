package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// A postgres makes each write one statement, with data-modifying CTEs. The texts are built
// once for the names of the tables.
type postgres struct {
	committed, released, handedOn  *byCount // by the number of entries in the log
	started, startedDue            string
	batch, batchDue, claimed, beat string
	endedRoots                     string
	tell                           string // the notification; "" for none
}

func newPostgres(t tables, notify bool) *postgres {
	// due ends a statement after which a saga is due.
	due, tell := "", ""
	if notify {
		tell = "pg_notify('" + t.channel() + "', '')::text = ''"
		due = " WHERE " + tell
	}
	commit := func(release, due string, next int) *byCount {
		return newByCount(func(n int) string { return t.sql(postgresCommitText(n, release, next) + due) })
	}
	return &postgres{
		tell: tell, started: t.sql(postgresStarts), startedDue: t.sql(postgresStarts + due),
		committed: commit("", "", 12), released: commit(postgresRelease, "", 13), handedOn: commit(postgresRelease, due, 13),
		batch: t.sql(postgresBatch), batchDue: t.sql(postgresBatch + due), claimed: t.sql(postgresClaim), beat: t.sql(postgresHeartbeat),
		endedRoots: t.sql(postgresEnded),
	}
}

// In postgresSchema, ids and names compare as bytes. The fillfactor leaves room in each page
// for the next version of every row, so that the steps touch no index. What a step changes
// stands last: the WAL has of a row what lies between its first and its last change. Columns
// of a fixed size stand first, where they need no padding.
const postgresSchema = `
CREATE TABLE {p}saga (
	version          bigint      NOT NULL,
	epoch            bigint      NOT NULL,
	wake_at          timestamptz NOT NULL,
	complete_by      timestamptz,
	failures         bigint      NOT NULL DEFAULT 0,
	takeovers        bigint      NOT NULL DEFAULT 0,
	created_at       timestamptz NOT NULL,
	owned            smallint GENERATED ALWAYS AS (CASE WHEN owner > '' THEN 1 ELSE 0 END) STORED,
	cancel_requested boolean     NOT NULL DEFAULT false,
	id               text COLLATE "C" PRIMARY KEY,
	name             text COLLATE "C" NOT NULL,
	parent           text COLLATE "C" NOT NULL DEFAULT '',
	parent_step      text COLLATE "C" NOT NULL DEFAULT '',
	cancel_note      text        NOT NULL DEFAULT '',
	last_error       text        NOT NULL DEFAULT '',
	owner            text COLLATE "C" NOT NULL,
	status           text COLLATE "C" NOT NULL CHECK (` + isStatus + `),
	data             bytea       NOT NULL,
	seq              bigint      NOT NULL,
	nonce            bigint      NOT NULL,
	updated_at       timestamptz NOT NULL,
	steps            text        NOT NULL
) WITH (fillfactor = 50);
` + indexes + `
CREATE TABLE {p}saga_log (
	seq     bigint      NOT NULL,
	attempt bigint      NOT NULL,
	epoch   bigint      NOT NULL,
	at      timestamptz NOT NULL,
	saga_id text COLLATE "C" NOT NULL,
	step    text        NOT NULL,
	op      text        NOT NULL,
	event   text        NOT NULL,
	error   text        NOT NULL,
	PRIMARY KEY (saga_id, seq)
);
` + postgresSignals

func (*postgres) schema() string { return postgresSchema }

func (*postgres) barrier() string { return participant.Table }

func (*postgres) check(context.Context, querier) error { return nil }

func (*postgres) hasTable(ctx context.Context, q querier, name string) (has bool, err error) {
	// Unlike to_regclass, this sees tables that were committed since the transaction began.
	return has, q.QueryRowContext(ctx, `SELECT EXISTS (SELECT FROM pg_catalog.pg_class
		WHERE relname = $1 AND pg_catalog.pg_table_is_visible(oid))`, name).Scan(&has)
}

// lockSchema excludes other migrations until the transaction ends.
func (*postgres) lockSchema(ctx context.Context, q querier) error {
	_, err := q.ExecContext(ctx, `SELECT pg_advisory_xact_lock(7234061925530741)`)
	return err
}

func (*postgres) unlockSchema(context.Context, querier) {}

func (*postgres) readNewest() string { return "" }

// isolated reports whether a single statement runs under READ COMMITTED.
func (*postgres) isolated(ctx context.Context, q querier) (bool, error) {
	var level string
	err := q.QueryRowContext(ctx, `SHOW default_transaction_isolation`).Scan(&level)
	return level == "read committed", err
}

// txOptions returns the isolation under which an UPDATE sees the newest version of its
// row, whatever the default of the database.
func (*postgres) txOptions() *sql.TxOptions {
	return &sql.TxOptions{Isolation: sql.LevelReadCommitted}
}

func (*postgres) lock(context.Context, querier) error { return nil }

func (*postgres) now() string { return "statement_timestamp()" }

func (d *postgres) madeDue(update string) string { return d.telling(update, "owner, status") }

// telling returns an UPDATE that returns columns, with the owner and the status among them,
// and that tells the listeners if a runner may claim the saga.
func (d *postgres) telling(update, columns string) string {
	update += " RETURNING " + columns
	if d.tell == "" {
		return update
	}
	return "WITH due AS (" + update + ") SELECT * FROM due WHERE CASE WHEN owner = '' AND " + isLive + " THEN " + d.tell + " ELSE true END"
}

func (d *postgres) changed(ctx context.Context, q querier, text string, args ...any) (store.Record, error) {
	return scan(q.QueryRowContext(ctx, d.telling(text, d.columns()), args...))
}

func (d *postgres) columns() string {
	return recordColumns + ", " + d.now() + " AS store_now, '' AS previous"
}

func (*postgres) bind(i int) string { return "$" + strconv.Itoa(i) }

func (*postgres) time(t time.Time) any { return t }

func (*postgres) oneOf(column string, ids []string) (string, []any) {
	var a array
	for _, id := range ids {
		a.text(id)
	}
	return column + " = ANY ($1::text[])", []any{a.String()}
}

func (*postgres) forUpdate() string { return " FOR UPDATE" }

func (*postgres) live() string { return isLive }

func (*postgres) comparesRows() bool { return true }

// groups asks the index for the first entry after each group. The last condition is that of
// postgresBatch.
func (*postgres) groups(_, columns, next, where string) string {
	all := columns + ", " + next
	first := func(condition string) string {
		return "(SELECT " + all + " FROM {p}saga WHERE " + and(where, condition) + " ORDER BY " + all + " LIMIT 1)"
	}
	return "WITH RECURSIVE g AS (SELECT * FROM " + first("name > ''") + " AS f UNION ALL SELECT n.* FROM g CROSS JOIN LATERAL " +
		first("("+columns+") > (g."+strings.ReplaceAll(columns, ", ", ", g.")+")") + " AS n) SELECT * FROM g WHERE name || '' = name"
}

func (*postgres) from(string) string { return "{p}saga" }

// count hides the limit from the planner, which then expects a tenth of the rows. For 10 000 of
// them it may prefer to read and sort a table of 50 000.
func (*postgres) count(_, where, order string) string {
	return countFirst("{p}saga", where, order, "(SELECT "+strconv.Itoa(store.CountLimit)+")")
}

// postgresStarts starts sagas. As in postgresBatch, the first fourteen parameters have an
// element for each saga, the others one for each entry of their logs. The order keeps two
// batches from waiting for each other.
const postgresStarts = `WITH s AS (INSERT INTO {p}saga (id, name, version, status, data, steps, seq, owner, epoch, wake_at, complete_by,
		nonce, parent, parent_step, created_at, updated_at)
	SELECT id, name, version, status, data, steps, seq, owner, epoch, statement_timestamp() + lease * interval '1 microsecond',
		CASE WHEN complete_in > 0 THEN statement_timestamp() + complete_in * interval '1 microsecond' END,
		nonce, parent, parent_step, statement_timestamp(), statement_timestamp()
	FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::bytea[], $6::text[], $7::bigint[], $8::text[], $9::bigint[],
		$10::bigint[], $11::bigint[], $12::bigint[], $13::text[], $14::text[])
		AS r(id, name, version, status, data, steps, seq, owner, epoch, lease, complete_in, nonce, parent, parent_step)
	ORDER BY id ON CONFLICT (id) DO NOTHING
	RETURNING id, epoch, created_at),
l AS (INSERT INTO {p}saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)
	SELECT s.id, v.seq, v.step, v.op, v.event, v.attempt, s.epoch, v.error, s.created_at
	FROM unnest($15::text[], $16::bigint[], $17::text[], $18::text[], $19::text[], $20::bigint[], $21::text[])
		AS v(id, seq, step, op, event, attempt, error)
	JOIN s ON s.id = v.id)
SELECT id, created_at FROM s`

func (d *postgres) startBatch(ctx context.Context, q querier, batch []*pendingStart) error {
	var starts [14]array
	var entries [7]array
	text := d.started
	byID := make(map[string]*pendingStart, len(batch))
	for _, p := range batch {
		c := &p.req
		byID[c.ID] = p
		epoch, lease := int64(1), c.LeaseTTL
		if c.Owner == "" {
			epoch, lease = 0, 0
			text = d.startedDue
		}
		starts[0].text(c.ID)
		starts[1].text(c.Saga)
		starts[2].number(int64(c.Version))
		starts[3].text(string(c.Status))
		starts[4].bytes(nonNil(c.Data))
		starts[5].text(string(c.Steps))
		starts[6].number(int64(len(c.Log)))
		starts[7].text(c.Owner)
		starts[8].number(epoch)
		starts[9].number(lease.Microseconds())
		starts[10].number(c.CompleteIn.Microseconds())
		starts[11].number(c.Nonce)
		starts[12].text(c.Parent)
		starts[13].text(c.ParentStep)
		for k := range c.Log {
			entries[0].text(c.ID)
			entry(entries[1:], int64(1+k), &c.Log[k])
		}
	}
	rows, err := q.QueryContext(ctx, text, arrays(starts[:], entries[:])...)
	_, err = collect(rows, err, func(rows *sql.Rows) (id string, err error) {
		var now time.Time
		err = rows.Scan(&id, &now)
		if p := byID[id]; p != nil {
			p.answer, p.written = newRecord(p.req, now), true
		}
		return id, err
	})
	return err
}

const postgresRelease = ", owner = '', wake_at = statement_timestamp() + $12::bigint * interval '1 microsecond'"

// postgresCommitText returns the statement for a log of n entries, whose parameters begin at
// next.
func postgresCommitText(n int, release string, next int) string {
	entries := ""
	for i := range n {
		entries += ", ($3::bigint + " + strconv.Itoa(i+1)
		for _, typ := range []string{"", "", "", "::bigint", ""} {
			entries += ", $" + strconv.Itoa(next) + typ
			next++
		}
		entries += ")"
	}
	return `WITH s AS (UPDATE {p}saga SET status = $4, data = COALESCE($5::bytea, data), steps = $6, seq = $7, failures = $8, takeovers = $9,
		last_error = $10, nonce = $11, updated_at = statement_timestamp()` + release + `
	WHERE id = $1 AND epoch = $2 AND seq = $3
	RETURNING epoch, updated_at AS now, cancel_requested, cancel_note),
l AS (INSERT INTO {p}saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)
	SELECT $1, v.seq, v.step, v.op, v.event, v.attempt, s.epoch, v.error, s.now
	FROM s, (VALUES ` + strings.TrimPrefix(entries, ", ") + `) AS v(seq, step, op, event, attempt, error))
SELECT cancel_requested, cancel_note FROM s`
}

func (d *postgres) commit(ctx context.Context, q querier, req store.CommitRequest) (rc store.Receipt, err error) {
	args := make([]any, 0, 16)
	args = append(args, req.ID, req.Epoch, req.Seq, string(req.Status), orNull(req.Data), string(req.Steps),
		req.After(), req.Failures, req.Takeovers, req.LastError, req.Nonce)
	text := d.committed
	if req.Release {
		text = d.released
		if dueAtOnce(&req) {
			text = d.handedOn
		}
		args = append(args, req.WakeIn.Microseconds())
	}
	for i := range req.Log {
		e := &req.Log[i]
		args = append(args, e.Step, string(e.Op), string(e.Kind), e.Attempt, e.Error)
	}
	err = q.QueryRowContext(ctx, text.text(len(req.Log)), args...).Scan(&rc.CancelRequested, &rc.CancelNote)
	if errors.Is(err, sql.ErrNoRows) {
		err = store.ErrFenced
	}
	return rc, err
}

// postgresBatch commits many sagas. Its parameters are arrays: the first thirteen have an
// element for each commit, the others one for each entry of their logs. It skips rows that
// do not match the fence, and rows that are locked: since it never waits, neither a slow
// owner nor a deadlock holds up a batch.
//
// The condition i + 0 = i makes the planner expect a single row, and look up each id in the
// index. Otherwise a plan that was made while the table was new, and kept, would read the
// whole table.
const postgresBatch = `WITH k AS MATERIALIZED (
	SELECT r.* FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[], $7::bytea[], $8::text[],
		$9::bigint[], $10::bigint[], $11::bigint[], $12::text[], $13::bigint[]) AS r(i, id, epoch, seq,
		nonce, status, data, steps, after, failures, takeovers, last_error, wake_in)
	JOIN {p}saga s ON s.id = r.id AND s.epoch = r.epoch AND s.seq = r.seq
	WHERE r.i + 0 = r.i FOR NO KEY UPDATE OF s SKIP LOCKED),
s AS (UPDATE {p}saga s SET status = k.status, data = COALESCE(k.data, s.data), steps = k.steps, seq = k.after,
		failures = k.failures, takeovers = k.takeovers, last_error = k.last_error, nonce = k.nonce,
		updated_at = statement_timestamp(),
		owner = CASE WHEN k.wake_in IS NULL THEN s.owner ELSE '' END,
		wake_at = CASE WHEN k.wake_in IS NULL THEN s.wake_at ELSE statement_timestamp() + k.wake_in * interval '1 microsecond' END
	FROM k WHERE s.id = k.id
	RETURNING k.i, s.id, s.epoch, s.cancel_requested, s.cancel_note),
l AS (INSERT INTO {p}saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)
	SELECT s.id, v.seq, v.step, v.op, v.event, v.attempt, s.epoch, v.error, statement_timestamp()
	FROM unnest($14::bigint[], $15::bigint[], $16::text[], $17::text[], $18::text[], $19::bigint[], $20::text[])
		AS v(i, seq, step, op, event, attempt, error)
	JOIN s ON s.i = v.i)
SELECT i, cancel_requested, cancel_note FROM s`

func (d *postgres) commitBatch(ctx context.Context, q querier, batch []*pendingCommit) error {
	text := d.batch
	if slices.ContainsFunc(batch, func(p *pendingCommit) bool { return dueAtOnce(&p.req) }) {
		text = d.batchDue
	}
	rows, err := q.QueryContext(ctx, text, batchArgs(batch)...)
	_, err = collect(rows, err, func(rows *sql.Rows) (i int, err error) {
		var rc store.Receipt
		if err = rows.Scan(&i, &rc.CancelRequested, &rc.CancelNote); err == nil {
			batch[i].answer, batch[i].written = rc, true
		}
		return i, err
	})
	return err
}

// dueAtOnce reports whether the saga is due after the commit.
func dueAtOnce(req *store.CommitRequest) bool {
	return req.Release && req.WakeIn <= 0 && (req.Status == store.Running || req.Status == store.Compensating)
}

// postgresClaim takes and locks the first sagas of one queue after the other, up to the limit: the function has the order, and a nested loop is the only way to join LATERAL. The
// UPDATE has its rows as an array: a plan could run a subquery twice, and lock more rows.
//
// The planner must expect few rows, however many sagas wait, or it compiles (JIT) each
// claim. Therefore each queue has the limit as a parameter, whose value it knows, and
// there is the condition on "one" of postgresBatch.
const postgresClaim = `WITH picked AS MATERIALIZED (SELECT s.id, s.owner
	FROM json_to_recordset($4::json) AS d(one bigint, name text, version bigint, owned smallint) CROSS JOIN LATERAL (
		SELECT id, owner FROM {p}saga
			WHERE ` + isLive + ` AND name = d.name AND version = d.version AND owned = d.owned AND wake_at <= statement_timestamp()
			ORDER BY wake_at LIMIT $3::bigint FOR NO KEY UPDATE SKIP LOCKED) s
	WHERE d.one = 1 LIMIT $3::bigint)
UPDATE {p}saga s SET epoch = epoch + 1, owner = $1, wake_at = statement_timestamp() + $2::bigint * interval '1 microsecond',
	takeovers = takeovers + CASE WHEN owner > '' AND owner <> $1 THEN 1 ELSE 0 END
WHERE id = ANY (ARRAY(SELECT id FROM picked))
RETURNING ` + recordColumns + `, statement_timestamp(), (SELECT p.owner FROM picked p WHERE p.id = s.id)`

func (d *postgres) claim(ctx context.Context, q querier, req store.ClaimRequest, queues []queue) ([]store.Record, error) {
	rows, err := q.QueryContext(ctx, d.claimed, req.Owner, req.LeaseTTL.Microseconds(), req.Limit, jsonText(queues))
	return collect(rows, err, func(rows *sql.Rows) (store.Record, error) { return scan(rows) })
}

// postgresHeartbeat waits for no row: a locked one is read as it was last committed. The
// condition on "one" is that of postgresBatch.
const postgresHeartbeat = `WITH h AS MATERIALIZED (
	SELECT s.id, s.epoch, s.cancel_requested, s.cancel_note FROM json_to_recordset($3::json) AS h(one bigint, id text, epoch bigint)
	JOIN {p}saga s ON s.id = h.id AND s.epoch = h.epoch AND s.owner = $1
	WHERE h.one = 1),
free AS MATERIALIZED (
	SELECT s.id FROM h JOIN {p}saga s ON s.id = h.id AND s.epoch = h.epoch AND s.owner = $1
	FOR NO KEY UPDATE OF s SKIP LOCKED),
renewed AS (UPDATE {p}saga s SET wake_at = statement_timestamp() + $2::bigint * interval '1 microsecond'
	FROM free WHERE s.id = free.id
	RETURNING s.id)
SELECT h.id, h.epoch, r.id IS NULL, h.cancel_requested, h.cancel_note FROM h LEFT JOIN renewed r ON r.id = h.id`

func (d *postgres) heartbeat(ctx context.Context, q querier, req store.HeartbeatRequest) ([]store.Renewed, error) {
	rows, err := q.QueryContext(ctx, d.beat, req.Owner, req.LeaseTTL.Microseconds(), jsonHeld(req.Held))
	return collect(rows, err, scanRenewed)
}

const postgresEnded = `SELECT id FROM {p}saga
WHERE ` + isDeletable + ` AND status = $1 AND wake_at <= statement_timestamp() - $2::bigint * interval '1 microsecond'
ORDER BY wake_at LIMIT $3::bigint FOR UPDATE SKIP LOCKED`

func (d *postgres) ended(ctx context.Context, q querier, status store.Status, age time.Duration, limit int) ([]string, error) {
	rows, err := q.QueryContext(ctx, d.endedRoots, string(status), age.Microseconds(), limit)
	return collect(rows, err, scanID)
}

// batchArgs returns the parameters of postgresBatch.
func batchArgs(batch []*pendingCommit) []any {
	var commits [13]array
	var entries [7]array
	for i, p := range batch {
		c := &p.req
		commits[0].number(int64(i))
		commits[1].text(c.ID)
		commits[2].number(c.Epoch)
		commits[3].number(c.Seq)
		commits[4].number(c.Nonce)
		commits[5].text(string(c.Status))
		commits[6].bytes(c.Data)
		commits[7].text(string(c.Steps))
		commits[8].number(c.After())
		commits[9].number(int64(c.Failures))
		commits[10].number(int64(c.Takeovers))
		commits[11].text(c.LastError)
		if c.Release {
			commits[12].number(c.WakeIn.Microseconds())
		} else {
			commits[12].null()
		}
		for k := range c.Log {
			entries[0].number(int64(i))
			entry(entries[1:], c.Seq+1+int64(k), &c.Log[k])
		}
	}
	return arrays(commits[:], entries[:])
}

// entry adds a log entry to its arrays.
func entry(to []array, seq int64, e *store.Entry) {
	to[0].number(seq)
	to[1].text(e.Step)
	to[2].text(string(e.Op))
	to[3].text(string(e.Kind))
	to[4].number(int64(e.Attempt))
	to[5].text(e.Error)
}

// arrays returns arrays as parameters.
func arrays(lists ...[]array) []any {
	var args []any
	for _, list := range lists {
		for i := range list {
			args = append(args, list[i].String())
		}
	}
	return args
}
