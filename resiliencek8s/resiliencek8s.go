// Package resiliencek8s provides a [lease.Store] in Kubernetes 1.14 or later, through k8s.io/client-go. With this
// store, package lease elects a leader without a database. Each lease is an object of kind Lease
// (coordination.k8s.io/v1).
//
//	cfg, err := rest.InClusterConfig()
//	...
//	cfg.NextProtos = []string{"http/1.1"} // see "Connections"
//	client, err := coordinationv1.NewForConfig(cfg) // of k8s.io/client-go/kubernetes/typed/coordination/v1
//	...
//	store := resiliencek8s.New(client.Leases(namespace))
//	billing := lease.New(store, lease.Config{Name: "billing", Poll: 3 * time.Second})
//	err = billing.Loop(ctx, func(ctx context.Context, term lease.Term) error { // while this process leads
//		...
//	})
//
// The program's service account needs the three verbs below. With resourceNames, you can restrict the verbs get and
// update to some leases. If an administrator creates the Lease objects, with an empty spec, the program does not need
// the verb create.
//
//	apiVersion: rbac.authorization.k8s.io/v1
//	kind: Role
//	metadata: {name: leases}
//	rules:
//	- apiGroups: [coordination.k8s.io]
//	  resources: [leases]
//	  verbs: [get, create, update]
//
// # Objects
//
// The object of the lease "billing" is lease/billing. If a lease's name is not a lower-case DNS subdomain, as with
// "Billing", the object's name is "sha256-" followed by the hash of the lease's name. The annotation resiliencek8s/name
// of the object has the lease's name.
//
// The command kubectl get lease shows the holder. The object's spec has the holder, the TTL, the times of the election
// and of the last renewal, and the number of elections. The times in the spec are from the leader's clock, and are only
// for information.
//
// The epoch (a 64-bit number), the term's token and the last run of Every are annotations. To end a term manually,
// delete the annotation resiliencek8s/token:
//
//	kubectl annotate lease billing resiliencek8s/token-
//
// The leader notices the end of its term at its next renewal, within a third of the TTL. Before the leader notices,
// another process may already lead, with a greater epoch. Deleting the Lease object also ends the term, and loses the
// time of the last run. After that, the next epoch is greater unless the next leader's clock is behind the clock of a
// former leader. The Store bases epochs on the leader's clock.
//
// A Store never deletes Lease objects, so do not use arbitrary names of leases, such as names from requests.
//
// # Time
//
// The API server does not report its time. Therefore each process observes the lease, as in client-go's package
// leaderelection. A process treats a lease as ended when the process has observed no new write of the lease for a full
// TTL. A process that has just started therefore waits for a full TTL before it takes over the lease of a leader that
// has died. During this wait, the process's [lease.Candidate.Status] reports that the lease is held. A released lease
// is free immediately.
//
// Create only one Store per process, because a Store remembers its observations. A TTL is rounded up to whole seconds.
//
// Kubernetes has no transactions, so [lease.Term.Fence] returns [lease.ErrNoFence]. If the leader's work updates a
// Kubernetes object, store the epoch in that object instead. First, the leader reads the object. If the object has a
// greater epoch, the leader stops. Otherwise, the leader updates the object. The update contains the leader's epoch and
// the resourceVersion from the read. The package's example updates an object in this way.
//
// # Cost
//
// A leader sends one update request three times per TTL, which is 12 requests per minute by default. A waiting
// candidate sends one get request at each Poll of [lease.Config], and some more requests at an election. With a Poll of
// 3 seconds, a waiting candidate sends 19 requests per minute. For comparison, client-go's leaderelection sends 19
// requests per minute while it waits, and 29 while it leads.
//
// # Connections
//
// If the API server cannot be reached, the leader's term ends before the lease ends, and no process leads.
//
// Use HTTP/1.1, as in the example above. HTTP/2 sends all requests on one connection. client-go notices a half-open
// HTTP/2 connection only after 45 seconds, which is longer than the default TTL, so the leader loses its term. With
// HTTP/1.1, a request that times out closes its connection, and the next request uses another one. The first try of a
// renewal has a timeout of an eighth of the TTL, and each later try has a timeout of a quarter of the TTL. Therefore,
// if the first try times out, a later try on a new connection can still renew the lease before the term ends.
//
// Create a separate client for the Store. By default, a client of client-go sends at most 5 requests per second, so
// other requests of the program could delay renewals.
//
// # Errors
//
// A Store wraps the API server's errors. Use the functions of k8s.io/apimachinery/pkg/api/errors: IsForbidden reports
// missing rights, and IsNotFound reports a namespace that does not exist. If another program uses the same Lease
// object, for example with client-go's leaderelection, the Store does not change the object. The Store's error reports
// that the object has a holder, and no epoch or no token.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package resiliencek8s

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	coordination "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	client "k8s.io/client-go/kubernetes/typed/coordination/v1"

	"github.com/go-resilience/resilience/lease"
)

