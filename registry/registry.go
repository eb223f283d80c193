package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/go-resilience/resilience/internal/notify"
)

// A Policy is any policy of this module: a Retrier, Budget, BudgetGroup or Hedger of
// package retry, a Breaker, a Bulkhead, a Limiter, Shared or Adaptive of package throttle,
// a Group of package breaker, bulkhead or throttle, a Cache, a Candidate of package lease,
// a saga's Runner, or the pool of a database, resiliencesql.Pool.
//
// A policy of other origin needs a method Kind() string besides Name. With the methods
// Config() C and Update(func(*C)) error, for a struct C, it has settings; a method
// Validate() error of C is asked before Update is called. With Figures() iter.Seq[Figure]
// it has figures, and with Observe(func(context.Context, Event)) (stop func()) it has
// events. A faults.Script is such a policy. A method that panics, or that does not return
// within five seconds, is as one that is not there; of Update that is an error.
//
// It is an alias of an unnamed type, so that a function that knows nothing of this package
// can take [Registry.MustAdd]: resiliencehttp.ClientConfig.Register does.
type Policy = interface {
	Name() string
}

// A Registry holds the policies of a program. Make one with [New]. It is safe for
// concurrent use.
type Registry struct {
	// changing is held, before mu, while policies and observers come and go. A policy that is
	// observed then may take its time, or tell an observer that asks the registry.
	changing  sync.Mutex
	observers notify.Observers[Event]
	watching  int // observers that are there

	mu      sync.RWMutex
	entries map[string]Entry // by path; changed by who holds changing too
	ordered []Entry          // the same, by kind and name; nil until it is asked for, never changed

	applying sync.Mutex
}

// New returns an empty Registry.
func New() *Registry {
	return &Registry{entries: map[string]Entry{}}
}

// An Entry is a policy in a [Registry].
type Entry struct {
	// Kind is "retry", "budget", "hedge", "breaker", "bulkhead", "throttle", "cache",
	// "lease", "saga" or "pool", or what the method Kind of any other policy returns. A Group has
	// the kind of its members.
	Kind string
	// Name is the name of the policy, unique within its kind.
	Name string
	// Policy is the policy itself.
	Policy Policy

	source *source
}

// path returns the name of the entry in settings.
func (e Entry) path() string { return e.Kind + "/" + e.Name }

// String returns the kind and the name: "breaker/users".
func (e Entry) String() string { return e.path() }

// Figures returns the figures of the policy. A Group's are those of its members added
// up, those it has evicted included.
func (e Entry) Figures() iter.Seq[Figure] {
	return func(yield func(Figure) bool) {
		more := true
		e.source.figures(func(f Figure) { more = more && yield(f) })
	}
}

// Add adds policies. It does not add a policy without a name, with the name of another
// policy of its kind, of a type that is not a [Policy], or a value that cannot be compared,
// such as a struct with a map. The error names each of these; the others are added.
func (r *Registry) Add(policies ...Policy) error {
	var errs []error
	for _, p := range policies {
		if err := r.add(p); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// MustAdd is like [Registry.Add] but panics with the error.
func (r *Registry) MustAdd(policies ...Policy) {
	if err := r.Add(policies...); err != nil {
		panic(err)
	}
}

func (r *Registry) add(p Policy) error {
	e, ok := entry(p)
	switch {
	case !ok:
		return fmt.Errorf("registry: a %T is not a policy of this module", p)
	case e.Name == "":
		return fmt.Errorf("registry: a %T without a name", p)
	case !reflect.ValueOf(p).Comparable(): // == would panic in whoever looks for it, such as Remove
		return fmt.Errorf("registry: a %T cannot be compared: add a pointer to it", p)
	}
	r.changing.Lock()
	defer r.changing.Unlock()
	if _, taken := r.entries[e.path()]; taken {
		return fmt.Errorf("registry: %s is there already", e.path())
	}
	r.change(func() { r.entries[e.path()] = e })
	if r.watching > 0 {
		r.watch(e)
	}
	return nil
}

// Remove removes a policy and reports whether it was there. Observers of the registry see
// no more events of it.
func (r *Registry) Remove(p Policy) bool {
	r.changing.Lock()
	defer r.changing.Unlock()
	for path, e := range r.entries {
		if e.Policy == p {
			e.unwatch()
			r.change(func() { delete(r.entries, path) })
			return true
		}
	}
	return false
}

func (r *Registry) change(entries func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	entries()
	r.ordered = nil
}

// All returns the policies, ordered by kind and name. Policies may be added and removed
// meanwhile.
func (r *Registry) All() iter.Seq[Entry] {
	return slices.Values(r.sorted())
}

func (r *Registry) sorted() []Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ordered == nil {
		r.ordered = slices.SortedFunc(maps.Values(r.entries), func(a, b Entry) int {
			return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
		})
	}
	return r.ordered
}

// Get returns the policy of a kind with a name. It is for tools that take the name from
// outside the program; a program passes its policies to where they are used.
func (r *Registry) Get(kind, name string) (Entry, bool) {
	return r.find(kind + "/" + name)
}

func (r *Registry) find(path string) (Entry, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	e, ok := r.entries[path]
	return e, ok
}

// Observe calls f with each event of each policy from now on, those added later included,
// until stop is called. f is called as hooks are: by the goroutine that causes the event,
// without a lock, perhaps by several at once. f must not block.
func (r *Registry) Observe(f func(context.Context, Event)) (stop func()) {
	r.changing.Lock()
	defer r.changing.Unlock()
	remove := r.observers.Observe(f)
	r.watching++
	if r.watching == 1 {
		for _, e := range r.entries {
			r.watch(e)
		}
	}
	return sync.OnceFunc(func() { r.unobserve(remove) })
}

func (r *Registry) unobserve(remove func()) {
	r.changing.Lock()
	defer r.changing.Unlock()
	remove()
	r.watching--
	if r.watching == 0 {
		for _, e := range r.entries {
			e.unwatch()
		}
	}
}

// watch and unwatch run under changing.
func (r *Registry) watch(e Entry) {
	e.source.stop = e.source.observe(r.observers.Tell)
}

func (e Entry) unwatch() {
	if e.source.stop != nil {
		e.source.stop()
		e.source.stop = nil
	}
}

// String returns all figures as a JSON object of objects, which makes a Registry an
// expvar.Var: expvar.Publish("resilience", reg).
func (r *Registry) String() string {
	var b strings.Builder
	b.WriteByte('{')
	for i, e := range r.sorted() {
		if i > 0 {
			b.WriteString(", ")
		}
		b.Write(quote(e.path()))
		b.WriteString(": {")
		first := true
		for f := range e.Figures() {
			if !first {
				b.WriteString(", ")
			}
			first = false
			b.Write(quote(f.path()))
			b.WriteString(": ")
			b.Write(quote(f.Value))
		}
		b.WriteByte('}')
	}
	b.WriteByte('}')
	return b.String()
}
