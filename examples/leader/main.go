// Leader runs three processes on one SQLite file. One of them leads and ticks. The program
// kills it, again and again, and then asks the last one to stop: another leads each time,
// after the TTL or immediately. The ticks of two leaders never mix, as each is written in a
// transaction that is fenced.
//
//	go run ./examples/leader -kills 10
package main

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
)

var (
	kills  = flag.Int("kills", 3, "how many leaders to kill")
	ttl    = flag.Duration("ttl", time.Second, "how long the lease lasts without a renewal")
	worker = flag.String("worker", "", "not for you: the name of a process")
	file   = flag.String("file", "", "not for you: the database")
)

// open opens the database, and the store in it.
func open(ctx context.Context, path string) (*sql.DB, *sqllease.Store) {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(300)&_pragma=journal_mode(WAL)&_txlock=immediate")
	check(err)
	store := sqllease.New(db, sqllease.SQLite)
	check(store.Migrate(ctx))
	return db, store
}

// work is the life of a process: it ticks whenever it leads.
func work(ctx context.Context) {
	db, store := open(ctx, *file)
	cfg := lease.Config{
		Name: "ticker", Holder: *worker, TTL: *ttl,
		Poll: *ttl / 20, OnStoreError: func(context.Context, error) {}, // a read of a local file costs little
	}
	_ = lease.Run(ctx, store, cfg, func(ctx context.Context, term lease.Term) error {
		fmt.Printf("%s leads\n", *worker)
		for ; ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
			_ = tick(ctx, db, term) // or later: the database is busy, or the term is over
		}
		fmt.Printf("%s stops: %v\n", *worker, context.Cause(ctx))
		return nil
	})
}

// tick writes one row, unless this process does not lead any more.
func tick(ctx context.Context, db *sql.DB, term lease.Term) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := term.Fence(ctx, tx); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO tick (epoch) VALUES (?)", term.Epoch()); err != nil {
		return err
	}
	return tx.Commit()
}

// A process is this program, started again.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer // its end asks the process to stop
}

func start(name, path string) process {
	cmd := exec.Command(os.Args[0], "-worker", name, "-file", path, "-ttl", ttl.String())
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	stdin, err := cmd.StdinPipe()
	check(err)
	check(cmd.Start())
	return process{cmd, stdin}
}

func main() {
	flag.Parse()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if *worker != "" {
		go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
		work(ctx)
		return
	}
	dir, err := os.MkdirTemp("", "leader")
	check(err)
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "db")
	db, store := open(ctx, path)
	_, err = db.Exec("CREATE TABLE tick (id integer PRIMARY KEY AUTOINCREMENT, epoch integer)")
	check(err)
	all := make(map[string]process)
	for _, name := range []string{"Ada", "Bob", "Cleo"} {
		all[name] = start(name, path)
	}
	var ended time.Time // the last leader
	for state, err := range lease.Watch(ctx, store, "ticker") {
		if err != nil || state.Holder == "" {
			continue // the database is busy, or nobody leads
		}
		if !ended.IsZero() {
			fmt.Printf("nobody has led for %v\n", state.Since.Sub(ended).Round(time.Millisecond))
		}
		if *kills < 0 {
			break
		}
		time.Sleep(*ttl)
		leader := all[state.Holder]
		if ended = time.Now(); *kills > 0 {
			fmt.Printf("kill %s, and start it again\n", state.Holder)
			check(leader.cmd.Process.Kill())
			_ = leader.cmd.Wait()
			all[state.Holder] = start(state.Holder, path)
		} else {
			fmt.Printf("ask %s to stop\n", state.Holder)
			check(leader.stdin.Close())
		}
		*kills--
	}
	for _, p := range all {
		_ = p.stdin.Close() // one has been asked already
		check(p.cmd.Wait())
	}
	var ticks, terms, mixed int
	check(db.QueryRow(`SELECT count(*), count(DISTINCT epoch), count(CASE WHEN epoch < latest THEN 1 END)
		FROM (SELECT epoch, max(epoch) OVER (ORDER BY id) AS latest FROM tick)`).Scan(&ticks, &terms, &mixed))
	fmt.Printf("%d ticks of %d leaders, %d out of order\n", ticks, terms, mixed)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
