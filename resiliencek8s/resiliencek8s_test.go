package resiliencek8s_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/go-resilience/resilience/internal/sim/kube"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/storetest"
	"github.com/go-resilience/resilience/resiliencek8s"
)

// A link is a process's way to an API server, without a network, so that it works in a bubble of testing/synctest.
type link struct {
	server http.Handler
	fault  atomic.Pointer[fault] // nil: none
}

// A fault is what happens to a request. serve has the server answer it.
type fault func(r *http.Request, serve func() *http.Response) (*http.Response, error)

// set sets the fault of all requests from now on.
func (l *link) set(f fault) { l.fault.Store(&f) }

// once sets the fault of the next request.
func (l *link) once(f fault) {
	var done atomic.Bool
	l.set(func(r *http.Request, serve func() *http.Response) (*http.Response, error) {
		if done.Swap(true) {
			return none(r, serve)
		}
		return f(r, serve)
	})
}

func none(_ *http.Request, serve func() *http.Response) (*http.Response, error) { return serve(), nil }

// hang loses the request.
func hang(r *http.Request, _ func() *http.Response) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// loseAnswer loses the answer.
func loseAnswer(r *http.Request, serve func() *http.Response) (*http.Response, error) {
	serve()
	return hang(r, serve)
}

func refuse(*http.Request, func() *http.Response) (*http.Response, error) {
	return nil, errors.New("connection refused")
}

// RoundTrip implements [http.RoundTripper].
func (l *link) RoundTrip(r *http.Request) (*http.Response, error) {
	serve := func() *http.Response {
		answer := httptest.NewRecorder()
		l.server.ServeHTTP(answer, r.WithContext(context.WithoutCancel(r.Context())))
		return answer.Result()
	}
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	if f := l.fault.Load(); f != nil {
		return (*f)(r, serve)
	}
	return serve(), nil
}

// config returns the configuration of a client that uses l.
func config(l *link) *rest.Config {
	return &rest.Config{
		Host: "http://kube", Transport: l, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"},
	}
}

// connect returns the configuration of a client of a server that has the ConfigMap "bills".
func connect() *rest.Config {
	cfg := config(&link{server: new(kube.Server)})
	bills := &core.ConfigMap{ObjectMeta: meta.ObjectMeta{Name: "bills"}}
	maps := coreclient.NewForConfigOrDie(cfg).ConfigMaps("default")
	if _, err := maps.Create(context.Background(), bills, meta.CreateOptions{}); err != nil {
		panic(err)
	}
	return cfg
}

func leases(t testing.TB, l *link) client.LeaseInterface {
	t.Helper()
	c, err := client.NewForConfig(config(l))
	require.NoError(t, err)
	return c.Leases("default")
}

// newStore returns a store of a process of its own.
func newStore(t testing.TB, server http.Handler) (*resiliencek8s.Store, *link) {
	l := &link{server: server}
	return resiliencek8s.New(leases(t, l)), l
}

func TestStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) lease.Store { s, _ := newStore(t, new(kube.Server)); return s })
}

func request(token string) lease.Request {
	return lease.Request{Name: "a", Token: token, Holder: "holder of " + token, TTL: 10 * time.Second}
}

// object returns the object of the lease "a".
func object(t *testing.T, server http.Handler) *coordination.Lease {
	t.Helper()
	o, err := leases(t, &link{server: server}).Get(t.Context(), "a", meta.GetOptions{})
	require.NoError(t, err)
	return o
}

// kubectl, and other programs, see the lease; what they have added stays.
func TestObjectShowsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := new(kube.Server)
		api := leases(t, &link{server: server})
		_, err := api.Create(t.Context(), &coordination.Lease{ObjectMeta: meta.ObjectMeta{
			Name: "a", Labels: map[string]string{"team": "billing"}, Annotations: map[string]string{"note": "kept"},
		}}, meta.CreateOptions{})
		require.NoError(t, err)
		store, _ := newStore(t, server)
		rec, err := store.Load(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, lease.Record{Name: "a"}, rec)
		_, err = store.Acquire(t.Context(), request("x"))
		require.NoError(t, err)
		elected := time.Now()
		time.Sleep(3 * time.Second)
		renewal := request("x")
		renewal.TTL, renewal.Run = 1500*time.Millisecond, 7
		require.NoError(t, store.Renew(t.Context(), renewal))
		o := object(t, server)
		require.Equal(t, map[string]string{"team": "billing"}, o.Labels)
		require.Equal(t, "kept", o.Annotations["note"])
		require.Equal(t, "7", o.Annotations["resiliencek8s/run"])
		require.Equal(t, "x", o.Annotations["resiliencek8s/token"])
		require.Equal(t, "holder of x", *o.Spec.HolderIdentity)
		require.EqualValues(t, 2, *o.Spec.LeaseDurationSeconds, "rounded up")
		require.EqualValues(t, 0, *o.Spec.LeaseTransitions)
		require.True(t, o.Spec.AcquireTime.Equal(&meta.MicroTime{Time: elected}))
		require.True(t, o.Spec.RenewTime.Equal(&meta.MicroTime{Time: elected.Add(3 * time.Second)}))
		require.NoError(t, store.Release(t.Context(), "a", "x"))
		require.Empty(t, *object(t, server).Spec.HolderIdentity)
		_, err = store.Acquire(t.Context(), request("y"))
		require.NoError(t, err)
		require.EqualValues(t, 1, *object(t, server).Spec.LeaseTransitions)
	})
}

