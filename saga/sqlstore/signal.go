package sqlstore

import (
	"context"
	"database/sql"
	"errors"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// The tables of the signals. The row of a saga is locked while a signal of it is written,
// so two signals of one name do not meet.
const (
	postgresSignals = `
CREATE TABLE {p}saga_signal (
	saga_id text COLLATE "C" NOT NULL,
	name    text COLLATE "C" NOT NULL,
	payload bytea       NOT NULL,
	at      timestamptz NOT NULL,
	PRIMARY KEY (saga_id, name)
);
`
	mysqlSignals = `
CREATE TABLE {p}saga_signal (
	saga_id varbinary(200) NOT NULL,
	name    varbinary(200) NOT NULL,
	payload longblob       NOT NULL,
	at      bigint         NOT NULL,
	PRIMARY KEY (saga_id, name)
) ENGINE = InnoDB;
`
	sqliteSignals = `
CREATE TABLE {p}saga_signal (
	saga_id text    NOT NULL,
	name    text    NOT NULL,
	payload blob    NOT NULL,
	at      integer NOT NULL,
	PRIMARY KEY (saga_id, name)
) STRICT, WITHOUT ROWID;
`
)

// Signal implements [store.Store].
func (s *Store) Signal(ctx context.Context, req store.SignalRequest) (rec store.Record, err error) {
	var refused error
	err = s.transact(ctx, func(ctx context.Context, q querier) error {
		rec, refused, err = s.signal(ctx, q, req)
		return err
	})
	if err != nil {
		return store.Record{}, wrap("signal", err)
	}
	return rec, refused
}

// SignalTx implements [store.TxStore].
func (s *Store) SignalTx(ctx context.Context, tx *sql.Tx, req store.SignalRequest) (store.Record, error) {
	rec, refused, err := s.signal(ctx, tx, req)
	if err != nil {
		return rec, wrap("signal", err)
	}
	return rec, refused
}

// signal also returns the error of Admit.
func (s *Store) signal(ctx context.Context, q querier, req store.SignalRequest) (rec store.Record, refused, err error) {
	if !isText(req.ID) {
		return rec, nil, store.ErrNotFound
	}
	// First of all, this locks the row.
	due := s.tables.sql("UPDATE {p}saga SET wake_at = CASE WHEN owner = '' AND status = 'running' AND wake_at > " + s.d.now() +
		" THEN " + s.d.now() + " ELSE wake_at END WHERE id = " + s.d.bind(1))
	for again := true; ; again = false {
		res, err := q.ExecContext(ctx, s.d.madeDue(due), req.ID)
		if err != nil {
			return rec, nil, err
		}
		if rec, err = s.load(ctx, q, req.ID, s.d.readNewest()); err != nil {
			return rec, nil, err
		}
		if n, err := res.RowsAffected(); err != nil || n > 0 || !again {
			break // otherwise it may have been started between the two, and is not locked
		}
	}
	var one int
	known := s.tables.sql("SELECT 1 FROM {p}saga_signal WHERE saga_id = " + s.d.bind(1) + " AND name = " + s.d.bind(2) + s.d.readNewest())
	err = q.QueryRowContext(ctx, known, req.ID, req.Name).Scan(&one)
	if err == nil || !errors.Is(err, sql.ErrNoRows) {
		return rec, nil, err
	}
	if req.Admit != nil {
		if refused = req.Admit(&rec); refused != nil {
			return rec, refused, nil
		}
	}
	insert := s.tables.sql("INSERT INTO {p}saga_signal (saga_id, name, payload, at) VALUES (" +
		s.d.bind(1) + ", " + s.d.bind(2) + ", " + s.d.bind(3) + ", " + s.d.now() + ")")
	_, err = q.ExecContext(ctx, insert, req.ID, req.Name, nonNil(req.Payload))
	return rec, nil, err
}

// Signals implements [store.Store].
func (s *Store) Signals(ctx context.Context, id string) ([]store.Signal, error) {
	rows, err := s.db.QueryContext(ctx, s.tables.sql("SELECT name, payload FROM {p}saga_signal WHERE saga_id = "+
		s.d.bind(1)+" ORDER BY name"), id)
	list, err := collect(rows, err, func(rows *sql.Rows) (sig store.Signal, err error) {
		return sig, rows.Scan(&sig.Name, &sig.Payload)
	})
	return list, wrap("signals", err)
}
