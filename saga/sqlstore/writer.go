package sqlstore

import (
	"context"
	"database/sql"
	"sync"

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

// A prepared holds prepared statements. Without them, SQLite spends a quarter of its time on
// their text, and MySQL a round trip more for each. They are closed with the database.
type prepared struct {
	db    *sql.DB
	texts []string
	mu    sync.Mutex
	stmts map[string]*sql.Stmt // by text; nil before the first use
}

func newPrepared(db *sql.DB, texts []string) *prepared { return &prepared{db: db, texts: texts} }

// all returns the statements by their texts.
func (p *prepared) all(ctx context.Context) (map[string]*sql.Stmt, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stmts != nil {
		return p.stmts, nil
	}
	stmts := make(map[string]*sql.Stmt)
	for _, text := range p.texts {
		stmt, err := p.db.PrepareContext(ctx, text)
		if err != nil {
			for _, stmt := range stmts {
				_ = stmt.Close()
			}
			return nil, err
		}
		stmts[text] = stmt
	}
	p.stmts = stmts
	return stmts, nil
}

// A preparedTx is a transaction that uses prepared statements.
type preparedTx struct {
	*sql.Tx
	prepared map[string]*sql.Stmt
}

func (tx preparedTx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if stmt := tx.prepared[query]; stmt != nil {
		return tx.StmtContext(ctx, stmt).ExecContext(ctx, args...)
	}
	return tx.Tx.ExecContext(ctx, query, args...)
}

func (tx preparedTx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if stmt := tx.prepared[query]; stmt != nil {
		return tx.StmtContext(ctx, stmt).QueryContext(ctx, args...)
	}
	return tx.Tx.QueryContext(ctx, query, args...)
}

func (tx preparedTx) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	if stmt := tx.prepared[query]; stmt != nil {
		return tx.StmtContext(ctx, stmt).QueryRowContext(ctx, args...)
	}
	return tx.Tx.QueryRowContext(ctx, query, args...)
}