// A Store is a [lease.Store] in the Lease objects of a namespace. A Store is safe for concurrent use.
type Store struct {
	leases client.LeaseInterface

	mu    sync.Mutex
	known map[string]version // the last version that was read or written, by the name of the lease
}

var _ lease.Store = (*Store)(nil)

// New returns a Store. New sends no request. New panics if leases is nil.
func New(leases client.LeaseInterface) *Store {
	if leases == nil {
		panic("resiliencek8s: LeaseInterface is nil: must be set")
	}
	return &Store{leases: leases, known: make(map[string]version)}
}

// A version is a version of a Lease object, with the record that it contains.
type version struct {
	lease.Record
	object *coordination.Lease // the object from the API server, which must not be changed; nil if there is none
	runID  string              // identifies the call that recorded LastRun
	seen   time.Time           // the time at which this process first saw the version
}

// The keys of the annotations of a Lease object.
const (
	tokenKey = "resiliencek8s/token"
	epochKey = "resiliencek8s/epoch"
	runKey   = "resiliencek8s/run"
	runIDKey = "resiliencek8s/run-id"
	nameKey  = "resiliencek8s/name"
)

// objectName returns the name of a lease's object.
func objectName(name string) string {
	if len(validation.IsDNS1123Subdomain(name)) == 0 && !strings.HasPrefix(name, "sha256-") {
		return name
	}
	return fmt.Sprintf("sha256-%x", sha256.Sum256([]byte(name)))
}

// parse returns the version of an object, with the current time as the time when it was first seen.
func parse(name string, object *coordination.Lease) (v version, err error) {
	a := object.Annotations
	number := func(key string) (n int64) {
		if a[key] != "" && err == nil {
			if n, err = strconv.ParseInt(a[key], 10, 64); err != nil {
				err = fmt.Errorf("annotation %s of lease/%s: %w", key, object.Name, err)
			}
		}
		return n
	}
	v = version{object: object, runID: a[runIDKey], seen: time.Now(), Record: lease.Record{
		Name: name, Token: a[tokenKey], Epoch: number(epochKey), LastRun: number(runKey),
	}}
	if holder := object.Spec.HolderIdentity; holder != nil && *holder != "" {
		token, exists := a[tokenKey]
		if err == nil && (a[epochKey] == "" || exists && token == "") { // Release empties the token and the holder
			err = fmt.Errorf("lease/%s belongs to another program: it has the holder %q, and no epoch or no token",
				object.Name, *holder)
		}
		if v.Token != "" {
			v.Holder = *holder
		}
	}
	return v, err
}

// measured returns v with Left set to the remaining time of its term.
func (v version) measured() version {
	if v.object != nil && v.object.Spec.LeaseDurationSeconds != nil && v.Token != "" {
		ttl := time.Duration(*v.object.Spec.LeaseDurationSeconds) * time.Second
		v.Left = max(time.Until(v.seen.Add(ttl)), 0)
	}
	return v
}

// learn returns the version of an object from the API server. If this process has seen the version before, the TTL
// counts from the time when it was first seen.
func (s *Store) learn(name string, object *coordination.Lease) (version, error) {
	v, err := parse(name, object)
	s.mu.Lock()
	defer s.mu.Unlock()
	last, ok := s.known[name]
	switch {
	case err != nil || v.Token == "":
		delete(s.known, name) // a lease that is not held needs no memory
	case ok && last.object.ResourceVersion == object.ResourceVersion:
		v = last
	default:
		s.known[name] = v
	}
	return v.measured(), err
}

func (s *Store) read(ctx context.Context, name string) (version, error) {
	object, err := s.leases.Get(ctx, objectName(name), meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		return version{Record: lease.Record{Name: name}}, nil
	}
	if err != nil {
		return version{}, err
	}
	return s.learn(name, object)
}

