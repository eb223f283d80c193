package registry

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
)

// A Member is one key of a Group.
type Member struct {
	Key    string
	Calls  int64  // in its figure "kind.calls"
	Policy Policy // nil in a throttle.Group

	rank int // of its health, the worst first
}

// Figures returns the figures of the Policy, if there is one.
func (m Member) Figures() []Figure {
	if m.Policy == nil {
		return nil
	}
	e, _ := entryOf(m.Policy)
	return e.Figures()
}

// Members returns at most n members of a Group: those that fail first, then the others with which
// something is wrong, and of each the busiest first. A Group is a policy with a method All, which
// returns an iter.Seq2 of keys and members.
func (e Entry) Members(n int) []Member {
	method := reflect.ValueOf(e.Policy).MethodByName("All") // its type depends on that of the keys
	if n <= 0 || !method.IsValid() || method.Type().NumIn() != 0 ||
		method.Type().NumOut() != 1 || !method.Type().Out(0).CanSeq2() {
		return nil
	}
	var all []Member
	for key, value := range method.Call(nil)[0].Seq2() {
		all = append(all, memberOf(fmt.Sprint(key.Interface()), value))
	}
	slices.SortFunc(all, func(a, b Member) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(b.Calls, a.Calls), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(n, len(all))]
}

func memberOf(key string, value reflect.Value) Member {
	m := Member{Key: key, rank: 2}
	p, ok := value.Interface().(Policy)
	e, described := Entry{}, false
	if ok {
		e, described = entryOf(p)
	}
	if !described {
		return m
	}
	m.Policy = p
	for _, f := range e.Figures() {
		if strings.HasPrefix(f.Name, e.Kind+".calls") && f.Counter {
			m.Calls += int64(min(f.Value, math.MaxInt64))
		}
	}
	if err := e.Health(context.Background()); err != nil {
		m.rank = 1
		if f, ok := err.(interface{ Failed() bool }); ok && f.Failed() {
			m.rank = 0
		}
	}
	return m
}
