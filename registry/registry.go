package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"
	"sync"

	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/policy"
)

// A Registry holds policies. It is safe for concurrent use.
type Registry struct {
	// changing is held while policies and observers are added or removed. If both changing and mu are needed, changing is
	// locked first. There are two mutexes because a single one could deadlock: a policy may cause an event while the
	// registry starts to observe the policy, and the observer of the event may read the registry.
	changing  sync.Mutex
	observers notify.Observers[policy.Event]
	observing int               // number of observers
	stops     map[string]func() // functions that end the observation of a policy, by the policy's path

	mu      sync.RWMutex
	entries map[string]Entry // the policies, by path; to write, changing must also be held

	applying sync.Mutex // held during Apply, Preview and Reload
}

// New returns an empty Registry.
func New() *Registry {
	return &Registry{entries: map[string]Entry{}, stops: map[string]func(){}}
}

// Add adds policies. Add rejects a nil policy, a policy without a kind or a name, a policy whose kind and
// name are already registered, and a policy that cannot be compared by ==. The error reports every rejected
// policy. Add adds all policies that it does not reject.
func (r *Registry) Add(policies ...policy.Describer) error {
	var errs []error
	for _, p := range policies {
		errs = append(errs, r.add(p))
	}
	return errors.Join(errs...)
}

// MustAdd is like [Registry.Add], but panics with the error.
func (r *Registry) MustAdd(policies ...policy.Describer) {
	if err := r.Add(policies...); err != nil {
		panic(err)
	}
}

func (r *Registry) add(p policy.Describer) error {
	if v := reflect.ValueOf(p); p == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		return errors.New("registry: policy is nil")
	}
	d := p.Describe()
	switch {
	case d.Kind == "":
		return fmt.Errorf("registry: %T has no kind", p)
	case d.Name == "":
		return fmt.Errorf("registry: %T has no name", p)
	case !reflect.ValueOf(p).Comparable(): // otherwise == would panic in Remove
		return fmt.Errorf("registry: %T cannot be compared: add a pointer to it", p)
	}
	e := newEntry(p, d)
	r.changing.Lock()
	defer r.changing.Unlock()
	if _, taken := r.entries[e.String()]; taken {
		return fmt.Errorf("registry: %s is already registered", e)
	}
	r.change(func() { r.entries[e.String()] = e })
	if r.observing > 0 {
		r.stops[e.String()] = e.observe(r.observers.Tell)
	}
	return nil
}

// Remove removes a policy, and reports whether it was registered.
func (r *Registry) Remove(p policy.Describer) bool {
	r.changing.Lock()
	defer r.changing.Unlock()
	for path, e := range r.entries {
		if e.Policy == p {
			r.change(func() { delete(r.entries, path) })
			r.stopObserving(path)
			return true
		}
	}
	return false
}

// change locks mu and calls write, which writes to r.entries.
func (r *Registry) change(write func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	write()
}

// stopObserving ends the observation of the policy with the given path, if the policy is observed. r.changing is held.
func (r *Registry) stopObserving(path string) {
	if stop := r.stops[path]; stop != nil {
		delete(r.stops, path)
		stop()
	}
}

// All iterates over the policies that are registered when All is called, sorted by kind and name.
func (r *Registry) All() iter.Seq[Entry] {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Values(slices.SortedFunc(maps.Values(r.entries), func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	}))
}

// Get returns the policy with the given kind and name. If no policy has that kind and name, Get returns
// false.
func (r *Registry) Get(kind, name string) (Entry, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	e, ok := r.entries[kind+"/"+name]
	return e, ok
}

// Observe calls f with each event of each policy until stop is called. Observe includes the events of policies that are
// added later. f runs on the goroutine that causes the event, while the policy holds no lock. f may run on several
// goroutines at the same time. f must not block. f must not call Apply, Preview or Reload. Otherwise f would deadlock
// if the event happens within one of these methods.
func (r *Registry) Observe(f func(context.Context, policy.Event)) (stop func()) {
	r.changing.Lock()
	defer r.changing.Unlock()
	remove := r.observers.Observe(f)
	if r.observing++; r.observing == 1 {
		for path, e := range r.entries {
			r.stops[path] = e.observe(r.observers.Tell)
		}
	}
	return sync.OnceFunc(func() {
		r.changing.Lock()
		defer r.changing.Unlock()
		remove()
		if r.observing--; r.observing == 0 {
			for path := range r.entries {
				r.stopObserving(path)
			}
		}
	})
}

// Health returns the health of each policy. The key of a policy's health is the policy's path, "kind/name". The
// policies have the order of [Registry.All]. Each iteration queries the health of all policies again, concurrently.
// resiliencehttp.Health(reg) is an HTTP handler that serves the health.
func (r *Registry) Health(ctx context.Context) iter.Seq2[string, policy.Health] {
	return func(yield func(string, policy.Health) bool) {
		all := slices.Collect(r.All())
		healths := make([]policy.Health, len(all))
		var queries sync.WaitGroup
		for i, e := range all { // concurrently, because a store that hangs must not delay the other policies
			queries.Go(func() { healths[i] = e.Health(ctx) })
		}
		queries.Wait()
		for i, e := range all {
			if !yield(e.String(), healths[i]) {
				return
			}
		}
	}
}

// String returns all metrics as a JSON object. The key of a policy is its path, "kind/name", and the value is
// an object that maps each metric's name to its value. Values that JSON cannot represent are written as 0.
// Because a Registry has the method String, it is an expvar.Var.
func (r *Registry) String() string {
	all := map[string]map[string]float64{}
	for e := range r.All() {
		metrics := map[string]float64{}
		for _, m := range e.Metrics() {
			metrics[m.Name] = finite(m.Value)
		}
		all[e.String()] = metrics
	}
	text, err := json.Marshal(all)
	if err != nil {
		return fmt.Sprintf("{%q: %q}", "error", err)
	}
	return string(text)
}

// finite returns v, or 0 if v is infinite or not a number.
func finite(v float64) float64 {
	if v-v != 0 {
		return 0
	}
	return v
}
