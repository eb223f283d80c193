package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// A mysql writes in transactions under READ COMMITTED. Each locks its rows by a SELECT
// first, so that no rule depends on what the server counts as an affected row. Times are
// milliseconds since 1970.
type mysql struct {
	started, committed, released, fenced      string
	log, untaken, startedAt                   *byCount
	due                                       string
	claimed, claimedRows, held, free, renewed *byCount // by the number of ids
	fencedRows                                *byCount
	endedRoots                                string
}

func newMySQL(t tables) *mysql {
	in := func(text string) *byCount {
		return newByCount(func(n int) string { return t.sql(strings.Replace(text, "{ids}", places(n), 1)) })
	}
	return &mysql{
		started: t.sql(mysqlStart), startedAt: in("SELECT id, created_at FROM {p}saga WHERE id IN ({ids})"),
		untaken:   in("SELECT id FROM {p}saga WHERE id IN ({ids}) FOR UPDATE NOWAIT"),
		fenced:    t.sql("SELECT cancel_requested, cancel_note FROM {p}saga WHERE id = ? AND epoch = ? AND seq = ? FOR UPDATE"),
		committed: t.sql(commitText(mysqlNow, false, "id = ?")),
		released:  t.sql(commitText(mysqlNow, true, "id = ?")),
		log:       newByCount(func(n int) string { return t.sql(logText(n, mysqlNow)) }),
		due:       t.sql(mysqlDue),
		claimed:   in(mysqlClaim), claimedRows: in("SELECT " + mysqlColumns + " FROM {p}saga WHERE id IN ({ids})"),
		held:    in("SELECT id, epoch, cancel_requested, cancel_note FROM {p}saga WHERE id IN ({ids}) AND owner = ?"),
		free:    in("SELECT id, epoch FROM {p}saga WHERE id IN ({ids}) AND owner = ? FOR UPDATE SKIP LOCKED"),
		renewed: in("UPDATE {p}saga SET wake_at = " + mysqlNow + " + ? WHERE id IN ({ids})"),
		fencedRows: in("SELECT id, epoch, seq, cancel_requested, cancel_note FROM {p}saga" +
			" WHERE id IN ({ids}) FOR UPDATE SKIP LOCKED"),
		endedRoots: t.sql("SELECT id FROM {p}saga WHERE status = ? AND ended_at <= " + mysqlNow + " - ?" +
			" ORDER BY ended_at LIMIT ? FOR UPDATE SKIP LOCKED"),
	}
}

// MySQL has no partial indexes: generated columns tell the sagas that a claim looks for,
// and those that have ended. Names are compared as bytes; utf8mb4_bin would ignore spaces
// at their ends.
const mysqlSchema = `
CREATE TABLE {p}saga (
	id               varbinary(200) NOT NULL PRIMARY KEY,
	name             varbinary(200) NOT NULL,
	version          bigint         NOT NULL,
	status           varbinary(20)  NOT NULL CHECK (` + isStatus + `),
	data             longblob       NOT NULL,
	steps            longtext       CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	parent           varbinary(200) NOT NULL DEFAULT '',
	parent_step      varbinary(100) NOT NULL DEFAULT '',
	seq              bigint         NOT NULL,
	nonce            bigint         NOT NULL,
	owner            varbinary(300) NOT NULL,
	epoch            bigint         NOT NULL,
	wake_at          bigint         NOT NULL,
	complete_by      bigint,
	failures         bigint         NOT NULL DEFAULT 0,
	takeovers        bigint         NOT NULL DEFAULT 0,
	last_error       longtext       CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	cancel_requested boolean        NOT NULL DEFAULT false,
	cancel_note      longtext       CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	created_at       bigint         NOT NULL,
	updated_at       bigint         NOT NULL,
	live             boolean AS (status IN ('running', 'compensating')) STORED,
	owned            boolean AS (owner <> '') STORED,
	ended_at         bigint AS (CASE WHEN ` + isDeletable + ` THEN wake_at END) STORED,
	KEY {p}saga_live (live, name, version, owned, wake_at),
	KEY {p}saga_ended (status, ended_at),
	KEY {p}saga_child (parent, parent_step, status),
	KEY {p}saga_name (name, status, created_at, id),
	KEY {p}saga_time (status, created_at, id)
) ENGINE = InnoDB;
CREATE TABLE {p}saga_log (
	saga_id varbinary(200) NOT NULL,
	seq     bigint         NOT NULL,
	step    varbinary(210) NOT NULL,
	op      varbinary(20)  NOT NULL,
	event   varbinary(50)  NOT NULL,
	attempt bigint         NOT NULL,
	epoch   bigint         NOT NULL,
	error   longtext       CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	at      bigint         NOT NULL,
	PRIMARY KEY (saga_id, seq)
) ENGINE = InnoDB;
` + mysqlSignals

