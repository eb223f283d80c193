package console

import (
	"slices"

	"github.com/go-resilience/resilience/registry"
)

const (
	sagaKind  = "saga"
	leaseKind = "lease"
)

// rules say which figures of a kind of policy are its calls, and what its state is called.
type rules struct {
	order    int // in a call, the outermost first
	calls    []match
	failed   []match // of the calls
	refused  []match // of the calls
	well     string  // the state when nothing is wrong
	failing  string  // when calls fail
	refusing string  // when calls are refused
}

// A match admits the figures of a name whose attribute key has one of values.
type match struct {
	name, key string
	values    []string
}

func (m match) admits(f registry.Figure) bool {
	if f.Name != m.name {
		return false
	}
	return m.key == "" || slices.ContainsFunc(f.Attrs, func(a registry.Attr) bool {
		return a.Key == m.key && slices.Contains(m.values, a.Value)
	})
}

func figure(name string) []match { return []match{{name: name}} }

func with(name, key string, values ...string) []match { return []match{{name, key, values}} }

var kinds = map[string]*rules{
	"cache": {order: 0, well: "serving", failing: "loads fail", refusing: "loads refused",
		calls:   figure("cache.request.count"),
		failed:  with("cache.load.count", "outcome", "failed", "panicked", "timed_out"),
		refused: with("cache.load.count", "outcome", "refused")},
	"retry": {order: 1, well: "steady", failing: "giving up",
		calls:  figure("retry.call.count"),
		failed: with("retry.call.count", "outcome", "exhausted", "permanent", "over_budget", "deadline")},
	"budget": {order: 2, well: "in budget", refusing: "spent",
		calls:   figure("budget.retry.count"),
		refused: with("budget.retry.count", "outcome", "over_budget")},
	"hedge": {order: 3, well: "steady", failing: "failing",
		calls:  figure("hedge.call.count"),
		failed: with("hedge.call.count", "outcome", "failed")},
	"breaker": {order: 4, well: "closed", failing: "closed", refusing: "refusing",
		calls:   figure("breaker.call.count"),
		failed:  with("breaker.call.count", "outcome", "failure"),
		refused: with("breaker.call.count", "outcome", "refused")},
	"throttle": {order: 5, well: "passing", refusing: "limiting",
		calls:   figure("throttle.call.count"),
		refused: with("throttle.call.count", "outcome", "refused")},
	"bulkhead": {order: 6, well: "free", refusing: "refusing",
		calls:   figure("bulkhead.call.count"),
		refused: with("bulkhead.call.count", "outcome", "refused")},
	leaseKind: {order: 7, well: "steady", failing: "store fails",
		calls:  append(figure("lease.ask.count"), figure("lease.renewal.count")...),
		failed: figure("lease.store.error.count")},
	sagaKind: {order: 8, well: "running", failing: "steps fail", refusing: "steps refused",
		calls:   figure("saga.step.count"),
		failed:  with("saga.step.count", "outcome", "failed", "in_doubt"),
		refused: with("saga.step.count", "outcome", "refused")},
}

// rulesOf returns the rules of a kind. Those of a policy of other origin are a guess by the
// names that the policies of this module have in common.
func rulesOf(kind string) *rules {
	if r, ok := kinds[kind]; ok {
		return r
	}
	name := kind + ".call.count"
	return &rules{order: 9, well: "running", failing: "failing", refusing: "refusing",
		calls:   figure(name),
		failed:  with(name, "outcome", "failure", "failed"),
		refused: with(name, "outcome", "refused")}
}

// traffic has the series that count the calls of a policy.
type traffic struct {
	calls, failed, refused []*series
}

func (t *traffic) add(r *rules, sr *series) {
	for _, c := range []struct {
		matches []match
		to      *[]*series
	}{{r.calls, &t.calls}, {r.failed, &t.failed}, {r.refused, &t.refused}} {
		for _, m := range c.matches {
			if m.admits(sr.Figure) {
				*c.to = append(*c.to, sr)
			}
		}
	}
}

// rate returns the mean growth of the series in a second, over the n samples up to last.
func rate(all []*series, last, n int) (sum float64) {
	for _, sr := range all {
		if total, samples := sr.sum(last, n); samples > 0 {
			sum += total / float64(samples)
		}
	}
	return sum
}
