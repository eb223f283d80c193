package sqlstore

// On PostgreSQL, each start and each commit is one statement, whose parameters include the new log entries as JSON.
var postgresql = dialect{
	numbered: true,
	words: words("{p}saga",
		"{now}", "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint",
		"{int}", "?::bigint", "{live}", isLive, "{deletable}", isDeletable, "{ended_at}", "wake_at",
		"{lock}", " FOR UPDATE", "{skip}", " FOR UPDATE SKIP LOCKED", "{newest}", "",
		// The subquery hides the value of the limit from the planner. If the planner knows that the limit is 10,000, it may
		// decide to read and sort a table of 50,000 rows.
		"{most}", "(SELECT 10000)",
	),
	// COLLATE "C" compares ids and names byte by byte. The fillfactor reserves space in each page for new versions of its
	// rows. Therefore a step does not have to change the indexes. The columns that a step changes are the last ones,
	// because the WAL contains the part of a row from the first to the last changed column. The columns of fixed size are
	// the first ones, in an order without padding.
	schema: `
CREATE TABLE IF NOT EXISTS {p}saga (
	version          bigint   NOT NULL,
	epoch            bigint   NOT NULL,
	wake_at          bigint   NOT NULL,
	lease            bigint   NOT NULL DEFAULT 0,
	complete_by      bigint   NOT NULL DEFAULT 0,
	failures         bigint   NOT NULL DEFAULT 0,
	takeovers        bigint   NOT NULL DEFAULT 0,
	created_at       bigint   NOT NULL,
	owned            smallint GENERATED ALWAYS AS (CASE WHEN owner > '' THEN 1 ELSE 0 END) STORED,
	cancel_requested boolean  NOT NULL DEFAULT false,
	woken            boolean  NOT NULL DEFAULT false,
	id               text COLLATE "C" PRIMARY KEY,
	name             text COLLATE "C" NOT NULL,
	parent           text COLLATE "C" NOT NULL DEFAULT '',
	parent_step      text COLLATE "C" NOT NULL DEFAULT '',
	tenant           text COLLATE "C" NOT NULL DEFAULT '',
	turn             text COLLATE "C" GENERATED ALWAYS AS (CASE WHEN owner = '' THEN tenant ELSE '' END) STORED,
	cancel_note      text     NOT NULL DEFAULT '',
	last_error       text     NOT NULL DEFAULT '',
	owner            text COLLATE "C" NOT NULL,
	status           text COLLATE "C" NOT NULL CHECK (` + isStatus + `),
	data             bytea    NOT NULL,
	seq              bigint   NOT NULL,
	nonce            bigint   NOT NULL,
	updated_at       bigint   NOT NULL,
	steps            text     NOT NULL
) WITH (fillfactor = 50);
` + indexes + `
CREATE TABLE IF NOT EXISTS {p}saga_log (
	seq     bigint NOT NULL,
	attempt bigint NOT NULL,
	epoch   bigint NOT NULL,
	at      bigint NOT NULL,
	saga_id text COLLATE "C" NOT NULL,
	step    text   NOT NULL,
	op      text   NOT NULL,
	event   text   NOT NULL,
	error   text   NOT NULL,
	PRIMARY KEY (saga_id, seq)
);
CREATE TABLE IF NOT EXISTS {p}saga_signal (
	saga_id text COLLATE "C" NOT NULL,
	name    text COLLATE "C" NOT NULL,
	payload bytea  NOT NULL,
	at      bigint NOT NULL,
	PRIMARY KEY (saga_id, name)
);
`,
	start: `WITH s AS (INSERT ` + insert + ` ON CONFLICT (id) DO NOTHING RETURNING *),
` + postgresLog + `
SELECT {record} FROM s`,
	signal: `INSERT ` + signal + ` ON CONFLICT DO NOTHING`,
	commit: `WITH s AS (` + update + ` RETURNING id, epoch, cancel_requested, cancel_note, woken, updated_at),
` + postgresLog + `
SELECT cancel_requested, cancel_note, woken FROM s`,

	// The condition r.seq + 0 = r.seq is always true. Because of this condition, the planner expects one row and searches
	// the index for each id. Otherwise, a plan that was cached while the table was small would read the whole table.
	batch: `WITH k AS MATERIALIZED (
	SELECT r.* FROM json_to_recordset(?::json) AS r(place int, id text, epoch bigint, seq bigint, nonce bigint,
		status text, data text, steps text, after bigint, failures bigint, takeovers bigint, last_error text,
		wake_in bigint, log json)
	JOIN {p}saga s ON s.id = r.id AND s.epoch = r.epoch AND s.seq = r.seq
	WHERE r.seq + 0 = r.seq FOR NO KEY UPDATE OF s SKIP LOCKED),
s AS (UPDATE {p}saga s SET status = k.status, data = COALESCE(decode(k.data, 'base64'), s.data), steps = k.steps,
		seq = k.after, failures = k.failures, takeovers = k.takeovers, last_error = k.last_error, nonce = k.nonce,
		updated_at = {now}, owner = CASE WHEN k.wake_in < 0 THEN s.owner ELSE '' END,
		wake_at = CASE WHEN k.wake_in < 0 THEN s.wake_at WHEN s.woken THEN {now} ELSE {now} + k.wake_in END
	FROM k WHERE s.id = k.id
	RETURNING k.place, s.id, s.epoch, s.cancel_requested, s.cancel_note, s.woken, s.updated_at, k.log),
l AS (INSERT ` + entries + `
	SELECT s.id, v.seq, v.step, v.op, v.event, v.attempt, s.epoch, v.error, s.updated_at
	FROM s, json_to_recordset(s.log) AS v(` + postgresEntry + `))
SELECT place, cancel_requested, cancel_note, woken FROM s`,

	// The rows have the order of the queues, because a LATERAL join is a nested loop. The condition d.owned + 0 = d.owned
	// is always true, and makes the planner expect one queue. The last limit is a parameter, whose value the planner
	// knows. Both lower the planner's estimate; for a high estimate, PostgreSQL would compile (JIT) the statement for each
	// claim.
	picks: `SELECT s.id, s.owner, d.place FROM json_to_recordset(?::json) AS d(place int, owned smallint, turn text,
	name text, version bigint, most bigint, picked bigint)
CROSS JOIN LATERAL (
	SELECT id, owner FROM {p}saga
	WHERE {live} AND owned = d.owned AND turn = d.turn AND name = d.name AND version = d.version AND wake_at <= {now}
	ORDER BY wake_at LIMIT d.most OFFSET d.picked FOR UPDATE SKIP LOCKED) s
WHERE d.owned + 0 = d.owned LIMIT ?::bigint`,

	// The condition name || '' = name is always true. Because of this condition, the planner expects one row and searches
	// the index for each row.
	queues: `SELECT d.name, d.version, d.owned, d.turn, d.wake_at, {count} FROM (
	WITH RECURSIVE g AS (
		SELECT * FROM (SELECT owned, turn, name, version, wake_at FROM {p}saga
			WHERE {live} AND {from} ORDER BY owned, turn, name, version, wake_at LIMIT 1) AS f
		UNION ALL
		SELECT n.* FROM g CROSS JOIN LATERAL (SELECT owned, turn, name, version, wake_at FROM {p}saga
			WHERE {live} AND (owned, turn, name, version) > (g.owned, g.turn, g.name, g.version)
			ORDER BY owned, turn, name, version, wake_at LIMIT 1) AS n)
	SELECT * FROM g WHERE name || '' = name) AS d
WHERE d.wake_at <= {now}{first}`,
	dueOf: dueOf,
	statuses: `SELECT g.name, g.status, ` + countOf + ` FROM (
	WITH RECURSIVE g AS (
		SELECT * FROM (SELECT name, status, created_at FROM {p}saga
			WHERE name > '' ORDER BY name, status, created_at LIMIT 1) AS f
		UNION ALL
		SELECT n.* FROM g CROSS JOIN LATERAL (SELECT name, status, created_at FROM {p}saga
			WHERE (name, status) > (g.name, g.status) ORDER BY name, status, created_at LIMIT 1) AS n)
	SELECT * FROM g WHERE name || '' = name) AS g
WHERE NOT g.` + isEnded + ` ORDER BY g.name`,
}

const postgresLog = `l AS (INSERT ` + entries + `
	SELECT s.id, v.seq, v.step, v.op, v.event, v.attempt, s.epoch, v.error, s.updated_at
	FROM s, json_to_recordset(?::json) AS v(` + postgresEntry + `))`

const postgresEntry = `seq bigint, step text, op text, event text, attempt bigint, error text`

// The ORDER BY in these subqueries makes planners read the index, and not the table.
const (
	dueOf = `(SELECT count(*) FROM (SELECT 1 FROM {by live}
	WHERE {live} AND owned = d.owned AND turn = d.turn AND name = d.name AND version = d.version AND wake_at <= {now}
	ORDER BY wake_at LIMIT {most}) AS c)`
	countOf = `(SELECT count(*) FROM (SELECT 1 FROM {by name}
	WHERE name = g.name AND status = g.status ORDER BY created_at LIMIT {most}) AS c)`
)