func TestNamesOfObjects(t *testing.T) {
	server := new(kube.Server)
	store, _ := newStore(t, server)
	api := leases(t, &link{server: server})
	const hashed = "sha256-4d8c6b1e06c5ae95e8a43a5d7b1a4fdbd1a80bb8ac2b07f09f29ea0d9b1ed5ad"
	for _, name := range []string{"billing", "billing.v2", "Billing", "", hashed, strings.Repeat("a", 254)} {
		req := lease.Request{Name: name, Token: "x", TTL: time.Hour}
		rec, err := store.Acquire(t.Context(), req)
		require.NoError(t, err)
		require.Equal(t, name, rec.Name)
	}
	_, err := api.Get(t.Context(), "billing", meta.GetOptions{})
	require.NoError(t, err)
	_, err = api.Get(t.Context(), hashed, meta.GetOptions{})
	require.True(t, apierrors.IsNotFound(err), "a name that looks like a hash is hashed")
	o, err := api.Get(t.Context(), fmt.Sprintf("sha256-%x", sha256.Sum256([]byte("Billing"))), meta.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, "Billing", o.Annotations["resiliencek8s/name"])
}

// Two programs that use the same object would both lead.
func TestLeaseOfAnotherProgramIsLeft(t *testing.T) {
	server := new(kube.Server)
	store, _ := newStore(t, server)
	spec := coordination.LeaseSpec{HolderIdentity: new("pod-7"), LeaseDurationSeconds: new(int32(15))}
	o := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: "a"}, Spec: spec}
	_, err := leases(t, &link{server: server}).Create(t.Context(), o, meta.CreateOptions{})
	require.NoError(t, err)
	_, err = store.Acquire(t.Context(), request("x"))
	require.EqualError(t, err,
		`resiliencek8s: acquire: lease/a belongs to another program: it has the holder "pod-7", and no epoch or no token`)
	require.Equal(t, 0, server.Requests(http.MethodPut))
}

// Another program gets a lease that the Store has released. client-go's leaderelection keeps the annotations.
func TestReleasedLeaseOfAnotherProgramIsLeft(t *testing.T) {
	server := new(kube.Server)
	store, link := newStore(t, server)
	_, err := store.Acquire(t.Context(), request("x"))
	require.NoError(t, err)
	require.NoError(t, store.Release(t.Context(), "a", "x"))
	o := object(t, server)
	o.Spec.HolderIdentity = new("pod-7")
	_, err = leases(t, link).Update(t.Context(), o, meta.UpdateOptions{})
	require.NoError(t, err)
	_, err = store.Acquire(t.Context(), request("y"))
	require.EqualError(t, err,
		`resiliencek8s: acquire: lease/a belongs to another program: it has the holder "pod-7", and no epoch or no token`)
	require.Equal(t, "pod-7", *object(t, server).Spec.HolderIdentity)
}

func TestErrorsNameMethod(t *testing.T) {
	server := new(kube.Server)
	store, link := newStore(t, server)
	_, err := store.Acquire(t.Context(), request("x"))
	require.NoError(t, err)
	o := object(t, server)
	o.Annotations["resiliencek8s/run"] = "no number"
	_, err = leases(t, link).Update(t.Context(), o, meta.UpdateOptions{})
	require.NoError(t, err)
	_, err = store.Load(t.Context(), "a")
	require.ErrorContains(t, err, "resiliencek8s: load: annotation resiliencek8s/run of lease/a: ")
	link.set(func(*http.Request, func() *http.Response) (*http.Response, error) {
		return respond(http.StatusForbidden, `{"kind":"Status","apiVersion":"v1","reason":"Forbidden","code":403}`), nil
	})
	_, err = store.Acquire(t.Context(), request("x"))
	require.ErrorContains(t, err, "resiliencek8s: acquire: ")
	require.True(t, apierrors.IsForbidden(err))
	require.ErrorContains(t, store.Renew(t.Context(), request("x")), "resiliencek8s: renew: ")
	require.ErrorContains(t, store.Release(t.Context(), "a", "x"), "resiliencek8s: release: ")
	require.Panics(t, func() { resiliencek8s.New(nil) })
}

