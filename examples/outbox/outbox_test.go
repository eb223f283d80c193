package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
)

// A fakeBroker fails messages by their body.
type fakeBroker struct {
	fail      func(body string) error
	published []string
}

func (b *fakeBroker) publish(_ context.Context, m message) error {
	if err := b.fail(m.body); err != nil {
		return err
	}
	b.published = append(b.published, m.body)
	return nil
}

// relayFor runs a relay for d, with n messages of as many topics.
func relayFor(t *testing.T, d time.Duration, n int, b *fakeBroker) *sql.DB {
	db, err := open(filepath.Join(t.TempDir(), "db"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	for i := range n {
		require.NoError(t, place(t.Context(), db, fmt.Sprint("topic", i), fmt.Sprint(i)))
	}
	require.NoError(t, place(t.Context(), db, "topic1", "after 1"))
	r := &relay{db: db, publish: guarded(b.publish), poll: 30 * time.Second}
	for end := time.Now().Add(d); time.Now().Before(end); {
		wait, err := r.publishNext(t.Context(), func(context.Context, *sql.Tx) error { return nil })
		require.NoError(t, err)
		time.Sleep(wait)
	}
	return db
}

// deadLetters returns the bodies of the dead letters with their attempts.
func deadLetters(t *testing.T, db *sql.DB) map[string]int {
	rows, err := db.Query(`SELECT body, attempts FROM outbox_dead`)
	require.NoError(t, err)
	defer func() { _ = rows.Close() }()
	dead := map[string]int{}
	for rows.Next() {
		var body string
		var attempts int
		require.NoError(t, rows.Scan(&body, &attempts))
		dead[body] = attempts
	}
	require.NoError(t, rows.Err())
	return dead
}

// One message that the broker rejects becomes a dead letter, and the others are published.
func TestRejectedMessageBlocksNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBroker{fail: func(body string) error {
			if body == "1" {
				return resilience.Answer(errTooLarge)
			}
			return nil
		}}
		db := relayFor(t, time.Second, 4, b)
		require.Equal(t, []string{"0", "2", "3", "after 1"}, b.published)
		require.Equal(t, map[string]int{"1": 1}, deadLetters(t, db))
	})
}

// A message that always fails delays only its topic, until it becomes a dead letter.
func TestFailingMessageBlocksOnlyItsTopic(t *testing.T) {
	fail := func(body string) error {
		if body == "1" {
			return errors.New("connection lost")
		}
		return nil
	}
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBroker{fail: fail}
		db := relayFor(t, time.Minute, 4, b)
		require.Equal(t, []string{"0", "2", "3"}, b.published)
		require.Empty(t, deadLetters(t, db))
	})
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBroker{fail: fail}
		db := relayFor(t, 4*time.Hour, 4, b)
		require.Equal(t, []string{"0", "2", "3", "after 1"}, b.published)
		require.Equal(t, map[string]int{"1": maxAttempts}, deadLetters(t, db))
	})
}

// An outage of the broker makes no message a dead letter.
func TestOutageMakesNoDeadLetters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		back := time.Now().Add(2 * time.Hour)
		b := &fakeBroker{fail: func(string) error {
			if time.Now().Before(back) {
				return errors.New("connection refused")
			}
			return nil
		}}
		db := relayFor(t, 4*time.Hour, 4, b)
		require.Len(t, b.published, 5)
		require.Empty(t, deadLetters(t, db))
	})
}
