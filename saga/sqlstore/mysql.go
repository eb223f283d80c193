package sqlstore

// On MySQL, all writes are transactions under READ COMMITTED. The server may count matched rows or changed rows as
// affected; both give the same result, because an insert or a commit either changes a row or matches none.
var mysql = dialect{
	// This expression of the clock does not depend on the session's time zone.
	words: words("{p}saga FORCE INDEX (%s)",
		"{now}", "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
		"{int}", "?", "{live}", "live = 1",
		"{deletable}", "ended_at IS NOT NULL", "{ended_at}", "ended_at",
		"{lock}", " FOR UPDATE", "{skip}", " FOR UPDATE SKIP LOCKED",
		// The lock prevents a transaction of the program from reading from an old snapshot.
		"{newest}", " LOCK IN SHARE MODE",
	),
	// MySQL has no partial indexes. Instead, generated columns mark the sagas that a claim can find and the sagas that
	// have ended. The types of names are binary, because utf8mb4_bin would ignore trailing spaces.
	schema: `
CREATE TABLE IF NOT EXISTS {p}saga (
	id               varbinary(200) NOT NULL PRIMARY KEY,
	name             varbinary(200) NOT NULL,
	version          bigint         NOT NULL,
	status           varbinary(20)  NOT NULL CHECK (` + isStatus + `),
	data             longblob       NOT NULL,
	steps            longtext       CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	parent           varbinary(200) NOT NULL DEFAULT '',
	parent_step      varbinary(100) NOT NULL DEFAULT '',
	tenant           varbinary(100) NOT NULL DEFAULT '',
	seq              bigint         NOT NULL,
	nonce            bigint         NOT NULL,
	owner            varbinary(300) NOT NULL,
	epoch            bigint         NOT NULL,
	wake_at          bigint         NOT NULL,
	lease            bigint         NOT NULL DEFAULT 0,
	complete_by      bigint         NOT NULL DEFAULT 0,
	failures         bigint         NOT NULL DEFAULT 0,
	takeovers        bigint         NOT NULL DEFAULT 0,
	last_error       longtext       CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	cancel_requested boolean        NOT NULL DEFAULT false,
	cancel_note      longtext       CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	woken            boolean        NOT NULL DEFAULT false,
	created_at       bigint         NOT NULL,
	updated_at       bigint         NOT NULL,
	live             boolean AS (` + isLive + `) STORED,
	owned            boolean AS (owner <> '') STORED,
	turn             varbinary(100) AS (CASE WHEN owner = '' THEN tenant ELSE '' END) STORED,
	ended_at         bigint AS (CASE WHEN ` + isDeletable + ` THEN wake_at END) STORED,
	KEY {p}saga_live (live, owned, turn, name, version, wake_at),
	KEY {p}saga_ended (status, ended_at),
	KEY {p}saga_child (parent, parent_step, status),
	KEY {p}saga_name (name, status, created_at, id),
	KEY {p}saga_time (status, created_at, id)
) ENGINE = InnoDB;
CREATE TABLE IF NOT EXISTS {p}saga_log (
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
CREATE TABLE IF NOT EXISTS {p}saga_signal (
	saga_id varbinary(200) NOT NULL,
	name    varbinary(200) NOT NULL,
	payload longblob       NOT NULL,
	at      bigint         NOT NULL,
	PRIMARY KEY (saga_id, name)
) ENGINE = InnoDB;
`,
	// INSERT IGNORE truncates values that are too long. That cannot happen, because package saga limits the lengths of ids
	// and names.
	start:  `INSERT IGNORE ` + insert,
	commit: update,
	log:    addEntry,
	signal: `INSERT IGNORE ` + signal,

	// MySQL reads only the first index entry of each group. EXPLAIN shows this as "Using index for group-by".
	queues: `SELECT d.name, d.version, d.owned, d.turn, d.wake_at, {count} FROM (
	SELECT name, version, owned, turn, min(wake_at) AS wake_at FROM {by live} WHERE {live} AND {from}
	GROUP BY live, owned, turn, name, version HAVING min(wake_at) <= {now}{first}) AS d`,
	// MySQL does not allow a derived table with a LIMIT to refer to the outer query. So the first subquery checks whether
	// there are 10,000 rows. If there are fewer, the second subquery counts the rows.
	dueOf: `(CASE WHEN (SELECT 1` + mysqlDue + ` ORDER BY wake_at LIMIT 1 OFFSET 9999) = 1 THEN 10000
	ELSE (SELECT count(*)` + mysqlDue + `) END)`,
	statuses: `SELECT g.name, g.status, (CASE WHEN (SELECT 1` + mysqlOf + ` ORDER BY created_at LIMIT 1 OFFSET 9999) = 1
	THEN 10000 ELSE (SELECT count(*)` + mysqlOf + `) END) FROM (
	SELECT name, status, min(created_at) AS created_at FROM {by name} GROUP BY name, status) AS g
WHERE NOT g.` + isEnded + ` ORDER BY g.name`,
}

const (
	mysqlDue = ` FROM {by live} WHERE {live} AND owned = d.owned AND turn = d.turn AND name = d.name
	AND version = d.version AND wake_at <= {now}`
	mysqlOf = ` FROM {by name} WHERE name = g.name AND status = g.status`
)
