// Package sqltx implements the common parts of resiliencesql and resiliencepgx: the classification of database errors,
// and one attempt of a transaction. The documentation of package resiliencesql describes the rules.
package sqltx

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/ended"
)

// A Tx is a transaction of a driver.
type Tx interface {
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// A Config describes how to run an attempt of a transaction. resiliencesql.Transactions has the same fields, with
// documentation.
type Config[T Tx] struct {
	Begin   func(ctx context.Context) (T, error)
	Primary func(ctx context.Context, probe string) (T, error)          // optional; see the function Primary
	Code    func(error) string                                          // optional
	Check   func(ctx context.Context, tx T) (committed bool, err error) // optional
}

// attempt runs fn in a transaction and commits it. If the server is read-only, or the driver's prepared statement is
// stale, attempt immediately does this a second time. This is safe, because nothing was applied, and a pause would not
// help.
func (cfg Config[T]) attempt(ctx context.Context, fn func(context.Context, T) error) error {
	err, applied := cfg.transact(ctx, cfg.Begin, fn)
	// An error of fn that is not an outcome may forbid another attempt.
	if _, judged := err.(*outcome); !judged || applied || ctx.Err() != nil {
		return err
	}
	begin := cfg.Begin
	if probe := Reader(err, cfg.Code); probe != "" {
		if cfg.Primary == nil {
			return err
		}
		why := err
		begin = func(ctx context.Context) (T, error) {
			tx, failed := cfg.Primary(ctx, probe)
			if failed != nil {
				failed = why
			}
			return tx, failed
		}
	} else if !Stale(err, cfg.Code) {
		return err
	}
	err, _ = cfg.transact(ctx, begin, fn)
	return err
}

// transact runs fn in a transaction and commits it. If transact returns an error, applied reports whether the
// transaction may have taken effect.
func (cfg Config[T]) transact(
	ctx context.Context, begin func(context.Context) (T, error), fn func(context.Context, T) error,
) (_ error, applied bool) {
	if ctx.Err() != nil {
		return ended.Error(ctx), false
	}
	tx, err := begin(ctx)
	if err != nil {
		return cfg.uncommitted(ctx, err), false
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if err := fn(ctx, tx); err != nil {
		return cfg.uncommitted(ctx, err), false
	}
	if ctx.Err() != nil {
		return ended.Error(ctx), false
	}
	if err = tx.Commit(ctx); err == nil {
		return nil, true
	}
	switch v := classify(err, cfg.Code); v {
	case answered, again: // any other error may occur after the COMMIT was sent, such as pgx's "conn closed"
		return &outcome{err, v}, false
	}
	if probe := Reader(err, cfg.Code); probe != "" && probe != probeGalera {
		return &outcome{err, unavailable}, false // the server has answered COMMIT with the error that it is read-only
	}
	if cfg.Check == nil {
		return &outcome{err, unknown}, true
	}
	committed, failed := cfg.check(ctx)
	switch {
	case failed != nil:
		return &outcome{errors.Join(err, failed), unknown}, true
	case committed:
		return nil, true
	}
	return &outcome{err, unavailable}, false
}

func (cfg Config[T]) check(ctx context.Context) (bool, error) {
	tx, err := cfg.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	return cfg.Check(ctx, tx)
}

// uncommitted returns err with its verdict, for a transaction whose COMMIT was not sent. So the verdict is never
// unknown.
func (cfg Config[T]) uncommitted(ctx context.Context, err error) error {
	judged := Judge(ctx, err, cfg.Code)
	if out, ok := judged.(*outcome); ok && out != err && out.verdict == unknown {
		out.verdict = unavailable
	}
	return judged
}

// InTx runs fn in a transaction and commits it. If retry is not nil, it wraps each attempt.
func (cfg Config[T]) InTx(
	ctx context.Context, retry func(func(context.Context) error) func(context.Context) error,
	fn func(context.Context, T) error,
) error {
	_, err := Value(ctx, cfg, retry, func(ctx context.Context, tx T) (struct{}, error) {
		return struct{}{}, fn(ctx, tx)
	})
	return err
}

// Value is like InTx, for an fn that returns a value. If Value returns an error, the value is the zero V.
func Value[V any, T Tx](
	ctx context.Context, cfg Config[T], retry func(func(context.Context) error) func(context.Context) error,
	fn func(context.Context, T) (V, error),
) (V, error) {
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
