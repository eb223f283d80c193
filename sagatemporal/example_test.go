package sagatemporal_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/sagatemporal"
)

// A trip is booked on Temporal, and its flight is canceled because the card is declined.
func ExampleNew() {
	type Trip struct{ Flight string }
	trip := &saga.Saga[Trip]{
		Name: "trip",
		Steps: []saga.Step[Trip]{
			{
				Name: "flight",
				Do: func(ctx context.Context, t *Trip) error {
					t.Flight = "LH 1"
					fmt.Println("book", t.Flight, "by command", saga.CommandFrom(ctx).ID)
					return nil
				},
				Undo: func(_ context.Context, t *Trip) error {
					fmt.Println("cancel", t.Flight)
					return nil
				},
			},
			{Name: "charge", Pivot: true, Do: func(context.Context, *Trip) error {
				return saga.Declined(errors.New("card declined"))
			}},
		},
	}
	ctx := context.Background()
	env := newEnvironment() // in a real program: client.Dial and worker.New
	trips := saga.Register(sagatemporal.New(env, env, "trips"), trip)
	if _, err := trips.Start(ctx, "trip-1", Trip{}); err != nil {
		fmt.Println(err)
	}
	_, err := trips.Result(ctx, "trip-1")
	fmt.Println(err)
	// Output:
	// book LH 1 by command trip-1/flight/do
	// cancel LH 1
	// saga: trip "trip-1": compensated: step charge: card declined
}
