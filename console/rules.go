package console

import (
	"cmp"
	"slices"

	"github.com/go-resilience/resilience/policy"
)

const sagaKind = "saga"

// rules name the metrics of a kind of policy that count its calls, and its states.
type rules struct {
	order int // in a call, the outermost first

	calls, failed, refused []match // the latter two of the calls

	well     string // the state when nothing is wrong
	failing  string // when calls fail
	refusing string // when calls are refused
}

// A match selects the metrics with a name and, unless outcomes is empty, one of these outcomes.
type match struct {
	name     string
	outcomes []string
}

func (m match) admits(sr *series) bool {
	return sr.what == m.name && (m.outcomes == nil || slices.ContainsFunc(sr.attrs, func(a policy.Attr) bool {
		return a.Key == "outcome" && slices.Contains(m.outcomes, a.Value)
	}))
}

// metricsNamed returns the match for a name and outcomes.
func metricsNamed(name string, outcomes ...string) []match { return []match{{name, outcomes}} }

// kinds are the rules of the kinds, without what is as in rulesOf.
var kinds = map[string]rules{
	"cache": {order: 0, well: "serving", failing: "loads_fail", refusing: "loads_refused",
		calls:   metricsNamed("cache.gets"),
		failed:  metricsNamed("cache.loads", "failed", "panicked", "timed_out"),
		refused: metricsNamed("cache.loads", "refused")},
	"retry": {order: 1, well: "steady", failing: "giving_up",
		failed: metricsNamed("retry.calls", "exhausted", "permanent", "over_budget", "deadline")},
	"budget": {order: 2, well: "in_budget", refusing: "spent",
		calls:   metricsNamed("budget.retries"),
		refused: metricsNamed("budget.retries", "over_budget")},
	"hedge":    {order: 3, well: "steady"},
	"breaker":  {order: 4, well: "closed", failing: "closed"},
	"throttle": {order: 5, well: "passing", refusing: "limiting"},
	"bulkhead": {order: 6, well: "free"},
	"pool":     {order: 6, well: "free", calls: metricsNamed("pool.waits")},
	"lease": {order: 7, well: "steady", failing: "store_fails",
		calls:  append(metricsNamed("lease.asks"), metricsNamed("lease.renewals")...),
		failed: metricsNamed("lease.store.errors")},
	sagaKind: {order: 8, failing: "steps_fail", refusing: "steps_refused",
		calls:   metricsNamed("saga.step.attempts"),
		failed:  metricsNamed("saga.step.attempts", "failed", "maybe_applied"),
		refused: metricsNamed("saga.step.attempts", "refused")},
}

// rulesOf returns the rules of a kind: where it has none, by the names that the policies of this module have
// in common, which are a guess for those of other origin.
func rulesOf(kind string) *rules {
	r, ok := kinds[kind]
	if !ok {
		r.order = 9
	}
	r.well, r.failing = cmp.Or(r.well, "running"), cmp.Or(r.failing, "failing")
	r.refusing = cmp.Or(r.refusing, "refusing")
	name := kind + ".calls"
	if r.calls == nil {
		r.calls = metricsNamed(name)
	}
	if r.failed == nil {
		r.failed = metricsNamed(name, "failure", "failed")
	}
	if r.refused == nil {
		r.refused = metricsNamed(name, "refused")
	}
	return &r
}

// matching returns the series that one of the matches admits. The sampler's lock is held.
func (t *track) matching(matches []match) (all []*series) {
	for _, sr := range t.series {
		if slices.ContainsFunc(matches, func(m match) bool { return m.admits(sr) }) {
			all = append(all, sr)
		}
	}
	return all
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
