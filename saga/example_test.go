package saga_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/saga"
)

type Trip struct {
	Flight, Hotel string
}

// do returns a function that prints what it does, as the Do or Undo of a step.
func do(what string) func(context.Context, *Trip) error {
	return func(context.Context, *Trip) error {
		fmt.Println(what)
		return nil
	}
}

// fail returns a Do that fails with err.
func fail(err error) func(context.Context, *Trip) error {
	return func(context.Context, *Trip) error { return err }
}

// run runs the runner until stop is called. A real program calls runner.Run(ctx) in each process.
func run(runner *saga.Runner) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = runner.Run(ctx) })
	return func() { cancel(); running.Wait() }
}

var flight = saga.Step[Trip]{Name: "flight", Do: do("book flight"), Undo: do("cancel flight")}

// A runner books a trip. With a Store of package sqlstore, the saga survives the process.
func Example() {
	trip := &saga.Saga[Trip]{Name: "trip", Version: 1, Steps: []saga.Step[Trip]{
		{Name: "flight", Do: func(ctx context.Context, t *Trip) error {
			t.Flight = "TP1363"
			fmt.Println(saga.CommandFrom(ctx).ID) // the participant applies it once
			return nil
		}, Undo: do("cancel flight")},
		{Name: "hotel", Do: func(_ context.Context, t *Trip) error {
			t.Hotel = "Ibis"
			return nil
		}, Undo: do("cancel hotel")},
	}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "travel"})
	trips := saga.Register(runner, trip)
	defer run(runner)()

	ctx := context.Background()
	if _, err := trips.Start(ctx, "trip-17", Trip{}); err != nil {
		fmt.Println(err) // start it again with the same id
	}
	done, err := trips.Result(ctx, "trip-17")
	fmt.Println(done, err)
	// Output:
	// trip-17/flight/do
	// {TP1363 Ibis} <nil>
}

// The hotel is full, so the flight is canceled.
func ExampleRun() {
	full := errors.New("hotel full")
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		flight,
		{Name: "hotel", Do: fail(saga.Declined(full)), Undo: do("cancel hotel")},
	}}
	err := saga.Run(context.Background(), trip, &Trip{})
	fmt.Println(err)
	fmt.Println(errors.Is(err, full), errors.Is(err, saga.ErrCompensated))
	// Output:
	// book flight
	// cancel flight
	// saga: trip: compensated: step hotel: hotel full
	// true true
}

// A step that was declined is neither retried nor undone.
func ExampleDeclined() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		{Name: "hotel", Do: fail(saga.Declined(errors.New("full"))), Undo: do("cancel hotel")},
	}}
	fmt.Println(saga.Run(context.Background(), trip, &Trip{}))
	// Output: saga: trip: compensated: step hotel: full
}

// A step with a permanent error is not retried, but undone, because it may have taken effect.
func ExamplePermanent() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		{Name: "hotel", Do: fail(saga.Permanent(errors.New("wrong date"))), Undo: do("cancel hotel")},
	}}
	fmt.Println(saga.Run(context.Background(), trip, &Trip{}))
	// Output:
	// cancel hotel
	// saga: trip: compensated: step hotel: wrong date
}

// The second call of a Do was refused, and the first one may have taken effect. Without MaybeApplied, the refusal would
// mean that the step made no call.
func ExampleMaybeApplied() {
	book := func(context.Context, *Trip) error {
		fmt.Println("reserve hotel")
		return saga.MaybeApplied(&breaker.OpenError{Name: "bank", State: breaker.Open}) // of the call that pays the deposit
	}
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		{Name: "hotel", Attempts: 1, Do: book, Undo: do("cancel hotel")},
	}}
	fmt.Println(saga.Run(context.Background(), trip, &Trip{}))
	// Output:
	// reserve hotel
	// cancel hotel
	// saga: trip: compensated: step hotel: breaker: bank: circuit open
}

func ExampleIsDeclined() {
	full := errors.New("full")
	fmt.Println(saga.IsDeclined(saga.Declined(full)), saga.IsDeclined(saga.Permanent(full)))
	// Output: true false
}

