// Travel is a program that books two trips as sagas, which are stored in a SQLite file. Each trip has three flights and
// a hotel. The card of one traveler, bob, is declined, so the bookings of his trip are undone. Each company has its own
// rules for refunds.
//
//	go run ./examples/travel
//	go run ./examples/travel -crash return/do   # the process dies during a trip ...
//	go run ./examples/travel                    # ... and the next process finishes it
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	_ "modernc.org/sqlite"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sqlstore"
)

var (
	file  = flag.String("db", "travel.db", "the SQLite file; it is removed after both trips")
	crash = flag.String("crash", "", "kill the process when this command has taken effect, before the saga records it:\n"+
		"outward, onward, return or hotel, then /do or /undo, or charge/do or ticket/do")
)

// A Trip is the state of a saga, which its steps share.
type Trip struct {
	Card  int // the limit of the card
	Price int
}

// A world has the participants of the sagas: airlines, a hotel and a bank. In this example, they store their bookings
// in the same file as the sagas. They recognize a repeated command by its ID.
type world struct{ db *sql.DB }

// book adds a booking for the current command, unless the command has been applied already. If -crash names the
// command, the process then dies.
func (w world) book(ctx context.Context, what string, cents int) error {
	return w.apply(ctx, what, cents, nil)
}

// charge charges the price, unless the price exceeds the card's limit. In that case, the bank records that it has
// declined the command. Another attempt of the command may still be in flight. Because of the record, the other attempt
// does not charge the card.
func (w world) charge(ctx context.Context, t *Trip) error {
	var declined error
	if t.Price > t.Card {
		declined = saga.Declined(errors.New("card declined"))
	}
	return w.apply(ctx, "charge", -t.Price, declined)
}

func (w world) apply(ctx context.Context, what string, cents int, declined error) error {
	id := saga.CommandFrom(ctx).ID
	err := saga.Apply(ctx, w.db, func(tx *sql.Tx) error {
		if declined != nil {
			return declined
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO booking VALUES ($1, $2, $3)`, id, what, cents)
		return err
	})
	if self, _ := os.FindProcess(os.Getpid()); err == nil && *crash != "" && strings.HasSuffix(id, "/"+*crash) {
		_ = self.Kill()
		select {}
	}
	return err
}

// reserve returns a step that books a service at a price. If the step is undone, refundPercent of the price is
// refunded.
func (w world) reserve(name string, cents, refundPercent int) saga.Step[Trip] {
	return saga.Step[Trip]{
		Name: name,
		Do: func(ctx context.Context, t *Trip) error {
			err := w.book(ctx, name, cents)
			if err == nil {
				t.Price += cents
			}
			return err
		},
		Undo: func(ctx context.Context, t *Trip) error {
			return w.book(ctx, "refund for "+name, -cents*refundPercent/100)
		},
	}
}

func (w world) trip() *saga.Saga[Trip] {
	return &saga.Saga[Trip]{Name: "trip", Version: 1, Steps: []saga.Step[Trip]{
		w.reserve("outward", 12000, 100),
		w.reserve("onward", 8000, 75),
		w.reserve("return", 5000, 0),
		w.reserve("hotel", 9000, 100),
		{Name: "charge", Do: w.charge, Pivot: true},
		{Name: "ticket", Do: func(ctx context.Context, _ *Trip) error { return w.book(ctx, "ticket", 0) }},
	}}
}

func main() {
	flag.Parse()
	log.SetFlags(0)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	db, err := sql.Open("sqlite", "file:"+*file+
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
	check(err)
	store := sqlstore.New(db, sqlstore.SQLite, sqlstore.Config{})
	check(store.Migrate(ctx))
	_, err = db.Exec(`CREATE TABLE IF NOT EXISTS booking (id text PRIMARY KEY, what text, cents integer)`)
	check(err)

	runner := saga.NewRunner(store, saga.RunnerConfig{
		LeaseTTL: time.Second, Poll: 100 * time.Millisecond, // short, to show a takeover soon
	})
	runner.Observe(func(_ context.Context, e saga.Event) {
		fmt.Printf("  %-6s %-12s %-8s", e.ID, e.Kind, e.Step)
		if e.Err != nil {
			fmt.Print(" ", e.Err)
		}
		fmt.Println()
	})
	trip := world{db}.trip()
	trips := saga.Register(runner, trip)
	go func() { check(runner.Run(ctx)) }()
	for id, card := range map[string]int{"ada": 100000, "bob": 10000} {
		_, err := trips.Start(ctx, id, Trip{Card: card})
		check(err)
		if _, err = trips.Result(ctx, id); err != nil && !errors.Is(err, saga.ErrCompensated) {
			log.Fatal(err)
		}
		var cents int
		check(db.QueryRow(`SELECT sum(cents) FROM booking WHERE id LIKE $1`, id+"/%").Scan(&cents))
		fmt.Printf("%s: error %v; not paid yet: %d.%02d\n", id, err, cents/100, cents%100)
	}
	check(errors.Join(db.Close(), os.Remove(*file)))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
