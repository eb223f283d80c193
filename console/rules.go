package console

import (
	"cmp"
	"slices"

	"github.com/go-resilience/resilience/policy"
)

const sagaKind = "saga"

// rules describe how the console reads the metrics of a kind of policy: which metrics count the policy's calls, and
// which states it shows for them.
type rules struct {
	order int // position of the kind in a chain of policies; the outermost is 0

	calls, failed, refused []match // calls includes the failed and the refused calls

	well     string // state of a healthy policy
	stated   bool   // well is a state that the policy itself has
	failing  string // state if calls fail
	refusing string // state if calls are refused
}

// A match selects the metrics with the given name whose attribute outcome is one of outcomes. If outcomes is nil, it
// selects all metrics with that name.
type match struct {
	name     string
	outcomes []string
}

func (m match) admits(sr *series) bool {
	return sr.name == m.name && (m.outcomes == nil || slices.ContainsFunc(sr.attrs, func(a policy.Attr) bool {
		return a.Key == "outcome" && slices.Contains(m.outcomes, a.Value)
	}))
}

// metricsNamed returns a list of one match.
func metricsNamed(name string, outcomes ...string) []match { return []match{{name, outcomes}} }

// kinds has the rules for the kinds of this module's policies. rulesOf adds defaults.
var kinds = map[string]rules{
	"cache": {order: 0, failing: "loads_fail", refusing: "loads_refused",
		calls:   metricsNamed("cache.gets"),
		failed:  metricsNamed("cache.loads", "failed", "panicked", "timed_out"),
		refused: metricsNamed("cache.loads", "refused")},
	"retry": {order: 1,
		failed: metricsNamed("retry.calls", "exhausted", "permanent", "over_budget", "deadline")},
	"budget": {order: 2, well: "within_budget", refusing: "spent",
		calls:   metricsNamed("budget.retries"),
		refused: metricsNamed("budget.retries", "over_budget")},
	"hedge":    {order: 3},
	"breaker":  {order: 4, well: "closed", stated: true},
	"throttle": {order: 5, well: "within_limit", refusing: "limiting"},
	"bulkhead": {order: 6, well: "available"},
	"pool":     {order: 6, well: "available", calls: metricsNamed("pool.waits")},
	"lease": {order: 7, failing: "store_fails",
		calls:  append(metricsNamed("lease.requests"), metricsNamed("lease.renewals")...),
		failed: metricsNamed("lease.store.errors")},
	sagaKind: {order: 8, failing: "steps_fail", refusing: "steps_refused",
		calls:   metricsNamed("saga.step.attempts"),
		failed:  metricsNamed("saga.step.attempts", "failed", "maybe_applied"),
		refused: metricsNamed("saga.step.attempts", "refused")},
}

// rulesOf returns the rules for a kind. If kinds does not specify a rule, rulesOf assumes the names of metrics that
// most policies of this module have. For the policies of other modules, these names are a guess.
func rulesOf(kind string) *rules {
	r, ok := kinds[kind]
	if !ok {
		r.order = 9
	}
	r.well, r.failing = cmp.Or(r.well, "healthy"), cmp.Or(r.failing, "failing")
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

// matching returns the series of the policy that at least one of the matches selects. The caller holds the sampler's
// lock.
func (t *track) matching(matches []match) (all []*series) {
	for _, sr := range t.series {
		if slices.ContainsFunc(matches, func(m match) bool { return m.admits(sr) }) {
			all = append(all, sr)
		}
	}
	return all
}

// rate returns how much the series together grew per second, on average over the n samples up to last.
func rate(all []*series, last, n int) (sum float64) {
	for _, sr := range all {
		if total, samples := sr.sum(last, n); samples > 0 {
			sum += total / float64(samples)
		}
	}
	return sum
}
