package resiliencek8s_test

import (
	"context"
	"fmt"
	"strconv"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	core "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/resiliencek8s"
)

// A leader writes to a ConfigMap, which has the epoch of the last write, and a former leader does not.
func ExampleNew() {
	ctx := context.Background()
	cfg := connect() // in a real program: rest.InClusterConfig
	maps := core.NewForConfigOrDie(cfg).ConfigMaps("default")
	store := resiliencek8s.New(coordination.NewForConfigOrDie(cfg).Leases("default"))
	write := func(ctx context.Context, epoch int64, bill string) error {
		bills, err := maps.Get(ctx, "bills", meta.GetOptions{})
		if err != nil {
			return err
		}
		if last, _ := strconv.ParseInt(bills.Data["epoch"], 10, 64); last > epoch {
			return lease.ErrLost
		}
		bills.Data = map[string]string{"last": bill, "epoch": fmt.Sprint(epoch)}
		_, err = maps.Update(ctx, bills, meta.UpdateOptions{}) // fails if another process has changed it
		return err
	}

	var first int64
	for _, holder := range []string{"pod-1", "pod-2"} {
		billing := lease.New(store, lease.Config{Name: "billing", Holder: holder})
		err := billing.Run(ctx, func(ctx context.Context, term lease.Term) error {
			if first == 0 {
				first = term.Epoch()
			}
			return write(ctx, term.Epoch(), "March by "+holder)
		})
		fmt.Println(holder, err)
	}
	fmt.Println(write(ctx, first, "April by pod-1"))
	// Output:
	// pod-1 <nil>
	// pod-2 <nil>
	// lease: lost
}
