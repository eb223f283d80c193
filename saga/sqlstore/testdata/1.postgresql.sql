CREATE TABLE IF NOT EXISTS saga (
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
	status           text COLLATE "C" NOT NULL CHECK (status IN ('running', 'compensating', 'stuck', 'completed', 'compensated', 'abandoned')),
	data             bytea    NOT NULL,
	seq              bigint   NOT NULL,
	nonce            bigint   NOT NULL,
	updated_at       bigint   NOT NULL,
	steps            text     NOT NULL
) WITH (fillfactor = 50);

CREATE INDEX IF NOT EXISTS saga_live ON saga (owned, turn, name, version, wake_at) WHERE status IN ('running', 'compensating');
CREATE INDEX IF NOT EXISTS saga_ended ON saga (status, wake_at) WHERE status IN ('completed', 'compensated', 'abandoned') AND parent = '';
CREATE INDEX IF NOT EXISTS saga_child ON saga (parent, parent_step, status) WHERE parent > '';
CREATE INDEX IF NOT EXISTS saga_name ON saga (name, status, created_at, id);
CREATE INDEX IF NOT EXISTS saga_time ON saga (status, created_at, id);
CREATE TABLE IF NOT EXISTS saga_log (
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
CREATE TABLE IF NOT EXISTS saga_signal (
	saga_id text COLLATE "C" NOT NULL,
	name    text COLLATE "C" NOT NULL,
	payload bytea  NOT NULL,
	at      bigint NOT NULL,
	PRIMARY KEY (saga_id, name)
);
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