// mysqlNow is the clock. It does not depend on the session's time zone.
const mysqlNow = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000)"

const mysqlColumns = recordColumns + ", " + mysqlNow + " AS store_now, '' AS previous"

func (*mysql) schema() string { return mysqlSchema }

func (*mysql) barrier() string { return participant.TableMySQL }

func (*mysql) check(context.Context, querier) error { return nil }

func (*mysql) hasTable(ctx context.Context, q querier, name string) (has bool, err error) {
	return has, q.QueryRowContext(ctx, `SELECT count(*) FROM information_schema.tables
		WHERE table_schema = database() AND table_name = ?`, name).Scan(&has)
}

// schemaLock is the lock of migrations. It belongs to the connection: the statements that
// create tables commit.
const schemaLock = "'saga_migrating'"

func (*mysql) lockSchema(ctx context.Context, q querier) error {
	var got sql.NullBool
	err := q.QueryRowContext(ctx, "SELECT GET_LOCK("+schemaLock+", 60)").Scan(&got)
	if err == nil && !got.Bool {
		return errors.New("another migration takes longer than a minute")
	}
	return err
}

func (*mysql) unlockSchema(ctx context.Context, q querier) {
	var had sql.NullBool
	_ = q.QueryRowContext(ctx, "SELECT RELEASE_LOCK("+schemaLock+")").Scan(&had)
}

// isolated: each write has several statements.
func (*mysql) isolated(context.Context, querier) (bool, error) { return false, nil }

func (*mysql) txOptions() *sql.TxOptions { return &sql.TxOptions{Isolation: sql.LevelReadCommitted} }

func (*mysql) lock(context.Context, querier) error { return nil }

func (*mysql) madeDue(update string) string { return update }

func (*mysql) now() string { return mysqlNow }

func (*mysql) columns() string { return mysqlColumns }

func (*mysql) bind(int) string { return "?" }

func (*mysql) time(t time.Time) any { return t.UnixMilli() }

func (*mysql) oneOf(column string, ids []string) (string, []any) {
	args := make([]any, len(ids))
	for i, id := range ids {
		args[i] = id
	}
	return column + " IN (" + places(len(ids)) + ")", args
}

func (*mysql) forUpdate() string { return " FOR UPDATE" }

func (*mysql) live() string { return "live = 1" }

func (*mysql) comparesRows() bool { return false }

func (*mysql) from(index string) string {
	if index == "" {
		index = "PRIMARY"
	} else {
		index = "{p}" + index
	}
	return "{p}saga FORCE INDEX (" + index + ")"
}

// groups makes MySQL skip from group to group ("Using index for group-by").
func (d *mysql) groups(index, columns, next, where string) string {
	by := columns
	if where != "" {
		where, by = " WHERE "+where, "live, "+by
	}
	return "SELECT " + columns + ", min(" + next + ") AS " + next + " FROM " + d.from(index) + where + " GROUP BY " + by
}

// count asks first for the last entry that counts: a subquery with a limit may not refer to
// the query around it.
func (d *mysql) count(index, where, order string) string {
	from := " FROM " + d.from(index) + " WHERE " + where
	return "(CASE WHEN (SELECT 1" + from + " ORDER BY " + order + " LIMIT 1 OFFSET " + strconv.Itoa(store.CountLimit-1) + ") = 1 THEN " +
		strconv.Itoa(store.CountLimit) + " ELSE (SELECT count(*)" + from + ") END)"
}

// readNewest ends a query that is to see the newest row, also in a transaction of the
// user's that has a snapshot.
func (*mysql) readNewest() string { return " LOCK IN SHARE MODE" }

// hot returns the statements that are worth preparing: the driver would otherwise prepare
// them each time.
func (d *mysql) hot() []string {
	texts := append(d.log.texts(), d.started, d.fenced, d.committed, d.released, d.due)
	for _, c := range []*byCount{d.untaken, d.startedAt, d.claimed, d.claimedRows, d.held, d.free, d.renewed, d.fencedRows} {
		for n := 1; n <= maxBatch; n *= 2 {
			texts = append(texts, c.text(n))
		}
	}
	return texts
}