// The error names the step at which the saga turned back, and the steps that could not be undone.
func ExampleError() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		{Name: "flight", Do: do("book flight"), Undo: fail(saga.Permanent(errors.New("no refund")))},
		{Name: "hotel", Do: fail(saga.Declined(errors.New("full"))), Undo: do("cancel hotel")},
	}}
	err := saga.Run(context.Background(), trip, &Trip{})
	if failure, ok := errors.AsType[*saga.Error](err); ok {
		fmt.Println(failure.Status, failure.Step, failure.Failed)
	}
	fmt.Println(errors.Is(err, saga.ErrStuck))
	// Output:
	// book flight
	// stuck hotel [{flight undo no refund}]
	// true
}

// A policy refuses the first attempt, which does not count: no call was made.
func ExampleStep_middleware() {
	refusals := 1
	middleware := func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error {
			if refusals--; refusals >= 0 {
				return &breaker.OpenError{Name: "airline", State: breaker.Open}
			}
			return next(ctx)
		}
	}
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{{
		Name: "flight", Do: do("book flight"), Undo: do("cancel flight"), Attempts: 1, Middleware: middleware,
	}}}
	fmt.Println(saga.Run(context.Background(), trip, &Trip{}))
	// Output:
	// book flight
	// <nil>
}

// The steps flight and hotel run at the same time, and the charge follows both.
func ExampleStep_parallel() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		{Name: "flight", ReadOnly: true, Do: func(_ context.Context, t *Trip) error { t.Flight = "TP1363"; return nil }},
		{Name: "hotel", ReadOnly: true, Parallel: true, Do: func(_ context.Context, t *Trip) error {
			t.Hotel = "Ibis"
			return nil
		}},
		{Name: "charge", Do: do("charge"), Pivot: true},
	}}
	var t Trip
	fmt.Println(saga.Run(context.Background(), trip, &t), t)
	// Output:
	// charge
	// <nil> {TP1363 Ibis}
}

// A pivot without Undo may have taken effect. An operator finds out that it has not, and turns the saga back.
func ExampleRunner_Operate() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		flight,
		{Name: "charge", Do: fail(saga.Permanent(errors.New("bank does not know"))), Pivot: true},
	}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	runner.Observe(func(_ context.Context, e saga.Event) {
		if e.Kind == saga.EventStuck {
			fmt.Println(e.ID, "is stuck at", e.Step)
		}
	})
	trips := saga.Register(runner, trip)
	defer run(runner)()

	ctx := context.Background()
	_, _ = trips.Start(ctx, "trip-17", Trip{})
	_, err := trips.Result(ctx, "trip-17")
	fmt.Println(errors.Is(err, saga.ErrStuck))

	in, _ := runner.Get(ctx, "trip-17")
	if err := runner.Operate(ctx, in.ID, saga.Operation{
		Action: saga.ActionCompensate, Note: "not charged", Seq: in.Seq,
	}); err != nil {
		fmt.Println(err)
	}
	for errors.Is(err, saga.ErrStuck) { // until the runner has claimed the saga again
		_, err = trips.Result(ctx, "trip-17")
	}
	fmt.Println(errors.Is(err, saga.ErrCompensated))
	// Output:
	// book flight
	// trip-17 is stuck at charge
	// true
	// cancel flight
	// true
}

// An operator ends a saga as it is.
func ExampleRunner_Operate_abandon() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{{Name: "approved", Await: "approval"}}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, trip)
	ctx := context.Background()
	_, _ = trips.Start(ctx, "trip-17", Trip{})
	_ = runner.Operate(ctx, "trip-17", saga.Operation{Action: saga.ActionAbandon, Note: "a test"})
	_, err := trips.Result(ctx, "trip-17")
	fmt.Println(errors.Is(err, saga.ErrAbandoned), err)
	fmt.Println(runner.Operate(ctx, "trip-17", saga.Operation{Action: saga.ActionRetry}))
	// Output:
	// true saga: trip "trip-17": abandoned: a test
	// saga: not allowed: retry of "trip-17": it is abandoned
}

// The latest sagas of a definition, in pages.
func ExampleRunner_List() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{flight}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, trip)
	ctx := context.Background()
	for _, id := range []string{"a", "b", "c"} {
		_, _ = trips.Start(ctx, id, Trip{}) // the runner does not run yet
	}
	filter := saga.Filter{Saga: "trip", Status: []saga.Status{saga.Running}, Limit: 2}
	page, next, _ := runner.List(ctx, filter)
	fmt.Println(len(page))
	filter.After = next
	page, next, _ = runner.List(ctx, filter)
	fmt.Println(len(page), next == "")
	// Output:
	// 2
	// 1 true
}

