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
	"io"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

const divisions, prize, processes = 100, 100_00, 4

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

func payout(db *sql.DB) *saga.Saga[Payout] {
	bank := func(ctx context.Context, statement string, args ...any) error { // applies each command once
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		err = saga.Barrier(ctx, tx, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, statement, args...)
			return err
		})
		if err != nil {
			return err
		}
		return tx.Commit()
	}
	return &saga.Saga[Payout]{Name: "payout", Steps: []saga.Step[Payout]{{
		Name: "hold", // was done by the transaction that started the saga
		Do:   func(context.Context, *Payout) error { return nil },
		UndoTx: func(ctx context.Context, tx *sql.Tx, p *Payout) error {
			_, err := tx.ExecContext(ctx, `UPDATE division SET balance = balance + $1, version = version + 1 WHERE id = $2`, p.Cents, p.Division)
			return err
		},
	}, {
		Name: "pay", Attempts: -1,
		Do: func(ctx context.Context, p *Payout) error {
			if strings.HasPrefix(p.ID, "payout-0") { // one in 16
				return saga.NoEffect(errors.New("account closed"))
			}
			return bank(ctx, `INSERT INTO payment VALUES ($1, $2, $3)`, p.ID, p.Division, p.Cents)
		},
		Undo: func(ctx context.Context, p *Payout) error {
			return bank(ctx, `DELETE FROM payment WHERE id = $1`, p.ID)
		},
	}}}
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
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	res, err := tx.ExecContext(ctx, `UPDATE division SET balance = balance - $1, version = version + 1
		WHERE id = $2 AND version = $3`, p.Cents, p.Division, version)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 { // another was faster: again
		_, conflict := tx.ExecContext(ctx, `UPDATE division SET retries = retries + 1 WHERE id = $1`, p.Division)
		return errors.Join(err, conflict, tx.Commit())
	}
	if err := saga.StartTx(ctx, tx, runner, payouts, p.ID, p); err != nil {
		return err
	}
	return tx.Commit()
}

// work is the life of a process: it claims, and runs payouts, its own and those
// that a killed one has left.
func work(db *sql.DB, store *sqlstore.Store) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }() // its parent has ended
	runner := saga.NewRunner(store, saga.RunnerConfig{
		Lease: time.Second, Poll: 50 * time.Millisecond,
		MaxTakeovers: -1, // no process lives long here: that says nothing against a saga
	})
	payouts := payout(db)
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
	source, schema := *dsn, fmt.Sprintf("giveaway_%d", os.Getpid())
	if source == "" {
		dir, err := os.MkdirTemp("", "giveaway")
		check(err)
		defer os.RemoveAll(dir)
		source = "file:" + dir + "/db?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"
	} else {
		source += map[bool]string{true: "&", false: "?"}[strings.Contains(source, "?")] + "search_path=" + schema
	}
	db, store := open(source)
	defer db.Close()
	if *dsn != "" {
		run(db, "CREATE SCHEMA "+schema)
		defer run(db, "DROP SCHEMA "+schema+" CASCADE")
	}
	check(store.Migrate(context.Background()))
	run(db, "CREATE TABLE division (id integer PRIMARY KEY, balance integer, version integer, retries integer)")
	run(db, "CREATE TABLE payment (id text PRIMARY KEY, division integer, cents integer)")
	for i := range divisions {
		run(db, "INSERT INTO division VALUES ($1, $2, 0, 0)", i, prize)
	}
	start := func(i int) *exec.Cmd {
		if !sharded {
			i = 0 // everybody's first choice is the same
		}
		cmd := exec.Command(os.Args[0], "-dsn", source, "-batch", fmt.Sprint(*batch), "-worker", fmt.Sprint(i))
		cmd.Stderr = os.Stderr
		_, err := cmd.StdinPipe()
		check(err)
		check(cmd.Start())
		return cmd
	}
	cmds := make([]*exec.Cmd, processes)
	for i := range cmds {
		cmds[i] = start(i)
	}
	kills := 0
	for left := 1; left > 0; kills++ {
		time.Sleep(rand.N(time.Second))
		i := rand.N(processes)
		check(cmds[i].Process.Kill())
		_ = cmds[i].Wait()
		cmds[i] = start(i)
		check(db.QueryRow(`SELECT (SELECT sum(balance) FROM division) +
			(SELECT count(*) FROM saga WHERE status NOT IN ('completed', 'compensated'))`).Scan(&left))
	}
	for i := range cmds {
		check(cmds[i].Process.Kill())
		_ = cmds[i].Wait()
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

func open(source string) (*sql.DB, *sqlstore.Store) {
	driver, dialect := "sqlite", sqlstore.SQLite
	if strings.HasPrefix(source, "postgres") {
		driver, dialect = "pgx", sqlstore.PostgreSQL
	}
	db, err := sql.Open(driver, source)
	check(err)
	db.SetMaxOpenConns(8)
	store, err := sqlstore.New(db, dialect)
	check(err)
	return db, store
}

func main() {
	flag.Parse()
	if *worker >= 0 {
		work(open(*dsn))
		return
	}
	give(false)
	if *shard {
		give(true)
	}
}

func run(db *sql.DB, statement string, args ...any) {
	_, err := db.Exec(statement, args...)
	check(err)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
