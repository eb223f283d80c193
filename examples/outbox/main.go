// Outbox is a program that publishes a message to a broker for each order that a transaction has committed. The broker
// is down for the first three seconds, and rejects one message because it is too large. That message becomes a dead
// letter. All other messages are published.
//
//	go run ./examples/outbox
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/lease/sqllease"
)

// A broker is a fake message broker. It represents NATS, Kafka or RabbitMQ.
type broker struct {
	down      atomic.Bool
	published atomic.Int64
}

var errTooLarge = errors.New("message is too large")

func (b *broker) publish(_ context.Context, m message) error {
	switch {
	case b.down.Load():
		return errors.New("connection refused")
	case len(m.body) > 100:
		return resilience.Answer(errTooLarge) // the broker works, and a retry cannot help
	}
	b.published.Add(1)
	return nil
}

// guarded returns a publish function with a breaker and a timeout.
func guarded(publish func(context.Context, message) error) func(context.Context, message) error {
	circuit := breaker.New(breaker.Config{Name: "broker", ConsecutiveFailures: 3, OpenFor: time.Second})
	policies := resilience.Chain(circuit.Wrap, resilience.Timeout(5*time.Second))
	return func(ctx context.Context, m message) error {
		return policies(func(ctx context.Context) error { return publish(ctx, m) })(ctx)
	}
}

// place stores an order and its message in one transaction: either both are committed or neither is.
func place(ctx context.Context, db *sql.DB, customer, order string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	_, err = tx.ExecContext(ctx, `INSERT INTO orders (customer, text) VALUES ($1, $2)`, customer, order)
	if err == nil {
		_, err = tx.ExecContext(ctx, `INSERT INTO outbox (topic, body) VALUES ($1, $2)`, customer, order)
	}
	if err != nil {
		return err
	}
	return tx.Commit()
}

func open(file string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		return nil, err
	}
	_, err = db.Exec(schema + `CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, customer TEXT, text TEXT)`)
	return db, err
}

func main() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	dir, err := os.MkdirTemp("", "outbox")
	check(err)
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := open(filepath.Join(dir, "db"))
	check(err)
	store := sqllease.New(db, sqllease.SQLite, sqllease.Config{})
	check(store.Migrate(ctx))

	const orders = 20
	for i := range orders {
		order := fmt.Sprintf("order %d", i)
		if i == 3 {
			order = fmt.Sprintf("order %0200d", i)
		}
		check(place(ctx, db, fmt.Sprintf("customer %d", i%5), order))
	}
	b := &broker{}
	b.down.Store(true)
	time.AfterFunc(3*time.Second, func() { b.down.Store(false) })
	go (&relay{db: db, publish: guarded(b.publish), poll: time.Second}).run(ctx, store)

	for waiting := orders; waiting > 0; time.Sleep(time.Second) {
		var dead int
		check(db.QueryRow(`SELECT (SELECT count(*) FROM outbox), (SELECT count(*) FROM outbox_dead)`).Scan(&waiting, &dead))
		fmt.Printf("%2d published, %2d waiting, %d dead\n", b.published.Load(), waiting, dead)
	}
	var id, attempts int
	var reason string
	check(db.QueryRow(`SELECT id, attempts, error FROM outbox_dead`).Scan(&id, &attempts, &reason))
	fmt.Printf("dead letter %d after %d attempt(s): %s\n", id, attempts, reason)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
