// Travel books two trips of three flights and a hotel, each as one saga in a
// SQLite file. The first hotel is full and another is offered. The second
// traveler's card is refused, and everything is undone by each company's own
// rules for refunds.
//
//	go run ./examples/travel
//	go run ./examples/travel -crash return/do   # dies in the middle ...
//	go run ./examples/travel                    # ... and the next start finishes
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
	file  = flag.String("db", "travel.db", "the SQLite file; it is removed when all trips have ended")
	crash = flag.String("crash", "", "die when this command has taken effect and nobody knows it yet:\n"+
		"outward, onward, return or Hostel, then /do or /undo, or charge/do or ticket/do")
)

// A Trip is the state that the steps share.
type Trip struct {
	Card  int // what it is good for
	Price int
}

// A world is the other side: airlines, hotels and a bank. They keep their books in
// a database (here in the same file) and know each command by its id.
type world struct{ db *sql.DB }

// book applies a command once. If -crash names it, the process then dies.
func (w world) book(ctx context.Context, what string, cents int) error {
	return w.apply(ctx, what, cents, nil)
}

// charge takes the price, unless the card is not good for it. The bank then remembers that
// it has said no, and no attempt of the command that is still under way takes anything.
func (w world) charge(ctx context.Context, t *Trip) error {
	var declined error
	if t.Price > t.Card {
		declined = saga.Void(errors.New("card refused"))
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

// reserve is a step that costs something, of which a part is given back.
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
	hotel := w.reserve("Hostel", 9000, 100) // the Ritz has no vacancy
	return &saga.Saga[Trip]{Name: "trip", Version: 1, Steps: []saga.Step[Trip]{
		w.reserve("outward", 12000, 100), // one that refunds everything,
		w.reserve("onward", 8000, 75),    // one that keeps a quarter,
		w.reserve("return", 5000, 0),     // and a cheap one
		hotel,
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
		LeaseTTL: time.Second, Poll: 100 * time.Millisecond, // short, to see a takeover soon
		OnEvent: func(_ context.Context, e saga.Event) {
			fmt.Printf("  %-6s %-12s %-8s", e.ID, e.Kind, e.Step)
			if e.Err != nil {
				fmt.Print(" ", e.Err)
			}
			fmt.Println()
		},
	})
	trip := world{db}.trip()
	saga.Register(runner, trip)
	go func() { check(runner.Run(ctx)) }()
	for id, card := range map[string]int{"ada": 100000, "bob": 10000} {
		_, err := saga.Start(ctx, runner, trip, id, Trip{Card: card})
		check(err)
		if _, err = trip.Result(ctx, runner, id); err != nil && !errors.Is(err, saga.ErrCompensated) {
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
