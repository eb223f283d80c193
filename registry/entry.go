package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log"
	"math"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// An Entry is a policy in a [Registry]. No function in an Entry's Description is nil. For each function that the policy
// lacks, the Entry has a function that does nothing. If the policy has no Update, the Entry's Update returns an error.
// If the policy's Health panics, the Entry's Health returns a Health with the status Fail. If the policy's Metrics
// panics, the first panic is logged, and the Entry's Metrics returns nil.
type Entry struct {
	policy.Description
	Policy policy.Describer // the policy itself, as passed to Add

	canUpdate bool // whether the policy has an Update
}

// errNoSettings is the error that Update returns if the policy has no Update.
var errNoSettings = errors.New("has no settings that can change")

// newEntry returns the entry of p, whose description is d. No function of the entry is nil.
func newEntry(p policy.Describer, d policy.Description) Entry {
	e := Entry{Description: d, Policy: p, canUpdate: d.Update != nil}
	e.Metrics = recoverMetrics(e.String(), d.Metrics)
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

// recoverMetrics returns a function that calls metrics. If metrics panics, the function returns nil. The reason is the
// same as in recoverHealth. metrics may be nil.
func recoverMetrics(path string, metrics func() []policy.Metric) func() []policy.Metric {
	if metrics == nil {
		return func() []policy.Metric { return nil }
	}
	var logged sync.Once // because metrics are read every second
	return func() []policy.Metric {
		defer func() {
			if v := recover(); v != nil {
				stack := debug.Stack()
				logged.Do(func() { log.Printf("registry: %s: Metrics panicked: %v\n%s", path, v, stack) })
			}
		}()
		return metrics()
	}
}

// recoverHealth returns a function that calls health. If health panics, the function returns a Health that reports the
// panic. The reason is that callers query health on background goroutines, where a panic would end the program. health
// may be nil.
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

// String returns the path of the policy, which identifies it in settings, such as "breaker/users".
func (e Entry) String() string { return e.Kind + "/" + e.Name }

// Settings returns the policy's configuration as a JSON object, or nil if the policy has no configuration.
// The object has the fields that a settings file can hold, with defaults filled in. The constants Unlimited
// and None are written as text, in the form that [Registry.Apply] accepts.
func (e Entry) Settings() []byte {
	if config, ok := e.config(); ok {
		return encode(config)
	}
	return nil
}

// config returns the configuration of the policy, which is a struct. The result is false if the policy has no
// configuration.
func (e Entry) config() (reflect.Value, bool) {
	v := reflect.Indirect(reflect.ValueOf(e.Config()))
	return v, v.Kind() == reflect.Struct
}

// observe calls f with each event of the policy until stop is called. If an event has no kind or no name,
// observe fills in the policy's kind or name.
func (e Entry) observe(f func(context.Context, policy.Event)) (stop func()) {
	return e.Observe(func(ctx context.Context, event policy.Event) {
		event.Kind, event.Name = cmp.Or(event.Kind, e.Kind), cmp.Or(event.Name, e.Name)
		f(ctx, event)
	})
}

// A Member is a policy of a group. A group has one policy for each key.
type Member struct {
	Entry
	Key   string // the text of the member's key in the group
	Calls int64  // the sum of the member's counters named "kind.calls", such as "breaker.calls"

	status policy.HealthStatus
}

// Worst returns at most n members of a group. Members that fail come first, then members with a warning, then
// the others. Among members with the same status, members with more calls come first. Worst returns nil if n
// is not positive or the policy is not a group. The ctx that the Health functions of the members receive is
// canceled after 1 second.
func (e Entry) Worst(n int) []Member {
	if n <= 0 || e.Members == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	var all []Member
	for key, p := range e.Members() {
		all = append(all, newMember(ctx, key, p))
	}
	slices.SortFunc(all, func(a, b Member) int {
		return cmp.Or(cmp.Compare(b.status, a.status), cmp.Compare(b.Calls, a.Calls), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(n, len(all))]
}

// newMember returns p as a member of a group. key is the text of the member's key. The member's Health receives ctx.
func newMember(ctx context.Context, key string, p policy.Describer) Member {
	d := p.Describe()
	m := Member{Entry: newEntry(p, d), Key: key}
	for _, metric := range m.Metrics() {
		name, _, _ := strings.Cut(metric.Name, "{")
		if metric.Counter && name == m.Kind+".calls" {
			m.Calls += int64(min(metric.Value, math.MaxInt64))
		}
	}
	m.status = min(max(m.Health(ctx).Status, policy.Pass), policy.Fail)
	return m
}
