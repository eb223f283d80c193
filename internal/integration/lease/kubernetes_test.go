package lease_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordination "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services/kube"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/storetest"
	"github.com/go-resilience/resilience/resiliencek8s"
)

func TestKubernetesStore(t *testing.T) {
	t.Parallel()
	server := kube.New(t)
	api := kube.Leases(server.Addr)
	storetest.Run(t, func(t *testing.T) lease.Store {
		require.NoError(t, api.DeleteCollection(t.Context(), meta.DeleteOptions{}, meta.ListOptions{}))
		return resiliencek8s.New(api)
	})
}

// fencedWrite writes epoch to an object, which refuses an epoch that is lower than that of its last write.
func fencedWrite(ctx context.Context, leases client.LeaseInterface, epoch int64) error {
	for {
		o, err := leases.Get(ctx, "written", meta.GetOptions{})
		if apierrors.IsNotFound(err) {
			o = &coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: "written"}}
			o, err = leases.Create(ctx, o, meta.CreateOptions{})
		}
		if apierrors.IsAlreadyExists(err) {
			continue
		}
		if err != nil {
			return err
		}
		if last, _ := strconv.ParseInt(o.Annotations["epoch"], 10, 64); epoch < last {
			return lease.ErrLost
		}
		o.Annotations = map[string]string{"epoch": fmt.Sprint(epoch)}
		if _, err = leases.Update(ctx, o, meta.UpdateOptions{}); !apierrors.IsConflict(err) {
			return err
		}
	}
}

// A user with the Role of the documentation of resiliencek8s can lead, and one without any of its verbs cannot.
func TestKubernetesRights(t *testing.T) {
	t.Parallel()
	if kube.Real() == "" {
		t.Skip("a simulated server admits everybody")
	}
	server := kube.New(t)
	admin, err := rest.HTTPClientFor(kube.Config(server.Addr, kube.Admin))
	require.NoError(t, err)
	send := func(method, path, body string) string {
		req, err := http.NewRequestWithContext(t.Context(), method, "https://"+server.Addr+path, strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		resp, err := admin.Do(req)
		require.NoError(t, err)
		answer, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Less(t, resp.StatusCode, 300, string(answer))
		return string(answer)
	}
	const rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/"
	role := func(verbs ...string) string {
		text, err := json.Marshal(verbs)
		require.NoError(t, err)
		return `{"metadata": {"name": "leases"}, "rules": [{"apiGroups": ["coordination.k8s.io"],
			"resources": ["leases"], "verbs": ` + string(text) + `}]}`
	}
	send(http.MethodPost, rbac+"roles", role("get"))
	send(http.MethodPost, rbac+"rolebindings", `{"metadata": {"name": "leases"},
		"subjects": [{"kind": "User", "name": "candidate"}],
		"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "leases"}}`)
	c, err := client.NewForConfig(kube.Config(server.Addr, kube.Candidate))
	require.NoError(t, err)
	store := resiliencek8s.New(c.Leases("default"))
	lead := func(name string) error {
		req := lease.Request{Name: name, Token: "x", Holder: "pod-1", TTL: time.Minute}
		if _, err := store.Acquire(t.Context(), req); err != nil {
			return err
		}
		if err := store.Renew(t.Context(), req); err != nil {
			return err
		}
		return store.Release(t.Context(), name, "x")
	}
	becomes := func(what string, ok func() bool) { // RBAC has a cache
		require.Eventually(t, ok, time.Minute, 20*time.Millisecond, what)
	}
	send(http.MethodPut, rbac+"roles/leases", role("get", "create", "update"))
	becomes("the Role suffices", func() bool { return lead("billing") == nil })
	_, err = store.Acquire(t.Context(), lease.Request{Name: "billing", Token: "y", Holder: "pod-2", TTL: 15 * time.Second})
	require.NoError(t, err)
	t.Log(send(http.MethodGet, "/apis/coordination.k8s.io/v1/namespaces/default/leases/billing", ""))
	require.NoError(t, store.Release(t.Context(), "billing", "y"))
	n := 0
	for _, verbs := range [][]string{{"create", "update"}, {"get", "update"}, {"get", "create"}} {
		send(http.MethodPut, rbac+"roles/leases", role(verbs...))
		becomes(strings.Join(verbs, " and "), func() bool {
			n++
			return apierrors.IsForbidden(lead(fmt.Sprint("new-", n)))
		})
	}
	send(http.MethodPut, rbac+"roles/leases", role("get", "update"))
	becomes("an object that exists needs no create", func() bool { return lead("billing") == nil })
}

// Three candidates lose their leader in every way, and then the API server. At no time do two of them lead.
func TestKubernetesOutages(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	server := kube.New(t)
	truth := kube.Leases(server.Addr)
	r := &reign{terms: make(map[int64]int64)}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	var leader atomic.Int64
	leader.Store(-1)
	var proxies []*faultproxy.Proxy
	for i := range int64(3) {
		proxies = append(proxies, faultproxy.New(t, server.Addr))
		leases := kube.Leases(proxies[i].Addr())
		cfg := lease.Config{Name: "a", TTL: ttl, Poll: 200 * time.Millisecond, Holder: fmt.Sprint(i)}
		c := quiet(resiliencek8s.New(leases), cfg)
		all.Go(func() {
			_ = c.Loop(ctx, func(ctx context.Context, term lease.Term) error {
				for ; ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
					// Not through the proxy, whose faults are about the lease.
					call, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
					err := fencedWrite(call, truth, term.Epoch())
					cancel()
					if err == nil && term.Err() == nil {
						leader.Store(i)
						if wrong := r.wrote(term.Epoch(), i); wrong != "" {
							t.Error(wrong)
						}
					}
					if errors.Is(err, lease.ErrLost) && term.Err() == nil {
						t.Errorf("%d believes that it leads in term %d, which is over", i, term.Epoch())
					}
				}
				return nil
			})
		})
	}
	again := func(what string, fault func(*faultproxy.Proxy)) {
		time.Sleep(ttl)
		r.longest()
		before, old := r.handovers(), proxies[leader.Load()]
		fault(old)
		require.Eventually(t, func() bool { return r.handovers() > before }, time.Minute, 10*time.Millisecond, what)
		old.Heal()
		old.Reset()
		t.Logf("%s: %v without a leader, TTL %v", what, r.longest(), ttl)
	}
	require.Eventually(t, func() bool { return leader.Load() >= 0 }, time.Minute, 10*time.Millisecond)
	again("leader refused", func(p *faultproxy.Proxy) { p.Refuse(); p.Reset() })
	again("leader hangs", (*faultproxy.Proxy).Hang)
	again("leader cut off", func(p *faultproxy.Proxy) { p.Cut(faultproxy.Both); p.Refuse() })
	away := 3 * ttl
	if kube.Real() != "" {
		away = time.Minute
	}
	again(fmt.Sprintf("API server away for %v", away), func(*faultproxy.Proxy) {
		server.Pause()
		time.Sleep(away)
		server.Resume()
	})
}
