package lease_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-resilience/resilience/lease"
)

// Two processes compete. The second leads as soon as the first has done its work.
func ExampleRun() {
	store := lease.NewMemory() // in a real program: sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{})
	leads := make(chan struct{})
	done := make(chan error)
	go func() {
		done <- lease.Run(context.Background(), store, lease.Config{Name: "billing", Holder: "process 1"},
			func(ctx context.Context, term lease.Term) error {
				close(leads)
				fmt.Println(term.Holder(), "bills March")
				return nil
			})
	}()
	<-leads
	err := lease.Run(context.Background(), store, lease.Config{Name: "billing", Holder: "process 2"},
		func(ctx context.Context, term lease.Term) error {
			fmt.Println(term.Holder(), "bills April")
			return nil
		})
	fmt.Println(<-done, err)
	// Output:
	// process 1 bills March
	// process 2 bills April
	// <nil> <nil>
}

// A lease as a lock that is not waited for.
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

// A printer that refuses what a past leader sends too late.
func ExampleTerm_Epoch() {
	ctx := context.Background()
	store := lease.NewMemory()
	var highest int64
	print := func(epoch int64, text string) {
		if epoch < highest {
			fmt.Println("refused:", text)
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
	// refused: page 1 again
}

// A page that shows who leads.
func ExampleRecord_Held() {
	ctx := context.Background()
	store := lease.NewMemory()
	_, _ = lease.New(store, lease.Config{Name: "billing", Holder: "10.0.0.7:8080"}).Campaign(ctx)
	rec, err := store.Load(ctx, "billing")
	if err == nil && rec.Held() {
		fmt.Println(rec.Name, "is led by", rec.Holder)
	}
	// Output: billing is led by 10.0.0.7:8080
}
