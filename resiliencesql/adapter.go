package resiliencesql

import (
	"context"

	"github.com/go-resilience/resilience/internal/sqltx"
)

// A Tx is a transaction of a driver that is used without database/sql, such as pgx.
type Tx interface {
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// Transactions run functions in transactions of such a driver, by the rules of [InTx]. It is
// what an adapter for one stands on: package resiliencepgx is such an adapter.
type Transactions[T Tx] struct {
	// Begin begins a transaction.
	Begin func(ctx context.Context) (T, error)
	// Primary begins a transaction on a connection to a server that takes writes, after one
	// that took none. probe is a statement that asks a server: if it returns a row, or fails,
	// the server takes no writes, and its connection is closed and not given back to the
	// pool. Nil means that connections to such a server stay, and writes fail until the
	// process restarts.
	Primary func(ctx context.Context, probe string) (T, error)
	// Code and Check are those of [Config]. Both are optional.
	Code  func(error) string
	Check func(ctx context.Context, tx T) (committed bool, err error)
}

// InTx runs fn in a transaction and commits it, under retry unless that is nil.
func (t Transactions[T]) InTx(ctx context.Context, retry func(func(context.Context) error) func(context.Context) error,
	fn func(ctx context.Context, tx T) error) error {
	return sqltx.Config[T](t).InTx(ctx, retry, fn)
}

// Judge gives err its verdict, as [Middleware] does for the error of a call under ctx.
// code, if not nil, is that of a Config.
func Judge(ctx context.Context, err error, code func(error) string) error {
	return sqltx.Judge(ctx, err, code)
}
