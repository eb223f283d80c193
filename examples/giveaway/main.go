// Giveaway gives exactly 100.00 away in each of 100 divisions, 0.01 a winner,
// from four processes at once that are killed at random. The balance of a
// division changes under optimistic locking, in the transaction that starts the
// saga of the payment; a payment that the bank refuses goes back into it.
//
//	go run ./examples/giveaway            # in a SQLite file
//	go run ./examples/giveaway -dsn postgres://postgres@127.0.0.1:5432/postgres
//	go run ./examples/giveaway -shard     # once more, spread by division: fewer retries
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"time"

	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

const divisions, prize = 100, 100_00 // cents

var (
	dsn    = flag.String("dsn", "", "a PostgreSQL (postgres://...); empty: a temporary SQLite file")
	batch  = flag.Int("batch", 2000, "how many winners one payment is for at most")
	shard  = flag.Bool("shard", false, "then do it again: each process prefers a quarter of the divisions")
	worker = flag.Int("worker", -1, "not for you: the number of a process")
)

// A Payout is one claim: what the winners of a division get together.
type Payout struct {
	ID              string
	Division, Cents int
}

func payout(b *bank) *saga.Saga[Payout] {
	return &saga.Saga[Payout]{Name: "payout", Steps: []saga.Step[Payout]{{
		Name: "hold", // was done by the transaction that started the saga
		Do:   func(context.Context, *Payout) error { return nil },
		UndoTx: func(ctx context.Context, tx *sql.Tx, p *Payout) error {
			const add = `UPDATE division SET balance = balance + $1, version = version + 1 WHERE id = $2`
			_, err := tx.ExecContext(ctx, add, p.Cents, p.Division)
			return err
		},
	}, {Name: "pay", Attempts: -1, Do: b.pay, Undo: b.takeBack}}}
}

// claim starts the payout of a part of what a division has left.
func claim(ctx context.Context, db *sql.DB, runner *saga.Runner, payouts *saga.Saga[Payout]) error {
	p := Payout{ID: fmt.Sprintf("payout-%016x", rand.Uint64())}
	var balance, version int
	err := db.QueryRowContext(ctx, `SELECT id, balance, version FROM division WHERE balance > 0
		ORDER BY CASE WHEN id % 4 = $1 THEN 0 ELSE 1 END, id LIMIT 1`, *worker).Scan(&p.Division, &balance, &version)
	if err != nil {
		return err
	}
	p.Cents = min(1+rand.N(*batch), balance)
	return resiliencesql.InTx(ctx, db, resiliencesql.Config{}, func(ctx context.Context, tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `UPDATE division SET balance = balance - $1, version = version + 1
			WHERE id = $2 AND version = $3`, p.Cents, p.Division, version)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 { // another was faster: again
			_, conflict := tx.ExecContext(ctx, `UPDATE division SET retries = retries + 1 WHERE id = $1`, p.Division)
			return errors.Join(err, conflict)
		}
		return saga.StartTx(ctx, tx, runner, payouts, p.ID, p)
	})
}

// work claims payouts and runs them until ctx ends, together with those that a
// killed process has left.
func work(ctx context.Context, db *sql.DB, store *sqlstore.Store) {
	runner := saga.NewRunner(store, saga.RunnerConfig{
		LeaseTTL: time.Second, Poll: 50 * time.Millisecond,
		MaxTakeovers: -1, // no process lives long here: that says nothing against a saga
	})
	payouts := payout(&bank{db})
	saga.Register(runner, payouts)
	go func() {
		for ctx.Err() == nil {
			if err := claim(ctx, db, runner, payouts); err != nil { // nothing left, or the database is busy
				time.Sleep(10 * time.Millisecond)
			}
		}
	}()
	check(runner.Run(ctx))
}

// give gives everything away, while it kills a process now and then.
func give(sharded bool) {
	source, drop := create(*dsn)
	defer drop()
	db, store := open(source)
	defer db.Close()
	check(store.Migrate(context.Background()))
	run(db, "CREATE TABLE division (id integer PRIMARY KEY, balance integer, version integer, retries integer)")
	run(db, paymentTable)
	for i := range divisions {
		run(db, "INSERT INTO division VALUES ($1, $2, 0, 0)", i, prize)
	}
	var all processes
	for i := range all {
		all.start(i, source, sharded)
	}
	kills := 0
	for left := 1; left > 0; kills++ {
		time.Sleep(rand.N(time.Second))
		all.start(rand.N(len(all)), source, sharded)
		check(db.QueryRow(`SELECT (SELECT sum(balance) FROM division) +
			(SELECT count(*) FROM saga WHERE status NOT IN ('completed', 'compensated'))`).Scan(&left))
	}
	for i := range all {
		all.kill(i)
	}
	for i := range divisions {
		var cents int
		check(db.QueryRow("SELECT sum(cents) FROM payment WHERE division = $1", i).Scan(&cents))
		fmt.Printf("%3d: %d.%02d%s", i, cents/100, cents%100, map[bool]string{true: "\n", false: "  "}[i%10 == 9])
		if cents != prize {
			log.Fatalf("\ndivision %d has given %d cents, not %d", i, cents, prize)
		}
	}
	var claims, retries int
	check(db.QueryRow("SELECT sum(version), sum(retries) FROM division").Scan(&claims, &retries))
	fmt.Printf("sharded: %v; %d processes killed; %d claims, %d retries\n", sharded, kills, claims, retries)
}

func main() {
	flag.Parse()
	if *worker >= 0 {
		db, store := open(*dsn)
		work(whileParentLives(), db, store)
		return
	}
	give(false)
	if *shard {
		give(true)
	}
}