const mysqlStart = `INSERT IGNORE INTO {p}saga (id, name, version, status, data, steps, seq, owner, epoch, wake_at, complete_by,
	nonce, parent, parent_step, last_error, cancel_note, created_at, updated_at)
SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, now + ?, now + ?, ?, ?, ?, '', '', now, now FROM (SELECT ` + mysqlNow + ` AS now) AS t`

func (d *mysql) startBatch(ctx context.Context, q querier, batch []*pendingStart) error {
	var log logRows
	if len(batch) > 1 {
		// MySQL notices only after innodb_lock_wait_timeout that a client has gone. So no batch
		// waits for a transaction that has already started one of its sagas, or for another
		// batch: both go in the order of the ids.
		slices.SortFunc(batch, func(a, b *pendingStart) int { return strings.Compare(a.req.ID, b.req.ID) })
		all := make([]string, len(batch))
		for i, p := range batch {
			all[i] = p.req.ID
		}
		text, args := d.among(d.untaken, all)
		rows, err := q.QueryContext(ctx, text, args...)
		if _, err = collect(rows, err, scanID); err != nil {
			return err
		}
	}
	var ids []string
	created := make(map[string]*pendingStart, len(batch))
	for _, p := range batch {
		req := p.req
		if err := fits(req.ID, 200, req.Saga, 200, req.Owner, 300, req.Parent, 200, req.ParentStep, 100); err != nil {
			return err // IGNORE would cut them off
		}
		args, epoch := startArgs(req)
		// An inserted row counts as affected whatever the connection's clientFoundRows.
		changed, err := changes(q.ExecContext(ctx, d.started, args...))
		if err != nil {
			return err
		}
		if changed {
			ids, created[req.ID] = append(ids, req.ID), p
			log.add(req.ID, 0, epoch, req.Log)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	text, args := d.among(d.startedAt, ids)
	rows, err := q.QueryContext(ctx, text, args...)
	if err := answerStarts(rows, err, created); err != nil {
		return err
	}
	return log.insert(ctx, q, d.log)
}

// fits returns an error if a text is longer than the number that follows it.
func fits(list ...any) error {
	for i := 0; i < len(list); i += 2 {
		if s, limit := list[i].(string), list[i+1].(int); len(s) > limit {
			return fmt.Errorf("%.40q... has %d bytes: at most %d fit into the table", s, len(s), limit)
		}
	}
	return nil
}

func (d *mysql) commit(ctx context.Context, q querier, req store.CommitRequest) (rc store.Receipt, err error) {
	err = q.QueryRowContext(ctx, d.fenced, req.ID, req.Epoch, req.Seq).Scan(&rc.CancelRequested, &rc.CancelNote)
	if errors.Is(err, sql.ErrNoRows) {
		return rc, store.ErrFenced
	}
	if err != nil {
		return rc, err
	}
	var log logRows
	if err := d.update(ctx, q, req, &log); err != nil {
		return rc, err
	}
	return rc, log.insert(ctx, q, d.log)
}

// update writes a commit whose row is locked and passes the fence, except for its log.
func (d *mysql) update(ctx context.Context, q querier, req store.CommitRequest, log *logRows) error {
	text := d.committed
	if req.Release {
		text = d.released
	}
	log.add(req.ID, req.Seq, req.Epoch, req.Log)
	_, err := q.ExecContext(ctx, text, append(commitArgs(req), req.ID)...)
	return err
}

// commitBatch locks all rows by one statement, and has another for their logs.
func (d *mysql) commitBatch(ctx context.Context, q querier, batch []*pendingCommit) error {
	byID := make(map[string]*pendingCommit, len(batch))
	ids := make([]string, 0, len(batch))
	for _, p := range batch {
		byID[p.req.ID] = p
		ids = append(ids, p.req.ID)
	}
	type fence struct {
		*pendingCommit
		store.Receipt
	}
	text, args := d.among(d.fencedRows, ids)
	rows, err := q.QueryContext(ctx, text, args...)
	found, err := collect(rows, err, func(rows *sql.Rows) (f fence, err error) {
		var id string
		var epoch, seq int64
		err = rows.Scan(&id, &epoch, &seq, &f.CancelRequested, &f.CancelNote)
		if p := byID[id]; p != nil && p.req.Epoch == epoch && p.req.Seq == seq {
			f.pendingCommit = p
		}
		return f, err
	})
	if err != nil {
		return err
	}
	var log logRows
	for _, f := range found {
		if f.pendingCommit == nil {
			continue
		}
		if err := d.update(ctx, q, f.req, &log); err != nil {
			return err
		}
		f.answer, f.written = f.Receipt, true
	}
	return log.insert(ctx, q, d.log)
}

const mysqlDue = `SELECT id, owner FROM {p}saga FORCE INDEX ({p}saga_live)
WHERE live = 1 AND name = ? AND version = ? AND owned = ? AND wake_at <= ` + mysqlNow + `
ORDER BY wake_at LIMIT ? FOR UPDATE SKIP LOCKED`

// In an UPDATE of MySQL, an expression sees the columns that were set before it.
const mysqlClaim = `UPDATE {p}saga SET epoch = epoch + 1, takeovers = takeovers + (owner <> '' AND owner <> ?),
	owner = ?, wake_at = ` + mysqlNow + ` + ? WHERE id IN ({ids})`

func (d *mysql) claim(ctx context.Context, q querier, req store.ClaimRequest, queues []queue) ([]store.Record, error) {
	ids, previous, err := pick(ctx, q, d.due, queues, req.Limit)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	text, args := d.among(d.claimed, ids, req.Owner, req.Owner, req.LeaseTTL.Milliseconds())
	if _, err := q.ExecContext(ctx, text, args...); err != nil {
		return nil, err
	}
	text, args = d.among(d.claimedRows, ids)
	rows, err := q.QueryContext(ctx, text, args...)
	return collect(rows, err, func(rows *sql.Rows) (store.Record, error) {
		rec, err := scan(rows)
		rec.Previous = previous[rec.ID]
		return rec, err
	})
}

// heartbeat waits for no row: a locked one is read as it was last committed.
func (d *mysql) heartbeat(ctx context.Context, q querier, req store.HeartbeatRequest) ([]store.Renewed, error) {
	epochs := make(map[string]int64, len(req.Held))
	ids := make([]string, 0, len(req.Held))
	for _, h := range req.Held {
		epochs[h.ID] = h.Epoch
		ids = append(ids, h.ID)
	}
	text, args := d.among(d.held, ids)
	rows, err := q.QueryContext(ctx, text, append(args, req.Owner)...)
	renewed, err := collect(rows, err, func(rows *sql.Rows) (n store.Renewed, err error) {
		return n, rows.Scan(&n.ID, &n.Epoch, &n.CancelRequested, &n.CancelNote)
	})
	if err != nil {
		return nil, err
	}
	text, args = d.among(d.free, ids)
	rows, err = q.QueryContext(ctx, text, append(args, req.Owner)...)
	free, err := collect(rows, err, func(rows *sql.Rows) (h store.Held, err error) { return h, rows.Scan(&h.ID, &h.Epoch) })
	if err != nil {
		return nil, err
	}
	locked := make(map[string]bool, len(ids))
	for _, id := range ids {
		locked[id] = true
	}
	ids = ids[:0]
	for _, h := range free {
		if h.Epoch == epochs[h.ID] {
			ids = append(ids, h.ID)
			delete(locked, h.ID)
		}
	}
	kept := renewed[:0]
	for _, n := range renewed {
		if n.Epoch == epochs[n.ID] {
			n.Locked = locked[n.ID]
			kept = append(kept, n)
		}
	}
	if len(ids) == 0 {
		return kept, nil
	}
	text, args = d.among(d.renewed, ids, req.LeaseTTL.Milliseconds())
	_, err = q.ExecContext(ctx, text, args...)
	return kept, err
}

func (d *mysql) ended(ctx context.Context, q querier, status store.Status, age time.Duration, limit int) ([]string, error) {
	rows, err := q.QueryContext(ctx, d.endedRoots, string(status), age.Milliseconds(), limit)
	return collect(rows, err, scanID)
}

// among returns the statement for a list of ids, and its arguments. The list is filled up
// to a power of two, so that there are few different statements.
func (d *mysql) among(texts *byCount, ids []string, first ...any) (string, []any) {
	n := 1
	for n < len(ids) {
		n *= 2
	}
	for i := range n {
		first = append(first, ids[min(i, len(ids)-1)])
	}
	return texts.text(n), first
}

func places(n int) string { return strings.TrimPrefix(strings.Repeat(", ?", n), ", ") }

func (*mysql) changed(ctx context.Context, q querier, text string, args ...any) (store.Record, error) {
	return execOnly(ctx, q, text, args)
}