func respond(code int, body string) *http.Response {
	return &http.Response{
		StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(bytes.NewReader([]byte(body))),
	}
}

// A process that has just started has not seen when the last renewal was.
func TestNewProcessWaitsForTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := new(kube.Server)
		dead, _ := newStore(t, server)
		_, err := dead.Acquire(t.Context(), request("x"))
		require.NoError(t, err)
		time.Sleep(time.Hour)
		store, _ := newStore(t, server)
		rec, err := store.Load(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, 10*time.Second, rec.Left)
		began := time.Now()
		term, err := lease.New(store, lease.Config{Name: "a"}).Campaign(t.Context())
		require.NoError(t, err)
		require.InDelta(t, 10, time.Since(began).Seconds(), 0.1)
		require.Greater(t, term.Epoch(), rec.Epoch)
		require.NoError(t, term.Resign(t.Context()))
		began = time.Now()
		other, _ := newStore(t, server)
		term, err = lease.New(other, lease.Config{Name: "a"}).Campaign(t.Context())
		require.NoError(t, err)
		require.Zero(t, time.Since(began), "a released lease is free immediately")
		require.NoError(t, term.Resign(t.Context()))
	})
}

// An operator deletes an object, or the token.
func TestTermEndedByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := new(kube.Server)
		api := leases(t, &link{server: server})
		for _, end := range []func() error{
			func() error { return api.Delete(t.Context(), "a", meta.DeleteOptions{}) },
			func() error {
				o := object(t, server)
				delete(o.Annotations, "resiliencek8s/token")
				_, err := api.Update(t.Context(), o, meta.UpdateOptions{})
				return err
			},
		} {
			store, _ := newStore(t, server)
			term, err := lease.New(store, lease.Config{Name: "a"}).Campaign(t.Context())
			require.NoError(t, err)
			require.NoError(t, end())
			time.Sleep(time.Millisecond)
			other, _ := newStore(t, server)
			next, err := lease.New(other, lease.Config{Name: "a"}).TryCampaign(t.Context())
			require.NoError(t, err)
			require.Greater(t, next.Epoch(), term.Epoch())
			<-term.Context().Done()
			require.ErrorIs(t, context.Cause(term.Context()), lease.ErrLost)
			require.NoError(t, next.Resign(t.Context()))
		}
	})
}

// A deleted object is a term that is over, even before another term has begun.
func TestRenewalOfDeletedObjectIsLost(t *testing.T) {
	server := new(kube.Server)
	store, link := newStore(t, server)
	_, err := store.Acquire(t.Context(), request("x"))
	require.NoError(t, err)
	require.NoError(t, leases(t, link).Delete(t.Context(), "a", meta.DeleteOptions{}))
	require.ErrorIs(t, store.Renew(t.Context(), request("x")), lease.ErrLost)
}

// The clock of the last leader was ahead, and the count of transitions is at its end.
func TestEpochsGrowPastClocks(t *testing.T) {
	server := new(kube.Server)
	store, link := newStore(t, server)
	_, err := store.Acquire(t.Context(), request("x"))
	require.NoError(t, err)
	require.NoError(t, store.Release(t.Context(), "a", "x"))
	o := object(t, server)
	const ahead = 1 << 62
	o.Annotations["resiliencek8s/epoch"], o.Spec.LeaseTransitions = fmt.Sprint(ahead), new(int32(math.MaxInt32))
	_, err = leases(t, link).Update(t.Context(), o, meta.UpdateOptions{})
	require.NoError(t, err)
	rec, err := store.Acquire(t.Context(), request("y"))
	require.NoError(t, err)
	require.EqualValues(t, ahead+1, rec.Epoch)
	require.EqualValues(t, math.MaxInt32, *object(t, server).Spec.LeaseTransitions)
}

