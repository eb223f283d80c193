package sqlstore

import "strings"

// A dialect has the statements that differ between the kinds of databases. In all statements, {p} is the prefix of
// the tables' names, {now} is the database's clock in microseconds since 1970, {ids} is a list of placeholders, and
// each ? is one parameter.
type dialect struct {
	words    []string
	numbered bool // whether placeholders are $1, $2 and so on

	schema string // creates the tables, except the tables of the version and of saga.Apply

	lock   string // acquires the write lock before a transaction reads; "" if the database has locks of rows
	start  string // inserts a saga, and its log if the field log is ""
	commit string // updates a saga, and inserts into its log if the field log is ""
	batch  string // executes commits, which are JSON; "" if the store executes them one by one
	log    string // inserts an entry; "" if start and commit insert all entries, which are JSON
	signal string // inserts a signal unless it exists; a read before it would lock the gap for others on MySQL
	picks  string // picks sagas of queues, which are JSON; "" if a union of pickOne does

	// queues returns the least wake_at of each queue that has a due saga. statuses returns the number of sagas with each
	// name and status. Both skip from group to group in an index. In queues, {count} is 0 or dueOf, {from} is the
	// condition for the first entry of the index, and {first} limits the number of queues.
	queues, dueOf, statuses string
}

const (
	columns = `id, name, version, status, data, steps, parent, parent_step, tenant, seq, nonce, owner, epoch, wake_at,
	complete_by, failures, takeovers, last_error, cancel_requested, cancel_note, created_at, updated_at`

	// List merges the sagas of each of these statuses, so it would not return a saga with another status.
	isStatus = "status IN ('running', 'compensating', 'stuck', 'completed', 'compensated', 'abandoned')"
	isLive   = "status IN ('running', 'compensating')"
	// The children of a saga that exists are excluded, so that a sweep does not read sagas that it must not delete.
	isEnded     = "status IN ('completed', 'compensated', 'abandoned')"
	isDeletable = isEnded + " AND parent = ''"

	// The indexes are for Claim, DeleteEnded, Children, List and Counts. A saga changes them when it starts or ends, and
	// when it is claimed, parked or renewed. A step changes no indexed column, so PostgreSQL writes it without touching
	// the indexes. The wake_at of a saga that has ended is the time when it ended, because it was released then.
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

	// The version and the state are NULL if they do not change. A commit that does not release the saga has -1 in place
	// of the time until it is due.
	update = `UPDATE {p}saga SET status = ?, version = COALESCE({int}, version), data = COALESCE(?, data),
	steps = ?, seq = ?, failures = ?, takeovers = ?, last_error = ?, nonce = ?, updated_at = {now},
	owner = CASE WHEN {int} < 0 THEN owner ELSE '' END,
	wake_at = CASE WHEN {int} < 0 THEN wake_at WHEN woken THEN {now} ELSE {now} + ? END
WHERE id = ? AND epoch = ? AND seq = ?`

	entries  = `INTO {p}saga_log (saga_id, seq, step, op, event, attempt, epoch, error, at)`
	addEntry = `INSERT ` + entries + ` VALUES (?, ?, ?, ?, ?, ?, ?, ?, {now})`

	receipt = `SELECT cancel_requested, cancel_note, woken FROM {p}saga WHERE id = ?`

	// pickOne locks the first sagas of a queue after the sagas that the claim has locked before.
	pickOne = `SELECT id, owner, {place} AS place FROM {by live}
	WHERE {live} AND owned = ? AND turn = ? AND name = ? AND version = ? AND wake_at <= {now}
	ORDER BY wake_at LIMIT ? OFFSET ?{skip}`

	// In an UPDATE of MySQL, an expression sees the new values of the columns to its left.
	take = `UPDATE {p}saga SET takeovers = takeovers + CASE WHEN owner <> '' AND owner <> ? THEN 1 ELSE 0 END,
	epoch = epoch + 1, woken = false, owner = ?, lease = ?,
	wake_at = {now} + ? WHERE id IN ({ids})`
	taken = `SELECT {record} FROM {p}saga WHERE id IN ({ids})`

	held  = `SELECT id, epoch, cancel_requested, cancel_note FROM {p}saga WHERE owner = ? AND id IN ({ids})`
	renew = `UPDATE {p}saga SET lease = ?, wake_at = {now} + ? WHERE id IN ({ids})`

	// If a lease ends later than a lease that begins now, the clock went back after it was written. The limit is for a
	// transaction of a moment.
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

// removal deletes sagas, and removes the reference to them from their remaining children.
var removal = []string{
	`DELETE FROM {p}saga WHERE id IN ({ids})`,
	`DELETE FROM {p}saga_log WHERE saga_id IN ({ids})`,
	`DELETE FROM {p}saga_signal WHERE saga_id IN ({ids})`,
	`UPDATE {p}saga SET parent = '', parent_step = '' WHERE parent > '' AND parent IN ({ids})`,
}

// words returns the words of a dialect, in addition to the words of all dialects. by is the text with which a query
// reads the table by an index; %s is the index's name.
func words(by string, own ...string) []string {
	list := append([]string{"{record}", columns + ", {now} AS store_now"}, own...)
	for _, index := range []string{"live", "name", "time"} {
		list = append(list, "{by "+index+"}", strings.ReplaceAll(by, "%s", "{p}saga_"+index))
	}
	return list
}