// The log of a saga that has completed.
func ExampleRunner_History() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{flight}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, trip)
	defer run(runner)()
	ctx := context.Background()
	_, _ = trips.Start(ctx, "trip-17", Trip{})
	_, _ = trips.Result(ctx, "trip-17")
	log, err := runner.History(ctx, "trip-17", 0, 0)
	for _, entry := range log {
		fmt.Printf("%d %s %q\n", entry.Seq, entry.Kind, entry.Step)
	}
	fmt.Println(err)
	// Output:
	// book flight
	// 1 created ""
	// 2 step_done "flight"
	// 3 completed ""
	// <nil>
}

// An observer is called with each event, in the order of the saga's log.
func ExampleRunner_Observe() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{{Name: "charge", Do: fail(nil), Pivot: true}}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	stop := runner.Observe(func(_ context.Context, e saga.Event) { fmt.Printf("%s %q %q\n", e.Kind, e.Step, e.Outcome) })
	trips := saga.Register(runner, trip)
	end := run(runner)
	_, _ = trips.Start(context.Background(), "trip-17", Trip{})
	_, _ = trips.Result(context.Background(), "trip-17")
	end()
	stop()
	// Output:
	// created "" ""
	// attempted "charge" "done"
	// step_done "charge" ""
	// completed "" ""
}

// Ended sagas are kept for 30 days by default. Compensated ones are kept here until they are deleted by hand.
func ExampleNewRunner() {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{
		Name:         "travel",
		Retention:    saga.Retention{Completed: 7 * 24 * time.Hour, Compensated: saga.Unlimited},
		MaxTakeovers: saga.Unlimited,
	})
	cfg := runner.Config()
	fmt.Println(cfg.LeaseTTL, cfg.Concurrency, cfg.Retention.Completed, cfg.Retention.Abandoned)
	fmt.Println(saga.RunnerConfig{Drain: -time.Second}.Validate())
	// Output:
	// 15s 64 168h0m0s 720h0m0s
	// saga.RunnerConfig.Drain is -1s: must be 0 (for 10s), more, or None
}

// NewMemory returns a store for tests: it has no transactions.
func ExampleNewMemory() {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{flight}})
	err := trips.StartTx(context.Background(), nil, "trip-17", Trip{})
	fmt.Println(errors.Is(err, saga.ErrNoTx), err)
	// Output: true saga: no transactions: StartTx of "trip-17"
}

// A deployment adds a step. Sagas of version 1 continue, and new ones are of version 2.
func ExampleRegister() {
	v1 := &saga.Saga[Trip]{Name: "trip", Version: 1, Steps: []saga.Step[Trip]{flight}}
	v2 := &saga.Saga[Trip]{Name: "trip", Version: 2, Steps: []saga.Step[Trip]{
		flight, {Name: "hotel", Do: do("book hotel"), Undo: do("cancel hotel")},
	}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, v2, v1)
	defer run(runner)()
	in, err := trips.Start(context.Background(), "trip-17", Trip{})
	fmt.Println(in.Version, err)
	_, err = trips.Result(context.Background(), "trip-17")
	fmt.Println(err)
	// Unordered output:
	// 2 <nil>
	// book flight
	// book hotel
	// <nil>
}

// Start can be repeated: the id is started once.
func ExampleHandle_Start() {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{flight}})
	tours := saga.Register(runner, &saga.Saga[Trip]{Name: "tour", Steps: []saga.Step[Trip]{flight}})
	ctx := context.Background()
	for range 2 {
		in, err := trips.Start(ctx, "trip-17", Trip{})
		fmt.Println(in.ID, in.Status, err)
	}
	_, err := tours.Start(ctx, "trip-17", Trip{})
	fmt.Println(errors.Is(err, saga.ErrExists), err)
	// Output:
	// trip-17 running <nil>
	// trip-17 running <nil>
	// true saga: id in use: "trip-17" is a trip
}

