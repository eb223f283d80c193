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

func (m match) admits(sr *series) bool {
	if sr.what != m.name {
		return false
	}
	return m.key == "" || slices.ContainsFunc(sr.attrs, func(a registry.Attr) bool {
		return a.Key == m.key && slices.Contains(m.values, a.Value)
	})
}

func figure(name string) []match { return []match{{name: name}} }

func with(name, key string, values ...string) []match { return []match{{name, key, values}} }

var kinds = map[string]*rules{
	"cache": {order: 0, well: "serving", failing: "loads fail", refusing: "loads refused",
		calls:   figure("cache.requests"),
		failed:  with("cache.loads", "outcome", "failed", "panicked", "timed_out"),
		refused: with("cache.loads", "outcome", "refused")},
	"retry": {order: 1, well: "steady", failing: "giving up",
		calls:  figure("retry.calls"),
		failed: with("retry.calls", "outcome", "exhausted", "permanent", "over_budget", "deadline")},
	"budget": {order: 2, well: "in budget", refusing: "spent",
		calls:   figure("budget.retries"),
		refused: with("budget.retries", "outcome", "over_budget")},
	"hedge": {order: 3, well: "steady", failing: "failing",
		calls:  figure("hedge.calls"),
		failed: with("hedge.calls", "outcome", "failed")},
	"breaker": {order: 4, well: "closed", failing: "closed", refusing: "refusing",
		calls:   figure("breaker.calls"),
		failed:  with("breaker.calls", "outcome", "failure"),
		refused: with("breaker.calls", "outcome", "refused")},
	"throttle": {order: 5, well: "passing", refusing: "limiting",
		calls:   figure("throttle.calls"),
		refused: with("throttle.calls", "outcome", "refused")},
	"bulkhead": {order: 6, well: "free", refusing: "refusing",
		calls:   figure("bulkhead.calls"),
		refused: with("bulkhead.calls", "outcome", "refused")},
	"pool": {order: 6, well: "free", calls: figure("pool.waits")},
	leaseKind: {order: 7, well: "steady", failing: "store fails",
		calls:  append(figure("lease.asks"), figure("lease.renewals")...),
		failed: figure("lease.store.errors")},
	sagaKind: {order: 8, well: "running", failing: "steps fail", refusing: "steps refused",
		calls:   figure("saga.step.attempts"),
		failed:  with("saga.step.attempts", "outcome", "failed", "in_doubt"),
		refused: with("saga.step.attempts", "outcome", "refused")},
}

// rulesOf returns the rules of a kind. Those of a policy of other origin are a guess by the
// names that the policies of this module have in common.
func rulesOf(kind string) *rules {
	if r, ok := kinds[kind]; ok {
		return r
	}
	name := kind + ".calls"
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
			if m.admits(sr) {
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
