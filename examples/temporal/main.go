// Temporal is a program that books two trips as sagas on Temporal. With -address, it uses a Temporal server. Otherwise
// it runs in the test environment of Temporal's SDK, where a pause of hours takes no time:
//
//	go run ./examples/temporal
//	go run ./examples/temporal -address 127.0.0.1:7233
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"time"

	"go.temporal.io/sdk/client"
	sdklog "go.temporal.io/sdk/log"
	"go.temporal.io/sdk/worker"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/sagatemporal"
)

const taskQueue = "trips"

type Trip struct {
	Card         string
	Flight, Room string
}

// trip is the definition of the saga. The same definition could also run on a saga.Runner.
var trip = &saga.Saga[Trip]{
	Name: "trip",
	Steps: []saga.Step[Trip]{
		{Name: "flight", Do: bookFlight, Undo: cancelFlight},
		{Name: "room", Do: bookRoom, Undo: cancelRoom, Backoff: func(int) time.Duration { return 3 * time.Hour }},
		{Name: "charge", Do: charge, Pivot: true},
	},
}

func bookFlight(ctx context.Context, t *Trip) error {
	t.Flight = "LH 1"
	fmt.Println("book the flight, command", saga.CommandFrom(ctx).ID)
	return nil
}

func cancelFlight(_ context.Context, t *Trip) error {
	fmt.Println("cancel the flight", t.Flight)
	return nil
}

func bookRoom(ctx context.Context, t *Trip) error {
	if saga.CommandFrom(ctx).Attempt == 1 {
		fmt.Println("the hotel does not answer")
		return errors.New("no answer")
	}
	t.Room = "12"
	fmt.Println("book the room")
	return nil
}

func cancelRoom(_ context.Context, t *Trip) error {
	fmt.Println("cancel the room", t.Room)
	return nil
}

func charge(_ context.Context, t *Trip) error {
	if t.Card == "empty" {
		return saga.Declined(errors.New("card declined"))
	}
	fmt.Println("charge the card")
	return nil
}

func main() {
	address := flag.String("address", "", "host and port of a Temporal server; empty runs offline")
	namespace := flag.String("namespace", "default", "namespace of the server")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if *address == "" {
		for _, card := range []string{"full", "empty"} {
			offline := newOffline()
			book(ctx, saga.Register(sagatemporal.New(offline, offline.env, taskQueue), trip), "trip-of-"+card, card)
		}
		return
	}
	trip.Steps[1].Backoff = func(int) time.Duration { return time.Second }
	c, err := client.Dial(client.Options{
		HostPort: *address, Namespace: *namespace, Logger: sdklog.NewStructuredLogger(slog.Default()),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	w := worker.New(c, taskQueue, worker.Options{})
	trips := saga.Register(sagatemporal.New(c, w, taskQueue), trip)
	if err := w.Start(); err != nil {
		log.Fatal(err)
	}
	defer w.Stop()
	for _, card := range []string{"full", "empty"} {
		book(ctx, trips, fmt.Sprintf("trip-of-%s-%d", card, time.Now().Unix()), card)
	}
}

// book starts a saga, waits for its end, and prints the result.
func book(ctx context.Context, trips *saga.Handle[Trip], id, card string) {
	if _, err := trips.Start(ctx, id, Trip{Card: card}); err != nil {
		log.Fatal(err)
	}
	t, err := trips.Result(ctx, id)
	fmt.Printf("flight %s, room %s: %v\n\n", t.Flight, t.Room, err)
}