// Get returns the state without waiting.
func ExampleHandle_Get() {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{flight}})
	ctx := context.Background()
	_, _ = trips.Start(ctx, "trip-17", Trip{Hotel: "Ibis"})
	in, trip, err := trips.Get(ctx, "trip-17")
	fmt.Println(in.Status, trip.Hotel, err)
	_, _, err = trips.Get(ctx, "trip-18")
	fmt.Println(errors.Is(err, saga.ErrNotFound), err)
	// Output:
	// running Ibis <nil>
	// true saga: get "trip-18": saga: not found
}

// The error of a saga that was undone matches ErrCompensated, and its state is returned with it.
func ExampleHandle_Result() {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		flight, {Name: "hotel", Do: fail(saga.Declined(errors.New("full"))), Undo: do("cancel hotel")},
	}})
	defer run(runner)()
	ctx := context.Background()
	_, _ = trips.Start(ctx, "trip-17", Trip{Hotel: "Ibis"})
	trip, err := trips.Result(ctx, "trip-17")
	fmt.Println(trip.Hotel, errors.Is(err, saga.ErrCompensated), err)
	// Output:
	// book flight
	// cancel flight
	// Ibis true saga: trip "trip-17": compensated: step hotel: full
}

// A trip waits for an approval. A signal that no step awaits is not allowed.
func ExampleHandle_Signal() {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	trips := saga.Register(runner, &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		{Name: "approved", Await: "approval", ReadOnly: true, Do: func(ctx context.Context, _ *Trip) error {
			by, _ := saga.SignalFrom(ctx, "approval")
			fmt.Printf("approved by %s\n", by)
			return nil
		}},
	}})
	defer run(runner)()
	ctx := context.Background()
	_, _ = trips.Start(ctx, "trip-17", Trip{})
	fmt.Println(trips.Signal(ctx, "trip-17", "payment", nil))
	if err := trips.Signal(ctx, "trip-17", "approval", []byte("Ada")); err != nil {
		fmt.Println(err)
	}
	_, err := trips.Result(ctx, "trip-17")
	fmt.Println(err)
	// Output:
	// saga: signal "payment" of "trip-17": saga: not allowed: no step of trip version 0 awaits it
	// approved by Ada
	// <nil>
}

// No approval arrives within AwaitFor, so the trip turns back.
func ExampleStep_await() {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Poll: 10 * time.Millisecond})
	trips := saga.Register(runner, &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		flight, {Name: "approved", Await: "approval", AwaitFor: 20 * time.Millisecond},
	}})
	defer run(runner)()
	ctx := context.Background()
	_, _ = trips.Start(ctx, "trip-17", Trip{})
	_, err := trips.Result(ctx, "trip-17")
	fmt.Println(errors.Is(err, saga.ErrNoSignal), errors.Is(err, saga.ErrCompensated))
	// Output:
	// book flight
	// cancel flight
	// true true
}

// The customer cancels while the trip waits.
func ExampleHandle_Cancel() {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Poll: 10 * time.Millisecond})
	trips := saga.Register(runner, &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		{Name: "approved", Await: "approval"},
	}})
	defer run(runner)()
	ctx := context.Background()
	_, _ = trips.Start(ctx, "trip-17", Trip{})
	fmt.Println(trips.Cancel(ctx, "trip-17", "changed my mind"))
	_, err := trips.Result(ctx, "trip-17")
	fmt.Println(errors.Is(err, saga.ErrCanceled), err)
	fmt.Println(errors.Is(trips.Cancel(ctx, "trip-17", ""), saga.ErrNotAllowed))
	// Output:
	// <nil>
	// true saga: trip "trip-17": compensated: saga: canceled
	// true
}

// The saga must be done within its Timeout.
func ExampleSaga() {
	trip := &saga.Saga[Trip]{Name: "trip", Timeout: 10 * time.Millisecond, Steps: []saga.Step[Trip]{
		flight,
		{Name: "hotel", Undo: do("cancel hotel"), Do: func(ctx context.Context, _ *Trip) error {
			<-ctx.Done() // the hotel does not answer
			return ctx.Err()
		}},
	}}
	err := saga.Run(context.Background(), trip, &Trip{})
	fmt.Println(errors.Is(err, saga.ErrDeadline), errors.Is(err, saga.ErrCompensated))
	// Output:
	// book flight
	// cancel hotel
	// cancel flight
	// true true
}

