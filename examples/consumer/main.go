// Consumer is a program that reads orders from a queue of NATS JetStream or RabbitMQ. For each order, it sends a charge
// to a bank, and books the order exactly once. The bank is down for the first ten seconds. It declines one order, whose
// message then becomes a dead letter.
//
//	docker run -p 4222:4222 nats -js
//	go run ./examples/consumer -nats nats://127.0.0.1:4222
//	go run ./examples/consumer -rabbitmq amqp://guest:guest@127.0.0.1:5672
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/saga"
)

// A shop sends a charge to a bank for each order, and books the order in its database.
type shop struct {
	db      *sql.DB
	bank    resilience.Middleware
	circuit *breaker.Breaker
	away    atomic.Bool  // the bank is down
	asked   atomic.Int64 // number of requests to the bank
}

func newShop(dsn string, pace time.Duration) (*shop, error) {
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	_, err = db.Exec(saga.BarrierTable + `; CREATE TABLE IF NOT EXISTS book (id text)`)
	circuit := breaker.New(breaker.Config{Name: "bank", ConsecutiveFailures: 2, OpenFor: pace})
	slots := bulkhead.New(bulkhead.Config{Name: "bank", Limit: 4})
	return &shop{db: db, circuit: circuit, bank: resilience.Chain(circuit.Wrap, slots.Wrap)}, err
}

var errNoMoney = errors.New("insufficient funds")

// handle applies an order only once, even if its message is delivered several times. A real bank would receive the ID
// of the message as the idempotency key. saga.Apply records the ID in the transaction that books the order, and so does
// not book the order again.
func (s *shop) handle(ctx context.Context, m message) error {
	err := s.bank(func(context.Context) error {
		s.asked.Add(1)
		switch {
		case s.away.Load():
			return errors.New("the bank is down")
		case m.Body() == "poor":
			return resilience.Answer(errNoMoney)
		}
		return nil
	})(ctx)
	if err != nil {
		return err
	}
	ctx = saga.WithCommand(ctx, saga.Command{ID: m.ID() + "/order/order/do"})
	return saga.Apply(ctx, s.db, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO book VALUES ($1)`, m.ID())
		return err
	})
}

// booked returns the number of different orders in the book, and the number of entries. They are equal if each order
// was booked once.
func (s *shop) booked() (orders, entries int, err error) {
	err = s.db.QueryRow(`SELECT count(DISTINCT id), count(*) FROM book`).Scan(&orders, &entries)
	return orders, entries, err
}

// A publisher is a queue that can also publish messages.
type publisher interface {
	queue
	Publish(ctx context.Context, to string, id, body, why string) error
}

func publish(ctx context.Context, open func(context.Context) (queue, error), name string, orders int) error {
	q, err := open(ctx)
	if err != nil {
		return err
	}
	defer q.Close()
	for i := range orders {
		body := "rich"
		if i == orders/2 {
			body = "poor"
		}
		if err := q.(publisher).Publish(ctx, name, fmt.Sprintf("%s-%d", name, i), body, ""); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	nats := flag.String("nats", "", "the URL of a NATS server with JetStream")
	rabbit := flag.String("rabbitmq", "", "the URL of a RabbitMQ")
	flag.Parse()
	name := fmt.Sprintf("orders-%d", time.Now().Unix())
	open := openNATS(*nats, name, 30*time.Second)
	if *rabbit != "" {
		open = openRabbit(name, func() (*amqp.Connection, error) { return amqp.Dial(*rabbit) })
	} else if *nats == "" {
		log.Fatal("set -nats or -rabbitmq")
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s, err := newShop("file::memory:", time.Second)
	check(err)
	check(publish(ctx, open, name, 20))
	s.away.Store(true)
	time.AfterFunc(10*time.Second, func() { s.away.Store(false) })
	go consume(ctx, open, time.Second, s.handle)
	for orders := 0; orders < 19; time.Sleep(time.Second) {
		orders, _, err = s.booked()
		check(err)
		fmt.Printf("%2d of 19 orders are booked; %d requests to the bank; the breaker is %s\n",
			orders, s.asked.Load(), s.circuit.State())
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
