package registry

import (
	"cmp"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
)

// entry returns the entry of a policy; false if it is none that a registry can hold.
func entry(p Policy) (Entry, bool) {
	switch p := p.(type) {
	case observed[retry.Stats, retry.Event]:
		return of("retry", p, retryFigures, retryEvent)
	case observed[retry.BudgetStats, retry.Event]:
		return of("budget", p, budgetFigures, retryEvent)
	case observed[retry.HedgeStats, retry.Event]:
		return of("hedge", p, hedgeFigures, retryEvent)
	case observed[breaker.Stats, breaker.Event]:
		return of("breaker", p, breakerFigures, breakerEvent)
	case observed[breaker.GroupStats, breaker.Event]:
		return group("breaker", p, breakerGroupFigures, breakerEvent)
	case observed[bulkhead.Stats, bulkhead.Event]:
		return of("bulkhead", p, bulkheadFigures, bulkheadEvent)
	case observed[bulkhead.GroupStats, bulkhead.Event]:
		return group("bulkhead", p, bulkheadGroupFigures, bulkheadEvent)
	case observed[throttle.Stats, throttle.Event]:
		return of("throttle", p, throttleFigures, throttleEvent)
	case observed[throttle.GroupStats, throttle.Event]:
		return group("throttle", p, throttleGroupFigures, throttleEvent)
	case observed[throttle.SharedStats, throttle.Event]:
		return of("throttle", p, throttleSharedFigures, throttleEvent)
	case observed[throttle.AdaptiveStats, throttle.Event]:
		return of("throttle", p, throttleAdaptiveFigures, throttleEvent)
	case observed[cacheaside.Stats, cacheaside.Event]:
		return of("cache", p, cacheFigures, cacheEvent)
	case observed[lease.Stats, lease.Event]:
		return of("lease", p, leaseFigures, leaseEvent)
	case observed[saga.Stats, saga.Event]:
		return of("saga", p, sagaFigures, sagaEvent)
	}
	return other(p)
}

// group is of for a Group, which has members.
func group[S, E any](kind string, p observed[S, E], figures func(S, emit), event func(E) Event) (Entry, bool) {
	e, ok := of(kind, p, figures, event)
	e.source.members = func(n int) []Member { return busiest(p, n) }
	return e, ok
}

// busiest returns the n members of a group with the most calls. The type of a group's key
// is known to the group alone, so All and Top are found by reflection.
func busiest(group Policy, n int) []Member {
	var all []Member
	v := reflect.ValueOf(group)
	if top := v.MethodByName("Top"); top.IsValid() { // a throttle.Group, which keeps no policy for a key
		list := top.Call([]reflect.Value{reflect.ValueOf(n)})[0]
		for i := range list.Len() {
			usage := list.Index(i)
			all = append(all, Member{
				Key:   fmt.Sprint(usage.FieldByName("Key").Interface()),
				Calls: usage.FieldByName("Spent").Int() + usage.FieldByName("Refused").Int(),
			})
		}
		return all
	}
	for key, member := range v.MethodByName("All").Call(nil)[0].Seq2() {
		m := Member{Key: fmt.Sprint(key.Interface())}
		switch p := member.Interface().(type) {
		case *breaker.Breaker:
			s := p.Stats()
			m.Policy, m.Calls = p, s.Succeeded+s.Failed+s.Ignored+s.Refused
		case *bulkhead.Bulkhead:
			s := p.Stats()
			m.Policy, m.Calls = p, s.Admitted+s.Refused
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b Member) int {
		return cmp.Or(cmp.Compare(b.Calls, a.Calls), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(n, len(all))]
}

// counter, gauge and seconds emit one figure. Their attrs are keys and values in turn.
func (to emit) counter(name, unit, help string, n int64, attrs ...string) {
	to(Figure{Name: name, Unit: unit, Help: help, Kind: Counter, Attrs: pairs(attrs), Value: float64(n)})
}

func (to emit) gauge(name, unit, help string, v float64, attrs ...string) {
	to(Figure{Name: name, Unit: unit, Help: help, Kind: Gauge, Attrs: pairs(attrs), Value: v})
}

func (to emit) seconds(kind FigureKind, name, help string, d time.Duration, attrs ...string) {
	to(Figure{Name: name, Unit: "s", Help: help, Kind: kind, Attrs: pairs(attrs), Value: d.Seconds()})
}

func pairs(attrs []string) []Attr {
	var all []Attr
	for i := 0; i < len(attrs); i += 2 {
		all = append(all, Attr{attrs[i], attrs[i+1]})
	}
	return all
}

// happened returns an event of what is normal.
func happened[K ~string](kind K, key string, err error, attrs ...slog.Attr) Event {
	return Event{What: string(kind), Key: key, Err: err, Level: slog.LevelDebug, Attrs: attrs}
}

// warn returns e as one that needs attention, if it does.
func (e Event) warn(attention bool) Event {
	if attention {
		e.Level = slog.LevelWarn
	}
	return e
}
