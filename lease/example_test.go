package lease_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/lease"
)

// A candidate competes for a lease. All processes that may lead use the same store and the same name.
func ExampleNew() {
	store := lease.NewMemory() // in a real program: sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{})
	billing := lease.New(store, lease.Config{Name: "billing", TTL: 10 * time.Second})
	fmt.Println(billing.Config().TTL, billing.Config().Margin, billing.Config().Poll)
	err := billing.Run(context.Background(), func(ctx context.Context, term lease.Term) error {
		fmt.Println("leads:", term.Err() == nil)
		return nil
	})
	fmt.Println(err)
	// Output:
	// 10s 1s 1s
	// leads: true
	// <nil>
}

// Two processes compete. The second leads as soon as the first has done its work.
func ExampleCandidate_Run() {
	store := lease.NewMemory() // in a real program: sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{})
	first := lease.New(store, lease.Config{Name: "billing", Holder: "process 1"})
	second := lease.New(store, lease.Config{Name: "billing", Holder: "process 2"})
	leads := make(chan struct{})
	done := make(chan error)
	go func() {
		done <- first.Run(context.Background(), func(ctx context.Context, term lease.Term) error {
			close(leads)
			fmt.Println(term.Holder(), "bills March")
			return nil
		})
	}()
	<-leads
	err := second.Run(context.Background(), func(ctx context.Context, term lease.Term) error {
		fmt.Println(term.Holder(), "bills April")
		return nil
	})
	fmt.Println(<-done, err)
	// Output:
	// process 1 bills March
	// process 2 bills April
	// <nil> <nil>
}

// A worker that runs in one process at a time. If it fails, it is started again after Poll, in any of the processes.
func ExampleCandidate_Loop() {
	ctx, shutdown := context.WithCancel(context.Background())
	outbox := lease.New(lease.NewMemory(), lease.Config{
		Name: "outbox", Poll: 10 * time.Millisecond,
		OnError: func(ctx context.Context, err error) { fmt.Println("outbox:", err) },
	})
	terms := 0
	relay := func(ctx context.Context, term lease.Term) error {
		if terms++; terms == 1 {
			return errors.New("connection lost")
		}
		fmt.Println("relays messages")
		shutdown()
		<-ctx.Done() // in a real program: send messages until ctx ends
		return ctx.Err()
	}
	fmt.Println(outbox.Loop(ctx, relay))
	// Output:
	// outbox: connection lost
	// relays messages
	// <nil>
}

// A report at each multiple of an interval, in whichever process leads. If one fails, the next one is made when it is
// due.
func ExampleCandidate_Every() {
	ctx, shutdown := context.WithCancel(context.Background())
	reports := lease.New(lease.NewMemory(), lease.Config{
		Name:    "report",
		OnError: func(ctx context.Context, err error) { fmt.Println("report:", err) },
	})
	n := 0
	err := reports.Every(ctx, lease.Interval(20*time.Millisecond), func(ctx context.Context, term lease.Term) error {
		if n++; n == 1 {
			return errors.New("no data")
		}
		fmt.Println("report made")
		shutdown()
		return nil
	})
	fmt.Println(err)
	// Output:
	// report: no data
	// report made
	// <nil>
}

// A job at half past two at night. On the day on which clocks are set forward from two to three, it is due at three.
func ExampleDaily() {
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		fmt.Println(err)
		return
	}
	nightly := lease.Daily(2, 30, berlin)
	at := time.Date(2026, time.March, 27, 12, 0, 0, 0, berlin)
	for range 3 {
		at = nightly.Next(at)
		fmt.Println(at.In(berlin).Format("Jan 2 15:04 MST"))
	}
	// Output:
	// Mar 28 02:30 CET
	// Mar 29 03:00 CEST
	// Mar 30 02:30 CEST
}

// Runs are due at multiples of the interval, whenever the program was started.
func ExampleInterval() {
	at := time.Date(2026, time.May, 1, 9, 17, 42, 0, time.UTC)
	for range 2 {
		at = lease.Interval(time.Hour).Next(at)
		fmt.Println(at.UTC().Format("15:04"))
	}
	// Output:
	// 10:00
	// 11:00
}

// A lease as a lock that does not wait.
func ExampleCandidate_TryCampaign() {
	ctx := context.Background()
	store := lease.NewMemory()
	mine := lease.New(store, lease.Config{Name: "report", Holder: "me"})
	other := lease.New(store, lease.Config{Name: "report", Holder: "the other"})

	term, err := other.TryCampaign(ctx)
	fmt.Println(term.Holder(), err)

	_, err = mine.TryCampaign(ctx)
	fmt.Println(err, errors.Is(err, lease.ErrHeld))

	fmt.Println(term.Resign(ctx))
	term, err = mine.TryCampaign(ctx)
	fmt.Println(term.Holder(), err)
	// Output:
	// the other <nil>
	// lease: report: held by the other true
	// <nil>
	// me <nil>
}

// Work that is not a single function.
func ExampleCandidate_Campaign() {
	ctx := context.Background()
	term, err := lease.New(lease.NewMemory(), lease.Config{Name: "billing"}).Campaign(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("leads:", term.Err() == nil)
	fmt.Println(term.Resign(ctx))
	fmt.Println("lost:", errors.Is(term.Err(), lease.ErrLost))
	// Output:
	// leads: true
	// <nil>
	// lost: true
}

// An observer of elections.
func ExampleCandidate_Observe() {
	billing := lease.New(lease.NewMemory(), lease.Config{Name: "billing"})
	stop := billing.Observe(func(_ context.Context, e lease.Event) { fmt.Println(e.Name, e.Kind) })
	defer stop()
	_ = billing.Run(context.Background(), func(context.Context, lease.Term) error { return nil })
	// Output:
	// billing elected
	// billing resigned
}

// A printer that rejects the pages of a former leader.
func ExampleTerm_Epoch() {
	ctx := context.Background()
	store := lease.NewMemory()
	var highest int64
	print := func(epoch int64, text string) {
		if epoch < highest {
			fmt.Println("rejected:", text)
			return
		}
		highest = epoch
		fmt.Println(text)
	}

	past, _ := lease.New(store, lease.Config{Name: "printer"}).Campaign(ctx)
	print(past.Epoch(), "page 1")
	_ = past.Resign(ctx)
	now, _ := lease.New(store, lease.Config{Name: "printer"}).Campaign(ctx)
	print(now.Epoch(), "page 2")
	print(past.Epoch(), "page 1 again")
	// Output:
	// page 1
	// page 2
	// rejected: page 1 again
}

// A page that shows which process leads.
func ExampleRecord_Held() {
	ctx := context.Background()
	billing := lease.New(lease.NewMemory(), lease.Config{Name: "billing", Holder: "10.0.0.7:8080"})
	_, _ = billing.Campaign(ctx)
	rec, err := billing.Status(ctx)
	if err == nil && rec.Held() {
		fmt.Println(rec.Name, "is led by", rec.Holder)
	}
	// Output: billing is led by 10.0.0.7:8080
}
