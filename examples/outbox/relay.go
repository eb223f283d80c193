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

// A relay publishes the messages of the outbox. A failed message delays only the later messages of
// its topic.
type relay struct {
	db      *sql.DB
	publish func(context.Context, message) error // may be called twice for a message
	poll    time.Duration                        // the wait while no message is due
}

const (
	maxDelay    = time.Hour
	maxAttempts = 15 // about three hours
)

// run publishes messages while this process has the lease, until ctx ends. Every process calls run.
func (r *relay) run(ctx context.Context, store lease.Store) {
	leader := lease.New(store, lease.Config{Name: "outbox", TTL: 15 * time.Second})
	_ = leader.Loop(ctx, func(ctx context.Context, term lease.Term) error { // it returns nil when ctx ends
		for {
			wait, err := r.publishNext(ctx, term.Fence)
			if err != nil {
				return err // the database failed: another process may lead; slog warns
			}
			sleep(ctx, wait)
		}
	})
}

// publishNext publishes the oldest message that is due, and records the result in a transaction
// that fence allows only to the leader. It returns the time to wait before the next message.
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
		// The breaker is open, so nothing was tried: this is not an attempt.
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

// next returns the oldest message that is due and that has no older message of its topic before it.
func (r *relay) next(ctx context.Context) (m message, err error) {
	row := r.db.QueryRowContext(ctx, `
		SELECT id, topic, body, attempts FROM outbox AS m
		WHERE due <= $1 AND NOT EXISTS (SELECT 1 FROM outbox WHERE topic = m.topic AND id < m.id)
		ORDER BY id LIMIT 1`, time.Now().UnixMilli())
	return m, row.Scan(&m.id, &m.topic, &m.body, &m.attempts)
}

// record removes m from the outbox if m was published. A message that the broker rejects finally,
// or that has failed maxAttempts times, becomes a dead letter. Any other message is due later.
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
