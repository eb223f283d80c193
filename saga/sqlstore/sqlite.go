package sqlstore

// On SQLite, each write is a transaction of a few statements, the first of which acquires the write lock. The
// statements do not use RETURNING, which would cost each of them a temporary table and a separate journal.
var sqlite = dialect{
	// INDEXED BY is necessary because, without statistics from ANALYZE, SQLite may choose another index and sort the rows.
	// The clock uses julianday because unixepoch has no fractions of a second before version 3.42.
	words: words("{p}saga INDEXED BY %s",
		"{now}", "(CAST((julianday('now') - 2440587.5) * 86400000.0 + 0.5 AS INTEGER) * 1000)",
		"{int}", "?", "{live}", isLive, "{deletable}", isDeletable, "{ended_at}", "wake_at",
		"{lock}", "", "{skip}", "", "{newest}", "", "{most}", "10000",
	),
	schema: `
CREATE TABLE IF NOT EXISTS {p}saga (
	id               text    NOT NULL PRIMARY KEY,
	name             text    NOT NULL,
	version          integer NOT NULL,
	status           text    NOT NULL CHECK (` + isStatus + `),
	data             blob    NOT NULL,
	steps            text    NOT NULL,
	parent           text    NOT NULL DEFAULT '',
	parent_step      text    NOT NULL DEFAULT '',
	tenant           text    NOT NULL DEFAULT '',
	seq              integer NOT NULL,
	nonce            integer NOT NULL,
	owner            text    NOT NULL,
	epoch            integer NOT NULL,
	wake_at          integer NOT NULL,
	lease            integer NOT NULL DEFAULT 0,
	complete_by      integer NOT NULL DEFAULT 0,
	failures         integer NOT NULL DEFAULT 0,
	takeovers        integer NOT NULL DEFAULT 0,
	last_error       text    NOT NULL DEFAULT '',
	cancel_requested integer NOT NULL DEFAULT 0,
	cancel_note      text    NOT NULL DEFAULT '',
	woken            integer NOT NULL DEFAULT 0,
	created_at       integer NOT NULL,
	updated_at       integer NOT NULL,
	owned            integer AS (owner > ''),
	turn             text    AS (CASE WHEN owner = '' THEN tenant ELSE '' END)
) STRICT;
` + indexes + `
CREATE TABLE IF NOT EXISTS {p}saga_log (
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
CREATE TABLE IF NOT EXISTS {p}saga_signal (
	saga_id text    NOT NULL,
	name    text    NOT NULL,
	payload blob    NOT NULL,
	at      integer NOT NULL,
	PRIMARY KEY (saga_id, name)
) STRICT, WITHOUT ROWID;
`,
	// A transaction that has the write lock reads the newest rows. A transaction that has already read something may fail
	// to acquire the lock.
	lock:   `UPDATE {p}saga SET seq = seq WHERE 0`,
	start:  `INSERT ` + insert + ` ON CONFLICT (id) DO NOTHING`,
	commit: update,
	log:    addEntry,
	signal: `INSERT ` + signal + ` ON CONFLICT DO NOTHING`,

	// The plus signs remove the affinities (preferred types) of the columns; otherwise, SQLite would use only the first
	// column of the index. To find the first entry that is greater than a row, SQLite seeks the first entry that is not
	// less. The row therefore ends with a blob, which is greater than any number or text. So the seek skips all entries of
	// the group.
	queues: `SELECT d.name, d.version, d.owned, d.turn, d.wake_at, {count} FROM (
	WITH RECURSIVE g(first) AS (
		SELECT (SELECT rowid FROM {by live} WHERE {live} AND {from}
			ORDER BY owned, turn, name, version, wake_at LIMIT 1)
		UNION ALL
		SELECT (SELECT rowid FROM {by live}
			WHERE {live} AND (owned, turn, name, version, wake_at) > (+s.owned, +s.turn, +s.name, +s.version, x'')
			ORDER BY owned, turn, name, version, wake_at LIMIT 1)
		FROM g CROSS JOIN {p}saga s ON s.rowid = g.first)
	SELECT name, version, owned, turn, wake_at FROM g CROSS JOIN {p}saga ON rowid = g.first) AS d
WHERE d.wake_at <= {now}{first}`,
	dueOf: dueOf,
	statuses: `SELECT g.name, g.status, ` + countOf + ` FROM (
	WITH RECURSIVE g(first) AS (
		SELECT (SELECT rowid FROM {by name} WHERE name > '' ORDER BY name, status, created_at LIMIT 1)
		UNION ALL
		SELECT (SELECT rowid FROM {by name} WHERE (name, status, created_at) > (+s.name, +s.status, x'')
			ORDER BY name, status, created_at LIMIT 1)
		FROM g CROSS JOIN {p}saga s ON s.rowid = g.first)
	SELECT name, status FROM g CROSS JOIN {p}saga ON rowid = g.first) AS g
WHERE NOT g.` + isEnded + ` ORDER BY g.name`,
}
