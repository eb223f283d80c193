package main

import (
	"context"
	"database/sql"
	"errors"
	"strings"

	"github.com/go-resilience/resilience/saga"
)

const paymentTable = `CREATE TABLE payment (id text PRIMARY KEY, division integer, cents integer)`

// A bank pays winners. It applies each command, which is a payment or its reversal, only once, even if the command
// arrives repeatedly or late.
type bank struct{ db *sql.DB }

func (b *bank) pay(ctx context.Context, p *Payout) error {
	if strings.HasPrefix(p.ID, "payout-0") { // one in 16 payments
		return saga.Declined(errors.New("account closed"))
	}
	return b.apply(ctx, `INSERT INTO payment VALUES ($1, $2, $3)`, p.ID, p.Division, p.Cents)
}

func (b *bank) takeBack(ctx context.Context, p *Payout) error {
	return b.apply(ctx, `DELETE FROM payment WHERE id = $1`, p.ID)
}

func (b *bank) apply(ctx context.Context, statement string, args ...any) error {
	return saga.Apply(ctx, b.db, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, statement, args...)
		return err
	})
}
