// Package leaderelection_test compares resiliencek8s with leaderelection of client-go, which links 250 packages more.
package leaderelection_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/go-resilience/resilience/internal/sim/kube"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/resiliencek8s"
)

// direct sends requests to a simulated API server, in a bubble of testing/synctest.
type direct struct{ http.Handler }

func (d direct) RoundTrip(r *http.Request) (*http.Response, error) {
	answer := httptest.NewRecorder()
	d.ServeHTTP(answer, r)
	return answer.Result(), r.Context().Err()
}

// perMinute returns how many requests a server receives while one process leads and another waits, and how many while
// only one process runs.
func perMinute(t *testing.T, campaign func(context.Context, *client.CoordinationV1Client, string)) (one, two int) {
	synctest.Test(t, func(t *testing.T) {
		server := new(kube.Server)
		c, err := client.NewForConfig(&rest.Config{
			Host: "http://kube", Transport: direct{server}, QPS: -1,
			ContentConfig: rest.ContentConfig{ContentType: "application/json"},
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go campaign(ctx, c, "one")
		time.Sleep(time.Minute)
		before := server.Requests("")
		time.Sleep(10 * time.Minute)
		one = (server.Requests("") - before) / 10
		go campaign(ctx, c, "two")
		time.Sleep(time.Minute)
		before = server.Requests("")
		time.Sleep(10 * time.Minute)
		two = (server.Requests("") - before) / 10
		cancel()
		time.Sleep(time.Minute)
	})
	return one, two
}

// A lease costs an API server fewer requests than client-go's leaderelection with the same TTL: a leader renews less
// often, and a candidate that waits looks as often.
func TestRequestsBesideLeaderElection(t *testing.T) {
	klog.SetLogger(klog.Logger{})
	one, two := perMinute(t, func(ctx context.Context, c *client.CoordinationV1Client, id string) {
		cfg := lease.Config{Name: "a", Holder: id, TTL: 15 * time.Second, Poll: 3 * time.Second}
		_ = lease.New(resiliencek8s.New(c.Leases("default")), cfg).Loop(ctx, func(ctx context.Context, _ lease.Term) error {
			<-ctx.Done()
			return nil
		})
	})
	theirOne, theirTwo := perMinute(t, func(ctx context.Context, c *client.CoordinationV1Client, id string) {
		leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{
				LeaseMeta: meta.ObjectMeta{Name: "a", Namespace: "default"}, Client: c,
				LockConfig: resourcelock.ResourceLockConfig{Identity: id},
			},
			LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second, // its defaults
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {},
			},
		})
	})
	t.Logf("requests a minute: a leader %d, with another candidate %d; leaderelection %d and %d",
		one, two, theirOne, theirTwo)
	if one >= theirOne || two >= theirTwo {
		t.Error("leaderelection sends fewer requests")
	}
}
