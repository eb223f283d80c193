CREATE TABLE IF NOT EXISTS saga (
	id               text    NOT NULL PRIMARY KEY,
	name             text    NOT NULL,
	version          integer NOT NULL,
	status           text    NOT NULL CHECK (status IN ('running', 'compensating', 'stuck', 'completed', 'compensated', 'abandoned')),
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

CREATE INDEX IF NOT EXISTS saga_live ON saga (owned, turn, name, version, wake_at) WHERE status IN ('running', 'compensating');
CREATE INDEX IF NOT EXISTS saga_ended ON saga (status, wake_at) WHERE status IN ('completed', 'compensated', 'abandoned') AND parent = '';
CREATE INDEX IF NOT EXISTS saga_child ON saga (parent, parent_step, status) WHERE parent > '';
CREATE INDEX IF NOT EXISTS saga_name ON saga (name, status, created_at, id);
CREATE INDEX IF NOT EXISTS saga_time ON saga (status, created_at, id);
CREATE TABLE IF NOT EXISTS saga_log (
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
CREATE TABLE IF NOT EXISTS saga_signal (
	saga_id text    NOT NULL,
	name    text    NOT NULL,
	payload blob    NOT NULL,
	at      integer NOT NULL,
	PRIMARY KEY (saga_id, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id text NOT NULL,
	step text NOT NULL,
	op text NOT NULL,
	reason text NOT NULL,
	fingerprint text NOT NULL DEFAULT '',
	at timestamptz NOT NULL DEFAULT CURRENT_TIMESTAMP,
	PRIMARY KEY (saga_id, step, op)
);
CREATE TABLE IF NOT EXISTS saga_schema (version bigint NOT NULL PRIMARY KEY, compatible bigint NOT NULL);
INSERT INTO saga_schema (version, compatible) VALUES (1, 1) ON CONFLICT DO NOTHING;
