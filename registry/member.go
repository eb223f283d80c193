package registry

import (
	"cmp"
	"fmt"
	"iter"
	"reflect"
	"slices"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/retry"
)

// A Member is one key of a Group.
type Member struct {
	Key   string
	Calls int64 // made or refused, since the member came; in a throttle.Group tokens spent and calls refused; in a retry.BudgetGroup retries that were asked for
	// Policy is the member itself; nil where it is not a policy of its own, as in a
	// throttle.Group.
	Policy Policy

	rank int // of its health, the worst first
}

// Figures returns the figures of the member's Policy. A member without one has none.
func (m Member) Figures() iter.Seq[Figure] {
	e, ok := entry(m.Policy)
	if !ok {
		return func(func(Figure) bool) {}
	}
	return e.Figures()
}

// Members returns n members of a Group: first those that [Entry.Health] would say fail, then
// the others with which something is wrong, then those that are well, and of each the busiest
// first. It returns nil for a policy that is no Group. It looks at all members.
func (e Entry) Members(n int) []Member {
	if e.source.members == nil || n <= 0 {
		return nil
	}
	return e.source.members(n)
}

// group is of for a Group, which has members.
func group[S, E any](kind string, p observed[S, E], figures func(S, emit), event func(E) Event) (Entry, bool) {
	e, ok := of(kind, p, figures, event)
	e.source.members = func(n int) []Member { return foremost(p, n) }
	return e, ok
}

// foremost returns the first n members of a group. The type of a group's key is known to the
// group alone, so All is found by reflection.
func foremost(group Policy, n int) []Member {
	var all []Member
	for key, member := range reflect.ValueOf(group).MethodByName("All").Call(nil)[0].Seq2() {
		m := Member{Key: fmt.Sprint(key.Interface())}
		switch p := member.Interface().(type) {
		case *breaker.Breaker:
			s := p.Stats()
			m.Policy, m.Calls, m.rank = p, s.Succeeded+s.Failed+s.Ignored+s.Refused, rank(breakerHealth(s))
		case *retry.Budget:
			s := p.Stats()
			m.Policy, m.Calls, m.rank = p, s.Allowed+s.OverBudget, rank(budgetHealth(s))
		case *bulkhead.Bulkhead:
			s := p.Stats()
			m.Policy, m.Calls, m.rank = p, s.Admitted+s.Refused, rank(bulkheadHealth(s))
		default: // the Usage of a throttle.Group, which keeps no policy for a key
			m.Calls = member.FieldByName("Spent").Int() + member.FieldByName("Refused").Int()
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b Member) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(b.Calls, a.Calls), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(n, len(all))]
}

// rank returns where a member comes by what is wrong with it.
func rank(ill *HealthError) int {
	switch {
	case ill == nil:
		return 2
	case ill.Fails:
		return 0
	}
	return 1
}
