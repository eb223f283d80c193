package sqlstore

import (
	"context"
	"database/sql"

	"github.com/go-resilience/resilience/internal/ended"
)

// A writer makes the write transactions of SQLite one after the other. Concurrent ones
// would not wait for each other in turn, but ask SQLite again and again, with pauses.
type writer struct {
	db       *sql.DB
	prepared *prepared
	// The caller in gate writes. The others wait in queue for their turn at the gate,
	// except for a heartbeat: a long queue must not cost a lease.
	gate, queue chan struct{}
}

func newWriter(db *sql.DB, hot []string) *writer {
	return &writer{db: db, prepared: newPrepared(db, hot), gate: make(chan struct{}, 1), queue: make(chan struct{}, 1)}
}

// enter waits until the caller is in the gate.
func (w *writer) enter(ctx context.Context, urgent bool) (leave func(), err error) {
	if !urgent {
		if err := pass(ctx, w.queue); err != nil {
			return nil, err
		}
		defer func() { <-w.queue }() // the next caller waits at the gate
	}
	if err := pass(ctx, w.gate); err != nil {
		return nil, err
	}
	return func() { <-w.gate }, nil
}

func pass(ctx context.Context, c chan struct{}) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	select {
	case c <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ended.Error(ctx)
	}
}

// write calls fn in a transaction and commits it. The end of ctx ends the wait for the
// gate, and not the transaction: it is short, and no ctx ends a wait inside SQLite.
func (w *writer) write(ctx context.Context, urgent bool, fn func(context.Context, querier) error) error {
	leave, err := w.enter(ctx, urgent)
	if err != nil {
		return err
	}
	defer leave()
	stmts, err := w.prepared.all(ctx)
	if err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(ctx, preparedTx{tx, stmts}); err != nil {
		return err
	}
	return tx.Commit()
}
