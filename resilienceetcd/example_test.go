package resilienceetcd_test

import (
	"context"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/resilienceetcd"
)

// A leader writes to etcd in transactions that fail when another process leads.
func ExampleNew() {
	ctx := context.Background()
	client, err := connect() // in a real program: clientv3.New
	if err != nil {
		fmt.Println(err)
		return
	}
	store := resilienceetcd.New(client, resilienceetcd.Config{Prefix: "example/"})
	billing := lease.New(store, lease.Config{Name: "billing", Holder: "10.0.0.7:8080"})
	var epoch int64
	write := func(ctx context.Context, bill string) error {
		put := clientv3.OpPut("bill", bill)
		resp, err := client.Txn(ctx).If(store.Fence("billing", epoch)).Then(put).Commit()
		fmt.Println(bill, "is written:", err == nil && resp.Succeeded)
		return err
	}
	err = billing.Run(ctx, func(ctx context.Context, term lease.Term) error {
		epoch = term.Epoch()
		return write(ctx, "March")
	})
	fmt.Println(err)
	_ = write(ctx, "April") // by a former leader
	// Output:
	// March is written: true
	// <nil>
	// April is written: false
}
