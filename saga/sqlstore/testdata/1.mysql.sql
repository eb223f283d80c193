CREATE TABLE IF NOT EXISTS saga (
	id               varbinary(200) NOT NULL PRIMARY KEY,
	name             varbinary(200) NOT NULL,
	version          bigint         NOT NULL,
	status           varbinary(20)  NOT NULL CHECK (status IN ('running', 'compensating', 'stuck', 'completed', 'compensated', 'abandoned')),
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
	live             boolean AS (status IN ('running', 'compensating')) STORED,
	owned            boolean AS (owner <> '') STORED,
	turn             varbinary(100) AS (CASE WHEN owner = '' THEN tenant ELSE '' END) STORED,
	ended_at         bigint AS (CASE WHEN status IN ('completed', 'compensated', 'abandoned') AND parent = '' THEN wake_at END) STORED,
	KEY saga_live (live, owned, turn, name, version, wake_at),
	KEY saga_ended (status, ended_at),
	KEY saga_child (parent, parent_step, status),
	KEY saga_name (name, status, created_at, id),
	KEY saga_time (status, created_at, id)
) ENGINE = InnoDB;
CREATE TABLE IF NOT EXISTS saga_log (
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
CREATE TABLE IF NOT EXISTS saga_signal (
	saga_id varbinary(200) NOT NULL,
	name    varbinary(200) NOT NULL,
	payload longblob       NOT NULL,
	at      bigint         NOT NULL,
	PRIMARY KEY (saga_id, name)
) ENGINE = InnoDB;
CREATE TABLE IF NOT EXISTS saga_barrier (
	saga_id varbinary(200) NOT NULL,
	step varbinary(210) NOT NULL,
	op varbinary(20) NOT NULL,
	reason blob NOT NULL,
	fingerprint varbinary(100) NOT NULL DEFAULT '',
	at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
	PRIMARY KEY (saga_id, step, op)
) ENGINE = InnoDB;
CREATE TABLE IF NOT EXISTS saga_schema (version bigint NOT NULL PRIMARY KEY, compatible bigint NOT NULL) ENGINE = InnoDB;
INSERT IGNORE INTO saga_schema (version, compatible) VALUES (1, 1);
