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
)

// A Registry holds the policies of a program. It is safe for concurrent use.
type Registry struct {
	// changing is held while policies and observers are added and removed; mu is taken after it.
	// With mu alone, a policy that has an event while it is being observed would deadlock with
	// an observer that asks the registry.
	changing  sync.Mutex
	observers notify.Observers[Event]
	watching  int               // how many observers there are
	watched   map[string]func() // stop, by path, while there is an observer

	mu      sync.RWMutex
	entries map[string]Entry // by path; changing is held, too, to change it

	applying sync.Mutex
}

// New returns an empty Registry.
func New() *Registry {
	return &Registry{entries: map[string]Entry{}, watched: map[string]func(){}}
}

// Add adds policies, but none without a name, with the name of another of its kind, without a method
// Kind, or that cannot be compared. The error names these.
func (r *Registry) Add(policies ...Policy) error {
	var errs []error
	for _, p := range policies {
		errs = append(errs, r.add(p))
	}
	return errors.Join(errs...)
}

// MustAdd is Add, but panics with the error.
func (r *Registry) MustAdd(policies ...Policy) {
	if err := r.Add(policies...); err != nil {
		panic(err)
	}
}

func (r *Registry) add(p Policy) error {
	e, ok := entryOf(p)
	switch {
	case !ok:
		return fmt.Errorf("registry: a %T does not say what it is: it has no method Kind", p)
	case e.Name == "":
		return fmt.Errorf("registry: a %T without a name", p)
	case !reflect.ValueOf(p).Comparable(): // == would panic in whoever looks for it, such as Remove
		return fmt.Errorf("registry: a %T cannot be compared: add a pointer to it", p)
	}
	r.changing.Lock()
	defer r.changing.Unlock()
	if _, taken := r.entries[e.String()]; taken {
		return fmt.Errorf("registry: %s is there already", e)
	}
	r.change(func() { r.entries[e.String()] = e })
	if r.watching > 0 {
		r.watched[e.String()] = e.observe(r.observers.Tell)
	}
	return nil
}

// Remove removes a policy and reports whether it was there.
func (r *Registry) Remove(p Policy) bool {
	r.changing.Lock()
	defer r.changing.Unlock()
	for path, e := range r.entries {
		if e.Policy == p {
			r.change(func() { delete(r.entries, path) })
			r.unwatch(path)
			return true
		}
	}
	return false
}

func (r *Registry) change(entries func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	entries()
}

// unwatch ends the observation of a policy, if there is one. r.changing is held.
func (r *Registry) unwatch(path string) {
	if stop := r.watched[path]; stop != nil {
		delete(r.watched, path)
		stop()
	}
}

// All returns the policies, by kind and name.
func (r *Registry) All() iter.Seq[Entry] {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Values(slices.SortedFunc(maps.Values(r.entries), func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	}))
}

// Get returns the policy of a kind with a name.
func (r *Registry) Get(kind, name string) (Entry, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	e, ok := r.entries[kind+"/"+name]
	return e, ok
}

// Observe calls f with each event of each policy, those added later included, until stop is called: on
// the goroutine that causes the event, without a lock, perhaps by several at once. f must not block, or
// use Apply, Preview and Reload, which may cause the event.
func (r *Registry) Observe(f func(context.Context, Event)) (stop func()) {
	r.changing.Lock()
	defer r.changing.Unlock()
	remove := r.observers.Observe(f)
	if r.watching++; r.watching == 1 {
		for path, e := range r.entries {
			r.watched[path] = e.observe(r.observers.Tell)
		}
	}
	return sync.OnceFunc(func() {
		r.changing.Lock()
		defer r.changing.Unlock()
		remove()
		if r.watching--; r.watching == 0 {
			for path := range r.entries {
				r.unwatch(path)
			}
		}
	})
}

// Health returns the names of the policies, each with its [Entry.Health]; all are asked at once.
// resiliencehttp.Health(reg) is a handler.
func (r *Registry) Health(ctx context.Context) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		all := slices.Collect(r.All())
		errs := make([]error, len(all))
		var asked sync.WaitGroup
		for i, e := range all { // at once: behind a store that hangs, ctx would end for another that is well
			asked.Go(func() { errs[i] = e.Health(ctx) })
		}
		asked.Wait()
		for i, e := range all {
			if !yield(e.String(), errs[i]) {
				return
			}
		}
	}
}

// String returns all figures as a JSON object of objects: a Registry is an expvar.Var.
func (r *Registry) String() string {
	all := map[string]map[string]float64{}
	for e := range r.All() {
		figures := map[string]float64{}
		for _, f := range e.Figures() {
			figures[f.Name] = finite(f.Value)
		}
		all[e.String()] = figures
	}
	text, err := json.Marshal(all)
	if err != nil {
		return fmt.Sprintf("{%q: %q}", "error", err)
	}
	return string(text)
}

// finite returns v, or 0 for what JSON has no number for.
func finite(v float64) float64 {
	if v-v != 0 {
		return 0
	}
	return v
}