// A tour consists of a trip for each of its guests.
func ExampleChildrenOf() {
	type Tour struct{ Guests, Seats []string }
	seat := &saga.Saga[string]{Name: "seat", Steps: []saga.Step[string]{{
		Name: "book", Do: func(_ context.Context, s *string) error { *s = "seat for " + *s; return nil }, ReadOnly: true,
	}}}
	tour := &saga.Saga[Tour]{Name: "tour", Steps: []saga.Step[Tour]{{
		Name: "seats",
		Child: saga.ChildrenOf(seat,
			func(t *Tour) ([]string, error) { return t.Guests, nil },
			func(t *Tour, seats []string) error { t.Seats = seats; return nil }),
	}}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	tours := saga.Register(runner, tour)
	defer run(runner)()
	ctx := context.Background()
	_, _ = tours.Start(ctx, "tour-1", Tour{Guests: []string{"Ada", "Bob"}})
	done, err := tours.Result(ctx, "tour-1")
	fmt.Printf("%q %v\n", done.Seats, err)
	child, _ := runner.Get(ctx, saga.ChildID("tour-1", "seats", 1))
	fmt.Println(child.ID, child.Status, child.Parent)
	// Output:
	// ["seat for Ada" "seat for Bob"] <nil>
	// tour-1/seats/1 completed tour-1
}

// An order starts one saga of another definition.
func ExampleChildOf() {
	type Order struct{ Trip Trip }
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		{Name: "flight", Do: func(_ context.Context, t *Trip) error { t.Flight = "TP1363"; return nil }, ReadOnly: true},
	}}
	order := &saga.Saga[Order]{Name: "order", Steps: []saga.Step[Order]{{
		Name: "trip",
		Child: saga.ChildOf(trip,
			func(o *Order) (Trip, error) { return o.Trip, nil },
			func(o *Order, t Trip) error { o.Trip = t; return nil }),
	}}}
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	orders := saga.Register(runner, order)
	defer run(runner)()
	_, _ = orders.Start(context.Background(), "order-1", Order{})
	done, err := orders.Result(context.Background(), "order-1")
	fmt.Println(done.Trip.Flight, err)
	// Output: TP1363 <nil>
}

// A participant that received the command in a message applies it once: see Apply.
func ExampleWithCommand() {
	ctx := saga.WithCommand(context.Background(), saga.Command{ID: "trip-17/flight/undo"})
	cmd := saga.CommandFrom(ctx)
	fmt.Println(cmd.ID, cmd.DoID())
	// Output: trip-17/flight/undo trip-17/flight/do
}

// The wait is random, up to the given times.
func ExampleExponential() {
	backoff := saga.Exponential(time.Second, time.Minute)
	fmt.Println(backoff(1) <= time.Second, backoff(2) <= 2*time.Second, backoff(100) <= time.Minute)
	// Output: true true true
}

// A loop that runs a saga. Each Engine is such a loop.
func ExampleDefinition_Decide() {
	trip := &saga.Saga[Trip]{Name: "trip", Steps: []saga.Step[Trip]{
		flight, {Name: "approved", Await: "approval"}, {Name: "charge", Do: do("charge"), Pivot: true},
	}}
	d, err := saga.Define(trip)
	if err != nil {
		fmt.Println(err)
		return
	}
	snapshot, err := d.Begin("trip-17", []byte(`{}`), time.Now())
	for in := (saga.Input{}); err == nil; {
		var decision saga.Decision
		in.Now = time.Now()
		if decision, err = d.Decide(snapshot, in); err != nil {
			break
		}
		for _, entry := range decision.Log {
			fmt.Printf("%s %q\n", entry.Kind, entry.Step)
		}
		if decision.Status != saga.Running && decision.Status != saga.Compensating {
			break
		}
		kept, _ := json.Marshal(decision.Snapshot) // a crash loses only what follows
		_ = json.Unmarshal(kept, &snapshot)
		in = saga.Input{}
		for _, call := range decision.Calls {
			in.Answers = append(in.Answers, d.Perform(context.Background(), call))
		}
		if len(decision.Calls) == 0 { // otherwise wait for decision.WakeAt, a signal or an operation
			in.Signals = map[string][]byte{"approval": nil}
		}
	}
	fmt.Println(err)
	// Output:
	// created ""
	// book flight
	// step_done "flight"
	// step_done "approved"
	// charge
	// step_done "charge"
	// completed ""
	// <nil>
}
