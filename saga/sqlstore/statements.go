package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"slices"
	"sync/atomic"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// A byCount has the texts of a statement by the number of its log entries, or ids. A number
// always has the same text, so that drivers prepare it once.
type byCount struct {
	build func(n int) string
	few   [maxBatch + 1]string // of up to five, and of powers of two
}

func newByCount(build func(n int) string) *byCount {
	c := &byCount{build: build}
	for n := range c.few {
		if n < 6 || n&(n-1) == 0 {
			c.few[n] = build(n)
		}
	}
	return c
}

func (c *byCount) text(n int) string {
	if n < len(c.few) && c.few[n] != "" {
		return c.few[n]
	}
	return c.build(n)
}

// texts returns those that were built.
func (c *byCount) texts() []string {
	return slices.DeleteFunc(slices.Clone(c.few[1:]), func(text string) bool { return text == "" })
}

// A prepared holds prepared statements. Without them, SQLite spends a quarter of its time on
// their text, and MySQL a round trip more for each. They are closed with the database.
type prepared struct {
	db    *sql.DB
	ready atomic.Bool
	gate  chan struct{}        // who is in it prepares, and has what follows
	texts []string             // not prepared yet
	stmts map[string]*sql.Stmt // by text
}

func newPrepared(db *sql.DB, texts []string) *prepared {
	return &prepared{db: db, gate: make(chan struct{}, 1), texts: texts, stmts: make(map[string]*sql.Stmt)}
}

// all returns the statements by their texts. What a call has prepared when its ctx ends, the
// next call need not prepare again.
func (p *prepared) all(ctx context.Context) (map[string]*sql.Stmt, error) {
	if p.ready.Load() {
		return p.stmts, nil
	}
	if err := pass(ctx, p.gate); err != nil {
		return nil, err
	}
	defer func() { <-p.gate }()
	for ; len(p.texts) > 0; p.texts = p.texts[1:] {
		stmt, err := p.db.PrepareContext(ctx, p.texts[0])
		if err != nil {
			return nil, err
		}
		p.stmts[p.texts[0]] = stmt
	}
	p.ready.Store(true)
	return p.stmts, nil
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

func jsonHeld(list []store.Held) string {
	type held struct {
		One   int    `json:"one"`
		ID    string `json:"id"`
		Epoch int64  `json:"epoch"`
	}
	out := make([]held, len(list))
	for i, h := range list {
		out[i] = held{1, h.ID, h.Epoch}
	}
	return jsonText(out)
}

func jsonText(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and numbers
	}
	return string(text)
}
