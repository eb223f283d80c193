package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/go-resilience/resilience/policy"
)

// An Entry is a policy in a [Registry]. Every function of its Description can be called: one that the policy
// lacks does nothing, and Update then returns an error. A panic in Health is returned as a Health with the
// status Fail.
type Entry struct {
	policy.Description
	Policy policy.Describer // the policy itself, as it was added

	canUpdate bool // the policy has an Update
}

// errNoSettings is the error of Update for a policy without one.
var errNoSettings = errors.New("has no settings that can change")

// newEntry returns the entry of a policy, in which no function is nil.
func newEntry(p policy.Describer, d policy.Description) Entry {
	e := Entry{Description: d, Policy: p, canUpdate: d.Update != nil}
	if d.Metrics == nil {
		e.Metrics = func() []policy.Metric { return nil }
	}
	e.Health = recoverHealth(e.String(), d.Health)
	if d.Config == nil {
		e.Config = func() any { return nil }
	}
	if d.Update == nil {
		e.Update = func(bool, func(any) error) error { return errNoSettings }
	}
	if d.Observe == nil {
		e.Observe = func(func(context.Context, policy.Event)) func() { return func() {} }
	}
	if d.Members == nil {
		e.Members = func() iter.Seq2[string, policy.Describer] { return func(func(string, policy.Describer) bool) {} }
	}
	if d.InUse == nil {
		e.InUse = func() bool { return false }
	}
	return e
}

// recoverHealth returns a Health function that reports a panic of health, which may be nil. Callers read health
// in the background, where a panic would end the program.
func recoverHealth(path string, health func(context.Context) policy.Health) func(context.Context) policy.Health {
	if health == nil {
		return func(context.Context) policy.Health { return policy.Health{} }
	}
	return func(ctx context.Context) (h policy.Health) {
		defer func() {
			if v := recover(); v != nil {
				err := fmt.Errorf("registry: %s: Health panicked: %v", path, v)
				h = policy.Health{Status: policy.Fail, State: "panicked", Err: err}
			}
		}()
		return health(ctx)
	}
}

// String returns the path of the policy in settings: "breaker/users".
func (e Entry) String() string { return e.Kind + "/" + e.Name }

// Settings returns the configuration as a JSON object with the fields that a settings file can hold and their
// defaults, or nil if the policy has none. The constants Unlimited and None are written as text, as in
// [Registry.Apply].
func (e Entry) Settings() []byte {
	if config, ok := e.config(); ok {
		return encode(config)
	}
	return nil
}

// config returns the configuration of the policy, a struct, or false if it has none.
func (e Entry) config() (reflect.Value, bool) {
	v := reflect.Indirect(reflect.ValueOf(e.Config()))
	return v, v.Kind() == reflect.Struct
}

// observe calls f with each event of the policy until stop is called. It fills in the kind and name of an event
// whose policy left them out.
func (e Entry) observe(f func(context.Context, policy.Event)) (stop func()) {
	return e.Observe(func(ctx context.Context, event policy.Event) {
		event.Kind, event.Name = cmp.Or(event.Kind, e.Kind), cmp.Or(event.Name, e.Name)
		f(ctx, event)
	})
}

// A Member is a member of a group.
type Member struct {
	Entry
	Key   string // the text of its key in the group
	Calls int64  // the sum of its counters "kind.calls"

	status policy.HealthStatus
}

// Worst returns at most n members of a group: first those that fail, then those with a warning, then the others;
// among members with the same status, those with more calls come first. It returns nil if n is not positive or
// the policy is not a group.
func (e Entry) Worst(n int) []Member {
	if n <= 0 || e.Members == nil {
		return nil
	}
	var all []Member
	for key, p := range e.Members() {
		all = append(all, newMember(key, p))
	}
	slices.SortFunc(all, func(a, b Member) int {
		return cmp.Or(cmp.Compare(b.status, a.status), cmp.Compare(b.Calls, a.Calls), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(n, len(all))]
}

// newMember returns the member of a group with a key.
func newMember(key string, p policy.Describer) Member {
	d := p.Describe()
	m := Member{Entry: newEntry(p, d), Key: key}
	for _, metric := range m.Metrics() {
		name, _, _ := strings.Cut(metric.Name, "{")
		if metric.Counter && name == m.Kind+".calls" {
			m.Calls += int64(min(metric.Value, math.MaxInt64))
		}
	}
	m.status = min(max(m.Health(context.Background()).Status, policy.Pass), policy.Fail)
	return m
}