// client-go repeats a request after an error that asks for it, although the server may have recorded the run.
func TestRunRecordedByLostTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, link := newStore(t, new(kube.Server))
		_, err := store.Acquire(t.Context(), request("x"))
		require.NoError(t, err)
		link.once(func(_ *http.Request, serve func() *http.Response) (*http.Response, error) {
			serve()
			answer := respond(http.StatusInternalServerError, `{"kind":"Status","apiVersion":"v1","reason":"ServerTimeout"}`)
			answer.Header.Set("Retry-After", "1")
			return answer, nil
		})
		run := request("x")
		run.Run = 7
		require.NoError(t, store.Renew(t.Context(), run))
		require.ErrorIs(t, store.Renew(t.Context(), run), lease.ErrRunTaken)
	})
}

// Neither a connection that is half open nor a server that takes seconds for each request costs a term.
func TestSlowServerCostsNoTerm(t *testing.T) {
	slow := func(d time.Duration) fault {
		return func(r *http.Request, serve func() *http.Response) (*http.Response, error) {
			select {
			case <-r.Context().Done():
				return nil, r.Context().Err()
			case <-time.After(d):
				return serve(), nil
			}
		}
	}
	for name, c := range map[string]struct {
		fault    fault
		once     bool
		requests int // in ten minutes, at most
	}{
		"lost request": {hang, true, 125},
		"lost answer":  {loseAnswer, true, 125},
		"1.8 seconds":  {slow(1800 * time.Millisecond), false, 125},
		"3.5 seconds":  {slow(3500 * time.Millisecond), false, 250},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := new(kube.Server)
				store, link := newStore(t, server)
				c1 := lease.New(store, patient)
				c1.Observe(func(context.Context, lease.Event) {})
				term, err := c1.Campaign(t.Context())
				require.NoError(t, err)
				if c.once {
					link.once(c.fault)
				} else {
					link.set(c.fault)
				}
				before := server.Requests("")
				time.Sleep(10 * time.Minute)
				require.NoError(t, term.Err())
				require.LessOrEqual(t, server.Requests("")-before, c.requests)
				link.set(none)
				require.NoError(t, term.Resign(t.Context()))
			})
		})
	}
}

// A leader sends an update for each renewal, and a candidate a get for each Poll.
func TestRequestsPerMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := new(kube.Server)
		cfg := lease.Config{Name: "a", Poll: 3 * time.Second}
		store, _ := newStore(t, server)
		term, err := lease.New(store, cfg).Campaign(t.Context())
		require.NoError(t, err)
		before := server.Requests("")
		time.Sleep(10 * time.Minute)
		updates := server.Requests(http.MethodPut)
		require.InDelta(t, 120, updates, 2, "of a leader, 12 a minute")
		require.Equal(t, updates, server.Requests("")-before)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		other, _ := newStore(t, server)
		before = server.Requests("") + 120
		_, err = lease.New(other, cfg).Campaign(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.InDelta(t, 190, server.Requests("")-before, 10, "of a candidate, 19 a minute")
		require.NoError(t, term.Resign(t.Context()))
	})
}

// A reign is what candidates have done.
type reign struct {
	t      *testing.T
	mu     sync.Mutex
	terms  []lease.Term
	vacant time.Duration // the longest time without a leader
	since  time.Time     // when the last leader ended; zero while one leads
}

// begin records a term. No other term may hold, and its epoch is the greatest.
func (r *reign) begin(term lease.Term) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, other := range r.terms {
		if other.Err() == nil {
			r.t.Errorf("%s leads beside %s", term.Holder(), other.Holder())
		}
		if other.Epoch() >= term.Epoch() {
			r.t.Errorf("epoch %d after %d", term.Epoch(), other.Epoch())
		}
	}
	r.terms = append(r.terms, term)
	if !r.since.IsZero() {
		r.vacant = max(r.vacant, time.Since(r.since))
	}
	r.since = time.Time{}
	context.AfterFunc(term.Context(), func() { r.end(term) })
}

// end records the end of a term, or of its leader's work.
func (r *reign) end(term lease.Term) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.terms[len(r.terms)-1] == term && r.since.IsZero() {
		r.since = time.Now()
	}
}

// A fleet is three candidates, each a process of its own.
type fleet struct {
	*reign
	server *kube.Server
	links  []*link
	stop   []context.CancelFunc
	all    sync.WaitGroup
}

var patient = lease.Config{Name: "a", TTL: 15 * time.Second, Poll: 3 * time.Second}

