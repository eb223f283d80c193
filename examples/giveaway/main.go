// Giveaway is a program that pays exactly 100.00 in each of 100 divisions, 0.01 to each winner. The payments come from
// four processes, which run in parallel and are killed at random. Each payment is a saga. The transaction that starts
// the saga also reduces the balance of the division, under optimistic locking. If the bank declines the payment, the
// saga returns the money to the balance.
//
//	go run ./examples/giveaway            # in a SQLite file
//	go run ./examples/giveaway -dsn postgres://postgres@127.0.0.1:5432/postgres
//	go run ./examples/giveaway -shard     # a second time, sharded by division: fewer retries
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
	dsn    = flag.String("dsn", "", "a PostgreSQL URL (postgres://...); empty means a temporary SQLite file")
	batch  = flag.Int("batch", 2000, "the maximum number of winners per payment")
	shard  = flag.Bool("shard", false, "run a second time; each process then prefers a quarter of the divisions")
	worker = flag.Int("worker", -1, "internal: the number of a worker process")
)

// A Payout is a payment to some of a division's winners, and the state of a saga.
type Payout struct {
	ID              string
	Division, Cents int
}

func payout(b *bank) *saga.Saga[Payout] {
	return &saga.Saga[Payout]{Name: "payout", Steps: []saga.Step[Payout]{{
		Name: "hold", // the transaction that starts the saga has already reduced the balance
		Do:   func(context.Context, *Payout) error { return nil },
		UndoTx: func(ctx context.Context, tx *sql.Tx, p *Payout) error {
			const add = `UPDATE division SET balance = balance + $1, version = version + 1 WHERE id = $2`
			_, err := tx.ExecContext(ctx, add, p.Cents, p.Division)
			return err
		},
	}, {Name: "pay", Attempts: saga.Unlimited, Do: b.pay, Undo: b.takeBack}}}
}

// claim takes an amount from the remaining balance of a division, and starts a payout of that amount.
func claim(ctx context.Context, db *sql.DB, payouts *saga.Handle[Payout]) error {
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
		if n, err := res.RowsAffected(); err != nil || n == 0 { // another process has changed the balance: count a retry
			_, conflict := tx.ExecContext(ctx, `UPDATE division SET retries = retries + 1 WHERE id = $1`, p.Division)
			return errors.Join(err, conflict)
		}
		return payouts.StartTx(ctx, tx, p.ID, p)
	})
}

// work starts payouts and runs their sagas until ctx is done. It also runs the sagas of processes that were killed.
func work(ctx context.Context, db *sql.DB, store *sqlstore.Store) {
	runner := saga.NewRunner(store, saga.RunnerConfig{
		LeaseTTL: time.Second, Poll: 50 * time.Millisecond,
		MaxTakeovers: saga.Unlimited, // processes are killed on purpose, so a takeover does not mean that a saga is broken
	})
	payouts := saga.Register(runner, payout(&bank{db}))
	go func() {
		for ctx.Err() == nil {
			if err := claim(ctx, db, payouts); err != nil { // no balance is left, or the database is busy
				time.Sleep(10 * time.Millisecond)
			}
		}
	}()
	check(runner.Run(ctx))
}

// give lets the processes pay all balances. From time to time it kills a random process and starts it again.
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
			log.Fatalf("\ndivision %d has paid %d cents, not %d", i, cents, prize)
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
