// Orders sells to five customers, each order a saga: goods are reserved, the bank says by
// a webhook that the customer has paid, and after a delay each parcel travels as a saga
// of its own. One never pays, one cancels on the way, one parcel cannot be delivered, and
// one payment comes too late.
//
//	go run ./examples/orders
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/saga"
)

type Order struct { // the state of the one saga
	ID             string
	Cents, Parcels int
}
type Parcel struct{ Order, Label string } // and of the other

// A shop has the books of everybody: the warehouse, the carrier and the bank.
type shop struct {
	db     *sql.DB
	runner *saga.Runner
}

const entry = `INSERT INTO book VALUES ($1, $2, $3)` // an account, an order, an amount

// book makes an entry once for each command.
func (s *shop) book(ctx context.Context, account, order string, amount int) error {
	return saga.Apply(ctx, s.db, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, entry, account, order, amount)
		return err
	})
}

func (s *shop) order() *saga.Saga[Order] {
	return &saga.Saga[Order]{Name: "order", Version: 1, Steps: []saga.Step[Order]{{
		Name: "reserve",
		Do:   func(ctx context.Context, o *Order) error { return s.book(ctx, "goods", o.ID, -o.Parcels) },
		Undo: func(ctx context.Context, o *Order) error { return s.book(ctx, "goods", o.ID, o.Parcels) },
	}, {
		Name: "invoice",
		Do:   func(ctx context.Context, o *Order) error { return s.book(ctx, "bank", o.ID, 0) },
		Undo: func(ctx context.Context, o *Order) error {
			if _, paid := saga.SignalFrom(ctx, "paid"); paid {
				return s.book(ctx, "bank", o.ID, -o.Cents)
			}
			return nil
		},
	}, {
		Name: "payment", Await: "paid", AwaitFor: 3 * time.Second,
	}, {
		Name: "parcels", Delay: 100 * time.Millisecond,
		Saga: saga.ChildrenOf(s.parcel(), func(o *Order) (parcels []Parcel, err error) {
			for i := range o.Parcels {
				parcels = append(parcels, Parcel{o.ID, fmt.Sprintf("%s %d of %d", o.ID, i+1, o.Parcels)})
			}
			return parcels, nil
		}, nil),
	}}}
}

func (s *shop) parcel() *saga.Saga[Parcel] {
	return &saga.Saga[Parcel]{Name: "parcel", Version: 1, Steps: []saga.Step[Parcel]{{
		Name: "hand over",
		Do:   func(ctx context.Context, p *Parcel) error { return s.book(ctx, "carrier", p.Order, 1) },
		Undo: func(ctx context.Context, p *Parcel) error { return s.book(ctx, "carrier", p.Order, -1) },
	}, {
		Name: "deliver", ReadOnly: true,
		Do: func(ctx context.Context, p *Parcel) error {
			if p.Label == "eve 1 of 1" {
				<-ctx.Done() // it is a long way
			} else if p.Label == "kim 2 of 2" {
				return saga.NoEffect(errors.New("no such street"))
			}
			return ctx.Err()
		},
	}}}
}

// ServeHTTP is the webhook by which the bank says that an order was paid.
func (s *shop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := s.runner.Signal(r.Context(), r.FormValue("order"), "paid", nil); err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
	}
}

// pay is the bank, which tells the shop twice. What the shop does not take, it gives back.
func (s *shop) pay(o Order) {
	must(s.db.Exec(entry, "bank", o.ID, o.Cents))
	for range 2 {
		w := httptest.NewRecorder()
		if s.ServeHTTP(w, httptest.NewRequest("POST", "/paid?order="+o.ID, nil)); w.Code == http.StatusConflict {
			must(s.db.Exec(entry, "bank", o.ID, -o.Cents))
			break
		}
	}
}

func main() {
	db := must(sql.Open("sqlite", "file::memory:"))
	db.SetMaxOpenConns(1)
	must(db.Exec(saga.BarrierTable + `; CREATE TABLE book (account text, id text, amount integer)`))
	ctx := context.Background()
	s := &shop{db: db, runner: saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Poll: 50 * time.Millisecond})}
	order := s.order()
	saga.Register(s.runner, order)
	go func() { must(0, s.runner.Run(ctx)) }()
	for _, o := range []Order{{"ada", 1500, 3}, {"bob", 500, 1}, {"eve", 500, 1}, {"kim", 1000, 2}, {"dan", 500, 1}} {
		in := must(saga.Start(ctx, s.runner, order, o.ID, o))
		switch o.ID {
		case "ada", "kim":
			s.pay(o)
		case "eve":
			for s.pay(o); in.Status == saga.Running && in.Steps[3].Children == 0; time.Sleep(10 * time.Millisecond) {
				in = must(s.runner.Get(ctx, "eve")) // until her parcel is on its way
			}
			fallthrough
		case "dan":
			_ = s.runner.Cancel(ctx, o.ID, "found it cheaper")
		}
		_, err := order.Result(ctx, s.runner, o.ID)
		if o.ID == "dan" {
			s.pay(o) // too late
		}
		fmt.Printf("%s: %v\n", o.ID, err)
		for account, want := range map[string]int{"bank": o.Cents, "goods": -o.Parcels, "carrier": o.Parcels} {
			var sum int
			must(0, db.QueryRow(`SELECT coalesce(sum(amount), 0) FROM book WHERE account = $1 AND id = $2`, account, o.ID).Scan(&sum))
			fmt.Printf("    %s %d of %d\n", account, sum, map[bool]int{true: want}[err == nil])
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}