func newFleet(t *testing.T, cfg lease.Config, work func() time.Duration) *fleet {
	f := &fleet{reign: &reign{t: t}, server: new(kube.Server)}
	for _, cfg.Holder = range []string{"0", "1", "2"} {
		store, link := newStore(t, f.server)
		ctx, cancel := context.WithCancel(t.Context())
		f.links, f.stop = append(f.links, link), append(f.stop, cancel)
		c := lease.New(store, cfg)
		c.Observe(func(context.Context, lease.Event) {}) // no warnings
		f.all.Go(func() {
			_ = c.Loop(ctx, func(ctx context.Context, term lease.Term) error {
				f.begin(term)
				select {
				case <-ctx.Done():
				case <-time.After(work()):
				}
				return nil
			})
		})
	}
	return f
}

func forever() time.Duration { return 1000 * time.Hour }

// finish ends the processes.
func (f *fleet) finish() {
	for i, stop := range f.stop {
		f.links[i].set(none)
		stop()
	}
	f.all.Wait()
}

// leader returns the number of the process that leads, or -1.
func (f *fleet) leader() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if last := f.terms[len(f.terms)-1]; last.Err() == nil {
		return int(last.Holder()[0] - '0')
	}
	return -1
}

// How long no process leads, at most, when faults begin at any time between two renewals.
func TestTimeWithoutLeader(t *testing.T) {
	ttl := patient.TTL
	for name, c := range map[string]struct {
		fault    fault         // nil: the leader resigns
		all      bool          // the fault is of all processes
		duration time.Duration // of the fault
		most     time.Duration // without a leader
	}{
		"leader resigns":           {nil, false, time.Minute, patient.Poll * 9 / 8},
		"leader killed or stopped": {hang, false, 2 * time.Minute, ttl + patient.Poll},
		"leader cut off":           {refuse, false, 2 * time.Minute, ttl/10 + patient.Poll + ttl/3},
		"server away for 60s":      {refuse, true, time.Minute, time.Minute},
		"server hangs for 60s":     {hang, true, time.Minute, time.Minute},
		"answers lost for 60s":     {loseAnswer, true, time.Minute, time.Minute + ttl},
	} {
		t.Run(name, func(t *testing.T) {
			var least, most time.Duration
			phases := time.Duration(20)
			if testing.Short() {
				phases = 5
			}
			for i := range phases {
				synctest.Test(t, func(t *testing.T) {
					f := newFleet(t, patient, forever)
					time.Sleep(time.Minute + i*ttl/3/phases)
					leader := f.leader()
					require.GreaterOrEqual(t, leader, 0)
					for n, link := range f.links {
						switch {
						case c.fault == nil && n == leader:
							f.stop[n]()
						case c.fault != nil && (c.all || n == leader):
							link.set(c.fault)
						}
					}
					if strings.Contains(name, "killed") {
						f.end(f.terms[len(f.terms)-1])
					}
					time.Sleep(c.duration)
					for _, link := range f.links {
						link.set(none)
					}
					time.Sleep(time.Minute)
					require.GreaterOrEqual(t, f.leader(), 0)
					least, most = min(least, f.vacant), max(most, f.vacant)
					if i == 0 {
						least = f.vacant
					}
					f.finish()
				})
			}
			t.Logf("%v to %v without a leader", least, most)
			require.LessOrEqual(t, most, c.most)
		})
	}
}

// Whatever happens to requests, at no time do two processes lead, and epochs grow.
func TestRandomFaults(t *testing.T) {
	late := func(request, answer time.Duration) fault {
		return func(r *http.Request, serve func() *http.Response) (*http.Response, error) {
			answers := make(chan *http.Response, 1)
			go func() { // the request arrives even if its caller does not wait any more
				time.Sleep(rand.N(request))
				a := serve()
				time.Sleep(rand.N(answer))
				answers <- a
			}()
			select {
			case a := <-answers:
				return a, nil
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
		}
	}
	faults := []fault{none, none, none, hang, loseAnswer, refuse, late(20*time.Second, 1), late(1, 20*time.Second)}
	terms, rounds := 0, 10
	if testing.Short() {
		rounds = 2
	}
	for range rounds {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(t, patient, func() time.Duration { return rand.N(2 * time.Minute) })
			for range 100 {
				time.Sleep(rand.N(20 * time.Second))
				f.links[rand.N(3)].set(faults[rand.N(len(faults))])
			}
			f.finish()
			time.Sleep(time.Minute) // late requests
			terms += len(f.terms)
		})
	}
	t.Logf("%d terms", terms)
	require.Greater(t, terms, 10*rounds)
}
