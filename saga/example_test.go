package saga_test

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/go-resilience/resilience/saga"
)

type Trip struct {
	Flight, Hotel string
}

// The hotel is full, and the flight is canceled.
func ExampleRun() {
	full := errors.New("hotel full")
	trip := &saga.Saga[Trip]{
		Name: "trip",
		Steps: []saga.Step[Trip]{
			{
				Name: "flight",
				Do: func(_ context.Context, t *Trip) error {
					t.Flight = "TP1363"
					fmt.Println("booked", t.Flight)
					return nil
				},
				Undo: func(_ context.Context, t *Trip) error { fmt.Println("canceled", t.Flight); return nil },
			},
			{
				Name: "hotel",
				Do:   func(context.Context, *Trip) error { return saga.Declined(full) },
				Undo: func(context.Context, *Trip) error { return nil },
			},
		},
	}
	err := saga.Run(context.Background(), trip, &Trip{})
	fmt.Println(err)
	fmt.Println(errors.Is(err, full), errors.Is(err, saga.ErrCompensated))
	// Output:
	// booked TP1363
	// canceled TP1363
	// saga: trip: compensated: step hotel: hotel full
	// true true
}

// The same definition under a Runner. With a Store of package sqlstore it
// survives the process.
func ExampleRunner() {
	nothing := func(context.Context, *Trip) error { return nil }
	trip := &saga.Saga[Trip]{
		Name: "trip", Version: 1,
		Steps: []saga.Step[Trip]{
			{
				Name: "flight",
				Do: func(ctx context.Context, t *Trip) error {
					t.Flight = "TP1363"
					fmt.Println(saga.CommandFrom(ctx).ID) // for the participant to apply once
					return nil
				},
				Undo: nothing,
			},
			{Name: "hotel", Do: func(_ context.Context, t *Trip) error { t.Hotel = "Ibis"; return nil }, Undo: nothing},
		},
	}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	runner.Observe(func(_ context.Context, e saga.Event) {
		if e.Kind == saga.EventStuck {
			fmt.Println("page somebody:", e.ID, e.Step, e.Err)
		}
	})
	trips := saga.Register(runner, trip)

	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = runner.Run(ctx) })

	if _, err := trips.Start(ctx, "trip-17", Trip{}); err != nil {
		fmt.Println(err)
	}
	result, err := trips.Result(ctx, "trip-17")
	fmt.Println(result, err)

	cancel()
	running.Wait()
	// Output:
	// trip-17/flight/do
	// {TP1363 Ibis} <nil>
}
