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

// Transactions runs functions in transactions of a driver that is used without database/sql, by the rules of the
// function [InTx]. Use Transactions to write an adapter for a driver; package resiliencepgx is an example.
type Transactions[T Tx] struct {
	// Begin starts a transaction.
	Begin func(ctx context.Context) (T, error)
	// Primary starts a transaction on a connection to a server that accepts writes. Primary is called after a server
	// has reported that it is read-only. To test a connection, Primary executes probe, which is a query. If the query
	// returns a row or an error, the server of the connection accepts no writes. Primary then closes the connection
	// instead of returning it to the pool. After that, Primary tries another connection.
	//
	// Nil means that the connections to the read-only server remain in the pool. All writes through these connections
	// fail until the process restarts.
	Primary func(ctx context.Context, probe string) (T, error)
	// Code and Check are like the fields of [Config] with the same names. Both are optional.
	Code  func(error) string
	Check func(ctx context.Context, tx T) (committed bool, err error)
}

// InTx runs fn in a transaction and commits it. If retry is not nil, it wraps the transaction, like Config.Retry.
func (t Transactions[T]) InTx(ctx context.Context, retry func(func(context.Context) error) func(context.Context) error,
	fn func(ctx context.Context, tx T) error) error {
	return sqltx.Config[T](t).InTx(ctx, retry, fn)
}

// Judge classifies err in the same way as [Middleware], and returns err with its verdict. err is the error of a call
// with ctx. code is optional, like Config.Code.
func Judge(ctx context.Context, err error, code func(error) string) error {
	return sqltx.Judge(ctx, err, code)
}
