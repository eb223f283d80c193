package sqlstore

import "strings"

// A dialect has the statements that differ between the kinds of databases. In all statements, words in braces are
// replaced: {p} by the prefix of the tables' names, {now} by the database's clock in microseconds since 1970, and {ids}
// by a list of placeholders. Each ? is one parameter.
type dialect struct {
	words    []string
	numbered bool // whether placeholders are $1, $2 and so on

	schema string // creates the tables, except the table with the version and the table of saga.Apply

	lock   string // acquires the write lock before a transaction reads; "" if the database has row locks
	start  string // inserts a saga; also inserts its log if the field log is ""
	commit string // updates a saga; also appends to its log if the field log is ""
	batch  string // executes several commits, which are a JSON parameter; "" if the store executes commits one by one
	log    string // inserts one log entry; "" if start and commit insert all entries, which are a JSON parameter
	signal string // inserts a signal unless it exists; a read before it would lock a gap for others on MySQL
	picks  string // picks sagas from queues, which are a JSON parameter; "" if a union of pickOne does so

	// queues returns the earliest wake_at of each queue that has a due saga. statuses returns the number of sagas for each
	// pair of name and status. Both read only the first entry of each group in an index. In queues, {count} is 0 or the
	// expression dueOf, which counts the due sagas of a queue, {from} is the condition for the first index entry, and
	// {first} limits the number of queues.
	queues, dueOf, statuses string
}

