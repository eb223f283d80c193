// Package sqltx is what resiliencesql and resiliencepgx have in common: what the errors of a
// database mean, and one attempt of a transaction. Package resiliencesql has the rules.
package sqltx

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/ended"
)

// A Tx is a transaction.
type Tx interface {
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// A Config is how an attempt is made.
type Config[T Tx] struct {
	Code  func(error) string // optional
	Begin func(ctx context.Context) (T, error)
	Check func(ctx context.Context, tx T) (committed bool, err error) // optional
}

// attempt runs fn in a transaction and commits it.
func (cfg Config[T]) attempt(ctx context.Context, fn func(context.Context, T) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	tx, err := cfg.Begin(ctx)
	if err != nil {
		return cfg.uncommitted(ctx, err)
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if err := fn(ctx, tx); err != nil {
		return cfg.uncommitted(ctx, err)
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if err = tx.Commit(ctx); err == nil {
		return nil
	}
	switch v := classify(err, cfg.Code); v {
	case answered, again: // whatever else a driver says, pgx at times of what it has sent: "conn closed"
		return &outcome{err, v}
	}
	if cfg.Check == nil {
		return &outcome{err, unknown}
	}
	committed, failed := cfg.check(ctx)
	switch {
	case failed != nil:
		return &outcome{errors.Join(err, failed), unknown}
	case committed:
		return nil
	}
	return &outcome{err, unavailable}
}

func (cfg Config[T]) check(ctx context.Context) (bool, error) {
	tx, err := cfg.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	return cfg.Check(ctx, tx)
}

// uncommitted judges err of a transaction whose COMMIT was not sent.
func (cfg Config[T]) uncommitted(ctx context.Context, err error) error {
	judged := Judge(ctx, err, cfg.Code)
	if own, ok := judged.(*outcome); ok && own != err && own.verdict == unknown {
		own.verdict = unavailable
	}
	return judged
}

// InTx runs attempts of fn under retry, unless it is nil.
func (cfg Config[T]) InTx(ctx context.Context, retry func(func(context.Context) error) func(context.Context) error, fn func(context.Context, T) error) error {
	_, err := Value(ctx, cfg, retry, func(ctx context.Context, tx T) (struct{}, error) { return struct{}{}, fn(ctx, tx) })
	return err
}

// Value is InTx for an fn that returns a value; on error, the zero V.
func Value[V any, T Tx](ctx context.Context, cfg Config[T], retry func(func(context.Context) error) func(context.Context) error, fn func(context.Context, T) (V, error)) (V, error) {
	var value V
	attempt := func(ctx context.Context) error {
		var v V
		err := cfg.attempt(ctx, func(ctx context.Context, tx T) (err error) {
			v, err = fn(ctx, tx)
			return err
		})
		if err == nil {
			value = v
		}
		return err
	}
	if retry != nil {
		attempt = retry(attempt)
	}
	if err := attempt(ctx); err != nil {
		var zero V
		return zero, err
	}
	return value, nil
}
