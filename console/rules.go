package console

import (
	"cmp"
	"slices"

	"github.com/go-resilience/resilience/registry"
)

const sagaKind = "saga"

// rules say which figures of a kind of policy are its calls, and what its state is called.
type rules struct {
	order int // in a call, the outermost first

	calls, failed, refused []match // the latter two of the calls

	well     string // the state when nothing is wrong
	failing  string // when calls fail
	refusing string // when calls are refused
}

// A match admits the figures of a name, and those alone whose outcome is one of outcomes, if there are any.
type match struct {
	name     string
	outcomes []string
}

func (m match) admits(sr *series) bool {
	return sr.what == m.name && (m.outcomes == nil || slices.ContainsFunc(sr.attrs, func(a registry.Attr) bool {
		return a.Key == "outcome" && slices.Contains(m.outcomes, a.Value)
	}))
}

func figure(name string, outcomes ...string) []match { return []match{{name, outcomes}} }

// kinds are the rules of the kinds, without what is as in rulesOf.
var kinds = map[string]rules{
	"cache": {order: 0, well: "serving", failing: "loads fail", refusing: "loads refused",
		calls:   figure("cache.requests"),
		failed:  figure("cache.loads", "failed", "panicked", "timed_out"),
		refused: figure("cache.loads", "refused")},
	"retry": {order: 1, well: "steady", failing: "giving up",
		failed: figure("retry.calls", "exhausted", "permanent", "over_budget", "deadline")},
	"budget": {order: 2, well: "in budget", refusing: "spent",
		calls:   figure("budget.retries"),
		refused: figure("budget.retries", "over_budget")},
	"hedge":    {order: 3, well: "steady"},
	"breaker":  {order: 4, well: "closed", failing: "closed"},
	"throttle": {order: 5, well: "passing", refusing: "limiting"},
	"bulkhead": {order: 6, well: "free"},
	"pool":     {order: 6, well: "free", calls: figure("pool.waits")},
	"lease": {order: 7, well: "steady", failing: "store fails",
		calls:  append(figure("lease.asks"), figure("lease.renewals")...),
		failed: figure("lease.store.errors")},
	sagaKind: {order: 8, failing: "steps fail", refusing: "steps refused",
		calls:   figure("saga.step.attempts"),
		failed:  figure("saga.step.attempts", "failed", "in_doubt"),
		refused: figure("saga.step.attempts", "refused")},
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
		r.calls = figure(name)
	}
	if r.failed == nil {
		r.failed = figure(name, "failure", "failed")
	}
	if r.refused == nil {
		r.refused = figure(name, "refused")
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