const (
	columns = `id, name, version, status, data, steps, parent, parent_step, tenant, seq, nonce, owner, epoch, wake_at,
	complete_by, failures, takeovers, last_error, cancel_requested, cancel_note, created_at, updated_at`

	// The CHECK is necessary because List only reads the sagas with these statuses, and would not return a saga with
	// another status.
	isStatus = "status IN ('running', 'compensating', 'stuck', 'completed', 'compensated', 'abandoned')"
	isLive   = "status IN ('running', 'compensating')"
	// isDeletable excludes the children of existing sagas. DeleteEnded must not delete these children, and does not read
	// them.
	isEnded     = "status IN ('completed', 'compensated', 'abandoned')"
	isDeletable = isEnded + " AND parent = ''"

	// The indexes are for Claim, DeleteEnded, Children, List and Counts. An indexed column changes when a saga starts or
	// ends, when it is claimed or released, and when its lease is renewed. A step changes no indexed column, so PostgreSQL
	// can record the step without changing an index. The wake_at of a saga that has ended is the time when it ended,
	// because it was released then.
	indexes = `
CREATE INDEX IF NOT EXISTS {p}saga_live ON {p}saga (owned, turn, name, version, wake_at) WHERE ` + isLive + `;
CREATE INDEX IF NOT EXISTS {p}saga_ended ON {p}saga (status, wake_at) WHERE ` + isDeletable + `;
CREATE INDEX IF NOT EXISTS {p}saga_child ON {p}saga (parent, parent_step, status) WHERE parent > '';
CREATE INDEX IF NOT EXISTS {p}saga_name ON {p}saga (name, status, created_at, id);
CREATE INDEX IF NOT EXISTS {p}saga_time ON {p}saga (status, created_at, id);`

	find = `SELECT ` + columns + `, woken, turn, lease FROM {p}saga WHERE 1 = 0;
SELECT saga_id, seq, step, op, event, attempt, epoch, error, at FROM {p}saga_log WHERE 1 = 0;
SELECT saga_id, name, payload, at FROM {p}saga_signal WHERE 1 = 0;`

	insert = `INTO {p}saga (id, name, version, status, data, steps, seq, nonce, parent, parent_step, tenant, owner, epoch,
	lease, wake_at, complete_by, last_error, cancel_note, created_at, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {now} + ?, CASE WHEN {int} > 0 THEN {now} + ? ELSE 0 END, '', '',
	{now}, {now})`

	// The parameters for the version and the state are NULL if these do not change. The parameter for the time until the
	// saga is due is -1 if the commit does not release the saga.
	update = `UPDATE {p}saga SET status = ?, version = COALESCE({int}, version), data = COALESCE(?, data),
	steps = ?, seq = ?, failures = ?, takeovers = ?, last_error = ?, nonce = ?, updated_at = {now},
	owner = CASE WHEN {int} < 0 THEN owner ELSE '' END,
	wake_at = CASE WHEN {int} < 0 THEN wake_at WHEN woken THEN {now} ELSE {now} + ? END
WHERE id = ? AND epoch = ? AND seq = ?`

	entries  = `INTO {p}saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)`
	addEntry = `INSERT ` + entries + ` VALUES (?, ?, ?, ?, ?, ?, ?, ?, {now})`

	receipt = `SELECT cancel_requested, cancel_note, woken FROM {p}saga WHERE id = ?`

	// pickOne locks sagas at the front of a queue. The OFFSET skips the sagas that the same claim has already locked.
	pickOne = `SELECT id, owner, {place} AS place FROM {by live}
	WHERE {live} AND owned = ? AND turn = ? AND name = ? AND version = ? AND wake_at <= {now}
	ORDER BY wake_at LIMIT ? OFFSET ?{skip}`

	// takeovers must come before owner: in an UPDATE of MySQL, an expression sees the new values of the columns that were
	// assigned before it.
	take = `UPDATE {p}saga SET takeovers = takeovers + CASE WHEN owner <> '' AND owner <> ? THEN 1 ELSE 0 END,
	epoch = epoch + 1, woken = false, owner = ?, lease = ?,
	wake_at = {now} + ? WHERE id IN ({ids})`
	taken = `SELECT {record} FROM {p}saga WHERE id IN ({ids})`

	held  = `SELECT id, epoch, cancel_requested, cancel_note FROM {p}saga WHERE owner = ? AND id IN ({ids})`
	renew = `UPDATE {p}saga SET lease = ?, wake_at = {now} + ? WHERE id IN ({ids})`

	// A lease is too long if it ends later than an equal lease that starts now: the clock was set back after the lease was
	// written. The LIMIT bounds the duration of the transaction that shortens the leases.
	isTooLong  = ` AND {live} AND owned = 1 AND wake_at > {now} + lease`
	tooLong    = `SELECT id FROM {by live} WHERE 1 = 1` + isTooLong + ` LIMIT 1000`
	limitLease = `UPDATE {p}saga SET wake_at = {now} + lease WHERE id IN ({ids})` + isTooLong

	cancel = `UPDATE {p}saga SET cancel_requested = true, cancel_note = ?, woken = true, updated_at = {now},
	wake_at = CASE WHEN owner = '' AND wake_at > {now} THEN {now} ELSE wake_at END
WHERE id = ? AND status = 'running' AND NOT cancel_requested`
	wake = `UPDATE {p}saga SET woken = true,
	wake_at = CASE WHEN owner = '' AND wake_at > {now} THEN {now} ELSE wake_at END
WHERE id = ?`

	load     = `SELECT {record} FROM {p}saga WHERE id = ?`
	signal   = `INTO {p}saga_signal (saga_id, name, payload, at) VALUES (?, ?, ?, {now})`
	unsignal = `DELETE FROM {p}saga_signal WHERE saga_id = ? AND name = ?`
	signals  = `SELECT name, payload FROM {p}saga_signal WHERE saga_id = ? ORDER BY name`

	history = `SELECT seq, step, op, event, attempt, epoch, error, at FROM {p}saga_log WHERE saga_id = ? AND seq > ?
ORDER BY seq LIMIT ?`

	child = `SELECT id, status, cancel_requested FROM {p}saga WHERE parent > '' AND parent = ? AND parent_step = ?`

	oldest = `SELECT id FROM {p}saga WHERE {deletable} AND status = ? AND {ended_at} <= {now} - ?
ORDER BY {ended_at} LIMIT ?{skip}`
	endedChildren = `SELECT id FROM {p}saga WHERE parent > '' AND ` + isEnded + ` AND parent IN ({ids}) LIMIT ?{lock}`
)

// removal deletes sagas with their logs and signals, and removes the references to the deleted sagas from their
// remaining children.
var removal = []string{
	`DELETE FROM {p}saga WHERE id IN ({ids})`,
	`DELETE FROM {p}saga_log WHERE saga_id IN ({ids})`,
	`DELETE FROM {p}saga_signal WHERE saga_id IN ({ids})`,
	`UPDATE {p}saga SET parent = '', parent_step = '' WHERE parent > '' AND parent IN ({ids})`,
}

// words returns a dialect's words in braces with their replacements, including the words that all dialects have. by is
// the SQL text with which a query reads the table by an index. %s in by is replaced by the index's name.
func words(by string, own ...string) []string {
	list := append([]string{"{record}", columns + ", {now} AS store_now"}, own...)
	for _, index := range []string{"live", "name", "time"} {
		list = append(list, "{by "+index+"}", strings.ReplaceAll(by, "%s", "{p}saga_"+index))
	}
	return list
}
