package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/lease"
)

const schema = `
CREATE TABLE IF NOT EXISTS outbox (
	id       INTEGER PRIMARY KEY,
	topic    TEXT NOT NULL,
	body     TEXT NOT NULL,
	attempts INTEGER NOT NULL DEFAULT 0,
	due      INTEGER NOT NULL DEFAULT 0, -- not published before: milliseconds since 1970
	error    TEXT NOT NULL DEFAULT ''    -- of the last attempt
);
CREATE TABLE IF NOT EXISTS outbox_dead (
	id INTEGER PRIMARY KEY, topic TEXT NOT NULL, body TEXT NOT NULL, attempts INTEGER NOT NULL, error TEXT NOT NULL
);`

// A message is a row of the outbox.
type message struct {
	id          int64
	topic, body string
	attempts    int
}

// A relay publishes the messages of the outbox. If a message cannot be published, only the later messages of the same
// topic wait for it.
type relay struct {
	db      *sql.DB
	publish func(context.Context, message) error // called again if the result of a call was not recorded
	poll    time.Duration                        // time to wait if no message is due
}

const (
	maxDelay    = time.Hour
	maxAttempts = 15 // the last attempt is after about three hours
)

// run publishes messages while this process holds a lease, until ctx is done. Every process calls run, and only the
// process with the lease publishes.
func (r *relay) run(ctx context.Context, store lease.Store) {
	leader := lease.New(store, lease.Config{Name: "outbox", TTL: 15 * time.Second})
	_ = leader.Loop(ctx, func(ctx context.Context, term lease.Term) error { // returns nil when ctx is done
		for {
			wait, err := r.publishNext(ctx, term.Fence)
			if err != nil {
				return err // the database failed: release the lease to let another process try
			}
			sleep(ctx, wait)
		}
	})
}

// publishNext publishes the oldest message that is due, and records the result in a transaction. In the transaction,
// fence returns an error if this process no longer holds the lease. publishNext returns the time to wait before the
// next message.
func (r *relay) publishNext(
	ctx context.Context, fence func(context.Context, *sql.Tx) error,
) (wait time.Duration, err error) {
	m, err := r.next(ctx)
	if errors.Is(err, sql.ErrNoRows) {
		return r.poll, nil
	}
	if err != nil {
		return 0, err
	}
	failure := r.publish(ctx, m)
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	if resilience.Refused(failure) {
		// The breaker is open, so the message was not sent, and this does not count as an attempt.
		return max(r.poll, resilience.RetryAfter(failure)), nil
	}
	tx, err := r.db.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }()
	if err := record(ctx, tx, m, failure); err != nil {
		return 0, err
	}
	if err := fence(ctx, tx); err != nil {
		return 0, err
	}
	return 0, tx.Commit()
}

// next returns the oldest message that is due and is the oldest message of its topic.
func (r *relay) next(ctx context.Context) (m message, err error) {
	row := r.db.QueryRowContext(ctx, `
		SELECT id, topic, body, attempts FROM outbox AS m
		WHERE due <= $1 AND NOT EXISTS (SELECT 1 FROM outbox WHERE topic = m.topic AND id < m.id)
		ORDER BY id LIMIT 1`, time.Now().UnixMilli())
	return m, row.Scan(&m.id, &m.topic, &m.body, &m.attempts)
}

// record removes m from the outbox if m was published. If the broker rejected m permanently, or m has failed
// maxAttempts times, record moves m to the dead letters. Otherwise m becomes due again later.
func record(ctx context.Context, tx *sql.Tx, m message, failure error) error {
	attempts := m.attempts + 1
	dead := failure != nil && (!resilience.Retryable(failure) || attempts >= maxAttempts)
	if failure != nil && !dead {
		delay := max(min(time.Second<<m.attempts, maxDelay), resilience.RetryAfter(failure))
		_, err := tx.ExecContext(ctx, `UPDATE outbox SET attempts = $1, due = $2, error = $3 WHERE id = $4`,
			attempts, time.Now().Add(delay).UnixMilli(), failure.Error(), m.id)
		return err
	}
	if dead {
		_, err := tx.ExecContext(ctx, `INSERT INTO outbox_dead VALUES ($1, $2, $3, $4, $5)`,
			m.id, m.topic, m.body, attempts, failure.Error())
		if err != nil {
			return err
		}
	}
	_, err := tx.ExecContext(ctx, `DELETE FROM outbox WHERE id = $1`, m.id)
	return err
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
