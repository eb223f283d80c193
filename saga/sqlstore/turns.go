package sqlstore

import (
	"context"
	"database/sql"
	"sync"

	"github.com/go-resilience/resilience/internal/ended"
)

// turns lets the writers of SQLite write one after the other. Without it, concurrent writers would poll SQLite's lock
// with pauses, in no order.
type turns struct {
	// The writer that has the gate writes. The first of the others waits for the gate, and the rest for the queue. An
	// urgent writer, such as a heartbeat, skips the queue: a long queue must not cost a lease.
	gate, queue chan struct{}
}

func newTurns() *turns { return &turns{gate: make(chan struct{}, 1), queue: make(chan struct{}, 1)} }

// enter waits until the caller may write. The caller calls leave afterwards.
func (t *turns) enter(ctx context.Context, urgent bool) (leave func(), err error) {
	if !urgent {
		if err := pass(ctx, t.queue); err != nil {
			return nil, err
		}
		defer func() { <-t.queue }() // the next caller may wait for the gate
	}
	if err := pass(ctx, t.gate); err != nil {
		return nil, err
	}
	return func() { <-t.gate }, nil
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

// prepared caches the prepared statements of transactions. A statement is prepared before its second use. Without the
// cache, SQLite spends a quarter of its time on parsing, and MySQL needs one more round trip for each statement. The
// statements are closed with the database.
type prepared struct {
	db *sql.DB

	mu    sync.Mutex
	stmts map[string]*sql.Stmt // by text; nil if the text was used once and is not prepared yet
	next  []string             // the texts to prepare
}

func newPrepared(db *sql.DB) *prepared { return &prepared{db: db, stmts: make(map[string]*sql.Stmt)} }

// prepare prepares the statements that were used for the first time since its last call.
func (p *prepared) prepare(ctx context.Context) error {
	for {
		p.mu.Lock()
		if len(p.next) == 0 {
			p.mu.Unlock()
			return nil
		}
		text := p.next[0]
		p.next = p.next[1:]
		p.mu.Unlock()
		stmt, err := p.db.PrepareContext(ctx, text)
		p.mu.Lock()
		if p.stmts[text] = stmt; err != nil {
			delete(p.stmts, text) // the next use counts as the first
		}
		p.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// stmt returns the prepared statement with a text, or nil if there is none yet.
func (p *prepared) stmt(text string) *sql.Stmt {
	p.mu.Lock()
	defer p.mu.Unlock()
	stmt, used := p.stmts[text]
	if !used {
		p.stmts[text] = nil
		p.next = append(p.next, text)
	}
	return stmt
}

// A preparedTx is a transaction that uses prepared statements.
type preparedTx struct {
	*sql.Tx
	prepared *prepared
}

func (tx preparedTx) ExecContext(ctx context.Context, text string, args ...any) (sql.Result, error) {
	if stmt := tx.prepared.stmt(text); stmt != nil {
		return tx.StmtContext(ctx, stmt).ExecContext(ctx, args...)
	}
	return tx.Tx.ExecContext(ctx, text, args...)
}

func (tx preparedTx) QueryContext(ctx context.Context, text string, args ...any) (*sql.Rows, error) {
	if stmt := tx.prepared.stmt(text); stmt != nil {
		return tx.StmtContext(ctx, stmt).QueryContext(ctx, args...)
	}
	return tx.Tx.QueryContext(ctx, text, args...)
}

func (tx preparedTx) QueryRowContext(ctx context.Context, text string, args ...any) *sql.Row {
	if stmt := tx.prepared.stmt(text); stmt != nil {
		return tx.StmtContext(ctx, stmt).QueryRowContext(ctx, args...)
	}
	return tx.Tx.QueryRowContext(ctx, text, args...)
}
