package docs_test

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"os"
	"time"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

// This file holds the snippets of saga.md, for the compiler: see TestSnippetsCompile. It is not run.

var bank *sql.DB

type Purchase struct{ Cents int }

var errNoPayment error

// payments is the client of a payment service, in the snippet of an outcome that is unknown.
var payments interface {
	Find(ctx context.Context, id string) (payment, error)
	Create(ctx context.Context, id string, cents int) (payment, error)
}

type payment struct{ Status string }

type Transfer struct {
	From, To string
	Cents    int
}

var transfer = &saga.Saga[Transfer]{
	Name: "transfer", Version: 1,
	Steps: []saga.Step[Transfer]{
		{Name: "withdraw", Do: withdraw, Undo: refund},
		{Name: "deposit", Do: deposit, Pivot: true}, // after this step, nothing is undone
	},
}

func withdraw(ctx context.Context, t *Transfer) error { return book(ctx, t.From, -t.Cents) }
func refund(ctx context.Context, t *Transfer) error   { return book(ctx, t.From, t.Cents) }
func deposit(ctx context.Context, t *Transfer) error  { return book(ctx, t.To, t.Cents) }

func book(ctx context.Context, account string, cents int) error {
	return saga.Apply(ctx, bank, func(tx *sql.Tx) error { // bank is the participant's *sql.DB
		res, err := tx.ExecContext(ctx,
			`UPDATE account SET cents = cents + $1 WHERE id = $2 AND cents + $1 >= 0`, cents, account)
		if err != nil {
			return err // retried
		}
		n, err := res.RowsAffected()
		if err == nil && n == 0 {
			return saga.Declined(errors.New("no such account, or not enough money")) // final
		}
		return err
	})
}

func runTransfers(ctx context.Context) (*saga.Handle[Transfer], error) { // once per process
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL")) // driver: github.com/jackc/pgx/v5/stdlib
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(16)
	store := sqlstore.New(db, sqlstore.PostgreSQL, sqlstore.Config{})
	if err := store.Migrate(ctx); err != nil {
		return nil, err
	}
	runner := saga.NewRunner(store, saga.RunnerConfig{Name: "bank"})
	transfers := saga.Register(runner, transfer)
	go func() { slog.Info("runner stopped", "err", runner.Run(ctx)) }()
	return transfers, nil
}

func transferOnce(ctx context.Context, transfers *saga.Handle[Transfer], id string, t Transfer) (Transfer, error) {
	if _, err := transfers.Start(ctx, id, t); err != nil {
		return t, err // safe to retry: an ID is started only once
	}
	return transfers.Result(ctx, id) // matches saga.ErrCompensated if the transfer was undone
}

func pay(ctx context.Context, o *Purchase) error {
	id := saga.CommandFrom(ctx).ID
	p, err := payments.Find(ctx, id) // an earlier attempt may have arrived
	if errors.Is(err, errNoPayment) {
		p, err = payments.Create(ctx, id, o.Cents) // with id as its idempotency key
	}
	switch {
	case err != nil:
		return err // unknown: pay is called again
	case p.Status == "pending":
		return errors.New("the payment is pending") // called again, after Backoff
	case p.Status == "declined":
		return saga.Declined(errors.New("card declined"))
	}
	return nil
}

var _ = saga.Saga[Purchase]{Steps: []saga.Step[Purchase]{
	{Name: "approve", Await: "decision", AwaitFor: 48 * time.Hour, ReadOnly: true,
		Do: func(ctx context.Context, o *Purchase) error {
			if decision, _ := saga.SignalFrom(ctx, "decision"); string(decision) != "yes" {
				return saga.Declined(errors.New("not approved")) // the saga turns back
			}
			return nil
		}},
}}

func _(id string) error {
	in, err := runner.Get(ctx, id) // in.Step and in.Cause say what happened, in.Actions what is allowed
	if err != nil {
		return err
	}
	return runner.Operate(ctx, id, saga.Operation{
		Action: saga.ActionRetry,
		Seq:    in.Seq, // refused if the saga has changed since Get
		Note:   "the card service is back",
	})
}

func _() {
	retention := saga.Retention{Completed: 90 * 24 * time.Hour, Compensated: saga.Unlimited}

	use(runTransfers, transferOnce, pay, retention)
}