// write replaces version v of the object by next. Unless ttl is 0, it also writes a new TTL. conflict reports whether
// another process has changed, created or deleted the object since v was read.
func (s *Store) write(
	ctx context.Context, v, next version, ttl time.Duration,
) (written lease.Record, conflict bool, err error) {
	object := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: objectName(v.Name)}}
	if v.object != nil {
		object = v.object.DeepCopy()
	}
	if object.Annotations == nil {
		object.Annotations = make(map[string]string)
	}
	object.Annotations[epochKey] = strconv.FormatInt(next.Epoch, 10)
	object.Annotations[tokenKey] = next.Token
	if next.LastRun != 0 {
		object.Annotations[runKey], object.Annotations[runIDKey] = strconv.FormatInt(next.LastRun, 10), next.runID
	}
	if object.Name != v.Name {
		object.Annotations[nameKey] = v.Name
	}
	spec, now := &object.Spec, meta.NowMicro()
	spec.RenewTime, spec.HolderIdentity = &now, &next.Holder
	if ttl > 0 {
		spec.LeaseDurationSeconds = new(int32(min((ttl-1)/time.Second+1, math.MaxInt32)))
	}
	if next.Epoch != v.Epoch {
		spec.AcquireTime = &now
		transitions := int32(-1) // the first term does not count as a transition
		if spec.LeaseTransitions != nil {
			transitions = *spec.LeaseTransitions
		}
		spec.LeaseTransitions = new(min(transitions, math.MaxInt32-1) + 1)
	}
	if v.object == nil {
		object, err = s.leases.Create(ctx, object, meta.CreateOptions{})
	} else {
		object, err = s.leases.Update(ctx, object, meta.UpdateOptions{})
	}
	if err != nil {
		gone := apierrors.IsNotFound(err) && v.object != nil
		return next.Record, gone || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err), err
	}
	next, err = s.learn(v.Name, object)
	return next.Record, false, err
}

// change reads the lease, calls decide to change the version, and writes the result. If another process has changed the
// lease in between, change starts again. If decide returns false, change writes nothing, and returns decide's error.
func (s *Store) change(
	ctx context.Context, method, name string, ttl time.Duration, decide func(*version) (bool, error),
) (lease.Record, error) {
	s.mu.Lock()
	v, known := s.known[name]
	s.mu.Unlock()
	for ; ; known = false {
		var err error
		if !known {
			v, err = s.read(ctx, name)
		}
		if err != nil {
			return v.Record, wrap(method, err)
		}
		next := v.measured()
		write, err := decide(&next)
		if known && !write {
			continue // decide again with the version that the API server has now
		}
		if !write {
			return next.Record, err
		}
		if written, conflict, err := s.write(ctx, v, next, ttl); !conflict {
			return written, wrap(method, err)
		}
	}
}

// Acquire implements [lease.Store].
func (s *Store) Acquire(ctx context.Context, req lease.Request) (lease.Record, error) {
	return s.change(ctx, "acquire", req.Name, req.TTL, func(v *version) (bool, error) {
		if !v.Held() {
			// The epoch is based on the time, because the epoch must grow even if the object was deleted.
			v.Token, v.Holder, v.Epoch = req.Token, req.Holder, max(v.Epoch+1, time.Now().UnixMicro())
		}
		return v.Token == req.Token, nil
	})
}

// Renew implements [lease.Store].
func (s *Store) Renew(ctx context.Context, req lease.Request) error {
	id := rand.Text()
	_, err := s.change(ctx, "renew", req.Name, req.TTL, func(v *version) (bool, error) {
		switch {
		case v.Token != req.Token:
			return false, lease.ErrLost
		case req.Run != 0 && v.runID == id: // an earlier try of this call, which client-go has repeated, has recorded the run
			return false, nil
		case req.Run != 0 && req.Run <= v.LastRun:
			return false, lease.ErrRunTaken
		case req.Run != 0:
			v.LastRun, v.runID = req.Run, id
		}
		return true, nil
	})
	return err
}

// Release implements [lease.Store].
func (s *Store) Release(ctx context.Context, name, token string) error {
	_, err := s.change(ctx, "release", name, 0, func(v *version) (bool, error) {
		owns := v.Token == token
		v.Token, v.Holder = "", ""
		return owns, nil
	})
	return err
}

// Load implements [lease.Store].
func (s *Store) Load(ctx context.Context, name string) (lease.Record, error) {
	v, err := s.read(ctx, name)
	return v.Record, wrap("load", err)
}

func wrap(method string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("resiliencek8s: %s: %w", method, err)
}
