package sqllease

// statements are those of a dialect. {p} begins the names of the tables, {now} is the clock, in
// microseconds since 1970. Each ? is used once.
type statements struct {
	now      string
	numbered bool // placeholders are $1, $2 and so on

	schema string // without the version
	find   string // fails unless the tables are there
	create string // name
	look   string // name

	// unlocked returns no row if a fenced transaction is open: name. Empty if acquire looks itself, and returns
	// the row that it has changed.
	unlocked string
	acquire  string // token, holder, TTL, name, epoch before
	renew    string // TTL, 1 if a run begins, name, token
	release  string // name, token

	fence string // name, epoch; returns a row
}

var dialects = map[Dialect]*statements{PostgreSQL: &postgresql, MySQL: &mysql, SQLite: &sqlite}

const (
	columns = "token, holder, epoch, since, expires, ran"

	find = "SELECT name, " + columns + " FROM {p}lease WHERE 1 = 0"

	look = `SELECT ` + columns + `, {now} FROM {p}lease WHERE name = ?`

	renew = `UPDATE {p}lease SET expires = {now} + ?, ran = CASE WHEN ? = 1 THEN {now} ELSE ran END
WHERE name = ? AND token = ?`

	release = `UPDATE {p}lease SET epoch = epoch + 1, token = '', holder = '', since = {now}, expires = {now}
WHERE name = ? AND token = ?`
)

// A fence takes the lock FOR KEY SHARE. It excludes changes of columns that have a unique index,
// here of the epoch, and no others: a renewal is not kept waiting. The unique index also makes a
// fence that has waited for a new term see its epoch.
var postgresql = statements{
	now: "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint", numbered: true,
	schema: `CREATE TABLE IF NOT EXISTS {p}lease (
	name    text COLLATE "C" PRIMARY KEY,
	token   text COLLATE "C" NOT NULL,
	holder  text   NOT NULL,
	epoch   bigint NOT NULL,
	since   bigint NOT NULL,
	expires bigint NOT NULL,
	ran     bigint NOT NULL,
	UNIQUE (name, epoch)
);
`,
	find:   find,
	create: `INSERT INTO {p}lease (name, ` + columns + `) VALUES (?, '', '', 0, 0, 0, 0) ON CONFLICT DO NOTHING`,
	look:   look,
	acquire: `UPDATE {p}lease l SET token = ?, holder = ?, epoch = greatest(l.epoch + 1, {now}),
	since = {now}, expires = {now} + ?
FROM (SELECT name FROM {p}lease WHERE name = ? AND epoch = ? AND expires <= {now} FOR UPDATE SKIP LOCKED) free
WHERE l.name = free.name RETURNING ` + columns + `, {now}`,
	renew:   renew,
	release: release,
	fence:   `SELECT epoch FROM {p}lease WHERE name = ? AND epoch = ? FOR KEY SHARE`,
}

// The fence locks a row of a table of its own, as a lock of the lease would keep renewals
// waiting. Both rows have the same epoch, and change in one statement, in any order: {now} is the
// same in all of it.
var mysql = statements{
	now: "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))",
	schema: `CREATE TABLE IF NOT EXISTS {p}lease (
	name    varbinary(200) NOT NULL PRIMARY KEY,
	token   varbinary(200) NOT NULL,
	holder  varbinary(200) NOT NULL,
	epoch   bigint         NOT NULL,
	since   bigint         NOT NULL,
	expires bigint         NOT NULL,
	ran     bigint         NOT NULL
) ENGINE = InnoDB;
CREATE TABLE IF NOT EXISTS {p}lease_fence (
	name  varbinary(200) NOT NULL PRIMARY KEY,
	epoch bigint         NOT NULL
) ENGINE = InnoDB;
`,
	find: find + "; SELECT name, epoch FROM {p}lease_fence WHERE 1 = 0",
	create: `INSERT IGNORE INTO {p}lease_fence (name, epoch) VALUES (?, 0);
INSERT IGNORE INTO {p}lease (name, ` + columns + `) VALUES (?, '', '', 0, 0, 0, 0)`,
	look:     look,
	unlocked: `SELECT epoch FROM {p}lease_fence WHERE name = ? FOR UPDATE SKIP LOCKED`,
	acquire: `UPDATE {p}lease l JOIN {p}lease_fence f ON f.name = l.name
SET l.token = ?, l.holder = ?, l.since = {now}, l.expires = {now} + ?,
	l.epoch = greatest(l.epoch + 1, {now}), f.epoch = greatest(f.epoch + 1, {now})
WHERE l.name = ? AND l.epoch = ? AND l.expires <= {now}`,
	renew: renew,
	release: `UPDATE {p}lease l JOIN {p}lease_fence f ON f.name = l.name
SET l.epoch = l.epoch + 1, f.epoch = f.epoch + 1, l.token = '', l.holder = '', l.since = {now}, l.expires = {now}
WHERE l.name = ? AND l.token = ?`,
	fence: `SELECT epoch FROM {p}lease_fence WHERE name = ? AND epoch = ? LOCK IN SHARE MODE`,
}

// A transaction that has written is the only writer.
var sqlite = statements{
	now: "CAST((julianday('now') - 2440587.5) * 86400000.0 + 0.5 AS INTEGER) * 1000",
	schema: `CREATE TABLE IF NOT EXISTS {p}lease (
	name    text    NOT NULL PRIMARY KEY,
	token   text    NOT NULL,
	holder  text    NOT NULL,
	epoch   integer NOT NULL,
	since   integer NOT NULL,
	expires integer NOT NULL,
	ran     integer NOT NULL
);
`,
	find:   find,
	create: `INSERT INTO {p}lease (name, ` + columns + `) VALUES (?, '', '', 0, 0, 0, 0) ON CONFLICT DO NOTHING`,
	look:   look,
	acquire: `UPDATE {p}lease
SET token = ?, holder = ?, epoch = max(epoch + 1, {now}), since = {now}, expires = {now} + ?
WHERE name = ? AND epoch = ? AND expires <= {now} RETURNING ` + columns + `, {now}`,
	renew:   renew,
	release: release,
	fence:   `UPDATE {p}lease SET epoch = epoch WHERE name = ? AND epoch = ? RETURNING epoch`,
}
