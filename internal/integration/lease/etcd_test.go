package lease_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-resilience/resilience/internal/integration/services/etcd"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/resilienceetcd"
)

func etcdStore(client *clientv3.Client) *resilienceetcd.Store {
	return resilienceetcd.New(client, resilienceetcd.Config{})
}

// A reign is what candidates of a cluster have done, as a test sees it.
type reign struct {
	mu     sync.Mutex
	last   time.Time       // when a process led last
	vacant time.Duration   // the longest time without a leader
	terms  map[int64]int64 // candidates of epochs
}

// wrote records a fenced write of the epoch.
func (r *reign) wrote(epoch, candidate int64) (wrong string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.last.IsZero() {
		r.vacant = max(r.vacant, time.Since(r.last))
	}
	r.last = time.Now()
	if other, ok := r.terms[epoch]; ok && other != candidate {
		return fmt.Sprintf("epoch %d is of two terms", epoch)
	}
	r.terms[epoch] = candidate
	return ""
}

// handovers returns how many terms have written.
func (r *reign) handovers() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.terms)
}

// longest returns the longest time without a leader since the last call.
func (r *reign) longest() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	vacant := r.vacant
	if !r.last.IsZero() {
		vacant = max(vacant, time.Since(r.last))
	}
	r.vacant = 0
	return vacant.Round(10 * time.Millisecond)
}

// A cluster of three, of which one member is stopped, one is killed, and then both at the same time: no majority is
// left. At no time do two candidates lead, epochs grow, and a candidate leads again while there is a majority, although
// the clients do not notice that a member is stopped.
func TestEtcdCluster(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	cluster := etcd.New(t, 3)
	truth := etcd.Client(t, cluster.Addrs...)
	r := &reign{terms: make(map[int64]int64)}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	var elected atomic.Int64
	for i := range int64(3) {
		client := etcd.Client(t, cluster.Addrs...)
		store := etcdStore(client)
		c := quiet(store, lease.Config{Name: "a", TTL: ttl, Poll: 200 * time.Millisecond, Holder: fmt.Sprint(i)})
		all.Go(func() {
			_ = c.Loop(ctx, func(ctx context.Context, term lease.Term) error {
				elected.Add(1)
				until := time.Now().Add(rand.N(ttl))
				for ctx.Err() == nil && time.Now().Before(until) {
					// Not the term's ctx: a process may be paused between a check of it and a write.
					call, cancel := context.WithTimeout(context.WithoutCancel(ctx), ttl/10)
					put := clientv3.OpPut("written", fmt.Sprint(term.Epoch()))
					resp, err := client.Txn(call).If(store.Fence("a", term.Epoch())).Then(put).Commit()
					cancel()
					switch {
					case err == nil && resp.Succeeded:
						if wrong := r.wrote(term.Epoch(), i); wrong != "" {
							t.Error(wrong)
						}
					case err == nil && term.Err() == nil:
						t.Errorf("%d believes that it leads in term %d, which is over", i, term.Epoch())
					}
					time.Sleep(10 * time.Millisecond)
				}
				return nil
			})
		})
	}
	leads := func(what string) {
		before := elected.Load()
		require.Eventually(t, func() bool { return elected.Load() > before+1 }, time.Minute, 10*time.Millisecond, what)
		t.Logf("%s: at most %v without a leader", what, r.longest())
	}
	leads("all members")
	for i := range 3 { // one of them leads the cluster
		cluster.Pause(i)
		leads(fmt.Sprintf("member %d stopped", i))
		cluster.Resume(i)
	}
	cluster.Kill(0)
	leads("member 0 killed")
	cluster.Pause(1)
	time.Sleep(2 * ttl)
	t.Logf("member 0 killed and member 1 stopped, no majority: %v without a leader", r.longest())
	cluster.Resume(1)
	leads("member 1 continues")
	cluster.Start(0)
	leads("all members")
	cancel()
	all.Wait()

	// The writes of terms in the order of their revisions, as etcd has them.
	resp, err := truth.Get(t.Context(), "written")
	require.NoError(t, err)
	var last int64
	history, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	writes := 0
	for got := range truth.Watch(history, "written", clientv3.WithRev(1)) {
		require.NoError(t, got.Err())
		for _, e := range got.Events {
			var epoch int64
			_, err := fmt.Sscan(strings.TrimSpace(string(e.Kv.Value)), &epoch)
			require.NoError(t, err)
			require.GreaterOrEqual(t, epoch, last, "a former leader has written")
			last = epoch
			writes++
		}
		if n := len(got.Events); n > 0 && got.Events[n-1].Kv.ModRevision >= resp.Kvs[0].ModRevision {
			break
		}
	}
	t.Logf("%d terms, %d fenced writes in order", elected.Load(), writes)
	require.Greater(t, writes, 100)
}
