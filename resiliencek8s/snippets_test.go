package resiliencek8s_test

import (
	"context"
	"time"

	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/resiliencek8s"
)

// The snippet of docs/cookbook.md, for the compiler: see TestSnippetsCompile. It is not run.
func _(ctx context.Context, namespace string, sendReports func(context.Context, lease.Term) error) error {
	cfg, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	cfg.NextProtos = []string{"http/1.1"} // a connection that hangs costs one request, not a term
	client, err := coordination.NewForConfig(cfg)
	if err != nil {
		return err
	}
	store := resiliencek8s.New(client.Leases(namespace))
	reports := lease.New(store, lease.Config{Name: "reports", Poll: 3 * time.Second})
	return reports.Loop(ctx, sendReports) // calls sendReports while this process leads, until ctx is done
}
