package sqllease

// A statements has the SQL statements of a dialect. In them, {p} is replaced by the prefix of the tables' names, and
// {now} by an expression for the database's clock, in microseconds since 1970.
type statements struct {
	now      string // the expression for {now}
	numbered bool   // whether placeholders are $1, $2 and so on

	schema string // creates the tables, except the table with the version
	find   string // a query that fails unless the tables exist
	create string // inserts a lease that is not held; parameter: name
	load   string // returns the record; parameter: name

	// unlocked returns no row if a fenced transaction is open. Its parameter is the name. It is empty if acquire checks
	// this itself and also returns the changed row.
	unlocked string
	acquire  string // starts a term; parameters: token, holder, TTL, name, previous epoch
	renew    string // renews the lease; parameters: TTL, name, token
	run      string // renews the lease and records a run; parameters: TTL, run, name, token, run
	release  string // releases the lease; parameters: name, token

	fence string // locks and returns a row if the term has this epoch; parameters: name, epoch
}

var dialects = map[Dialect]*statements{PostgreSQL: &postgresql, MySQL: &mysql, SQLite: &sqlite}

const (
	written = "token, holder, epoch, expires, last_run"
	columns = "token, holder, epoch, expires - {now}, last_run"

	find = "SELECT name, " + written + " FROM {p}lease WHERE 1 = 0"

	load = `SELECT ` + columns + ` FROM {p}lease WHERE name = ?`

	renew = `UPDATE {p}lease SET expires = {now} + ? WHERE name = ? AND token = ?`

	run = `UPDATE {p}lease SET expires = {now} + ?, last_run = ? WHERE name = ? AND token = ? AND last_run < ?`

	release = `UPDATE {p}lease SET epoch = epoch + 1, token = '', holder = '', expires = {now}
WHERE name = ? AND token = ?`
)

// A fence locks the row FOR KEY SHARE. That lock prevents only changes to columns with a unique index, such as the
// epoch, so a renewal does not wait for it. Because of the unique index, a fence that has waited for the start of a new
// term also sees the new epoch.
var postgresql = statements{
	now: "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint", numbered: true,
	schema: `CREATE TABLE IF NOT EXISTS {p}lease (
	name     text COLLATE "C" PRIMARY KEY,
	token    text COLLATE "C" NOT NULL,
	holder   text   NOT NULL,
	epoch    bigint NOT NULL,
	expires  bigint NOT NULL,
	last_run bigint NOT NULL,
	UNIQUE (name, epoch)
);
`,
	find:   find,
	create: `INSERT INTO {p}lease (name, ` + written + `) VALUES (?, '', '', 0, 0, 0) ON CONFLICT DO NOTHING`,
	load:   load,
	acquire: `UPDATE {p}lease l SET token = ?, holder = ?, epoch = greatest(l.epoch + 1, {now}),
	expires = {now} + ?
FROM (SELECT name FROM {p}lease WHERE name = ? AND epoch = ? AND expires <= {now} FOR UPDATE SKIP LOCKED) free
WHERE l.name = free.name RETURNING ` + columns,
	renew:   renew,
	run:     run,
	release: release,
	fence:   `SELECT epoch FROM {p}lease WHERE name = ? AND epoch = ? FOR KEY SHARE`,
}

// A fence locks a row in a separate table, because renewals would wait for a lock on the lease's row. Both rows have
// the same epoch. One statement changes both, because {now} has the same value everywhere in a statement.
var mysql = statements{
	now: "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))",
	schema: `CREATE TABLE IF NOT EXISTS {p}lease (
	name     varbinary(200) NOT NULL PRIMARY KEY,
	token    varbinary(200) NOT NULL,
	holder   varbinary(200) NOT NULL,
	epoch    bigint         NOT NULL,
	expires  bigint         NOT NULL,
	last_run bigint         NOT NULL
) ENGINE = InnoDB;
CREATE TABLE IF NOT EXISTS {p}lease_fence (
	name  varbinary(200) NOT NULL PRIMARY KEY,
	epoch bigint         NOT NULL
) ENGINE = InnoDB;
`,
	find: find + "; SELECT name, epoch FROM {p}lease_fence WHERE 1 = 0",
	create: `INSERT IGNORE INTO {p}lease_fence (name, epoch) VALUES (?, 0);
INSERT IGNORE INTO {p}lease (name, ` + written + `) VALUES (?, '', '', 0, 0, 0)`,
	load:     load,
	unlocked: `SELECT epoch FROM {p}lease_fence WHERE name = ? FOR UPDATE SKIP LOCKED`,
	acquire: `UPDATE {p}lease l JOIN {p}lease_fence f ON f.name = l.name
SET l.token = ?, l.holder = ?, l.expires = {now} + ?,
	l.epoch = greatest(l.epoch + 1, {now}), f.epoch = greatest(f.epoch + 1, {now})
WHERE l.name = ? AND l.epoch = ? AND l.expires <= {now}`,
	renew: renew,
	run:   run,
	release: `UPDATE {p}lease l JOIN {p}lease_fence f ON f.name = l.name
SET l.epoch = l.epoch + 1, f.epoch = f.epoch + 1, l.token = '', l.holder = '', l.expires = {now}
WHERE l.name = ? AND l.token = ?`,
	fence: `SELECT epoch FROM {p}lease_fence WHERE name = ? AND epoch = ? LOCK IN SHARE MODE`,
}

// On SQLite, a transaction that has written is the only writer until it ends, so the fence is a write.
var sqlite = statements{
	now: "CAST((julianday('now') - 2440587.5) * 86400000.0 + 0.5 AS INTEGER) * 1000",
	schema: `CREATE TABLE IF NOT EXISTS {p}lease (
	name     text    NOT NULL PRIMARY KEY,
	token    text    NOT NULL,
	holder   text    NOT NULL,
	epoch    integer NOT NULL,
	expires  integer NOT NULL,
	last_run integer NOT NULL
);
`,
	find:   find,
	create: `INSERT INTO {p}lease (name, ` + written + `) VALUES (?, '', '', 0, 0, 0) ON CONFLICT DO NOTHING`,
	load:   load,
	acquire: `UPDATE {p}lease
SET token = ?, holder = ?, epoch = max(epoch + 1, {now}), expires = {now} + ?
WHERE name = ? AND epoch = ? AND expires <= {now} RETURNING ` + columns,
	renew:   renew,
	run:     run,
	release: release,
	fence:   `UPDATE {p}lease SET epoch = epoch WHERE name = ? AND epoch = ? RETURNING epoch`,
}
