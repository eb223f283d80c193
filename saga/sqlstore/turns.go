package sqlstore

import (
	"context"
	"database/sql"
	"sync"

	"github.com/go-resilience/resilience/internal/ended"
)

// turns makes the writers of SQLite write one after the other, in order. Without it, concurrent writers would poll
// SQLite's lock with pauses, and get it in arbitrary order.
type turns struct {
	// A writer that has passed gate writes. The next writer has passed queue and waits for gate, and all other writers
	// wait for queue. An urgent writer, such as a heartbeat, waits only for gate, because a wait in a long queue could
	// cost a lease.
	gate, queue chan struct{}
}

func newTurns() *turns { return &turns{gate: make(chan struct{}, 1), queue: make(chan struct{}, 1)} }

// enter waits until the caller may write. The caller must call leave after the write.
func (t *turns) enter(ctx context.Context, urgent bool) (leave func(), err error) {
	if !urgent {
		if err := pass(ctx, t.queue); err != nil {
			return nil, err
		}
		defer func() { <-t.queue }() // lets the next caller wait for the gate
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

// prepared caches the prepared statements of transactions. A statement is prepared before its second use. Without this
// cache, SQLite spends a quarter of its time on parsing, and MySQL needs an additional round trip for each statement.
// The prepared statements are closed together with the database.
type prepared struct {
	db *sql.DB

	mu    sync.Mutex
	stmts map[string]*sql.Stmt // the statements by their texts; nil if a text was used once and is not prepared yet
	next  []string             // the texts to prepare
}

func newPrepared(db *sql.DB) *prepared { return &prepared{db: db, stmts: make(map[string]*sql.Stmt)} }

// prepare prepares the statements whose texts were used for the first time since the last call to prepare.
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
			delete(p.stmts, text) // the next use of the text counts as its first use
		}
		p.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// stmt returns the prepared statement with a text, or nil if the text is not prepared yet.
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
