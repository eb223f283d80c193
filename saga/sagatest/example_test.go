package sagatest_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagatest"
)

// A printer prints the failures of a test.
type printer struct{ testing.TB }

func (printer) Helper()                      {}
func (printer) Context() context.Context     { return context.Background() }
func (printer) Errorf(text string, a ...any) { fmt.Printf(text+"\n", a...) }
func (printer) Fatalf(text string, a ...any) { fmt.Printf(text+"\n", a...) }

// Check calls the steps of a definition with the failures that are rare in production. Tests pass t in place of the
// printer, and a function that compares the participants with what must be in effect.
func ExampleCheck() {
	type Trip struct{ Room string }
	rooms := map[string]bool{} // the hotel's bookings, by the id of their Do; false if the Undo came first
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{{
		Name: "hotel",
		Do: func(ctx context.Context, t *Trip) error {
			id := saga.CommandFrom(ctx).DoID()
			if booked, known := rooms[id]; known && !booked {
				return saga.Declined(fmt.Errorf("%s was undone", id))
			}
			rooms[id], t.Room = true, "12"
			return nil
		},
		Undo: func(ctx context.Context, _ *Trip) error {
			rooms[saga.CommandFrom(ctx).DoID()] = false
			return nil
		},
	}}}
	cases := 0
	sagatest.Check(printer{}, trip, func() *Trip { return &Trip{} }, func(testing.TB, sagatest.Case[Trip]) { cases++ })
	fmt.Println(cases, "cases")
	// Output: 5 cases
}
