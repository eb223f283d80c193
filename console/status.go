package console

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/go-resilience/resilience/registry"
)

// A tone is how bad a state is. It is shown as a colour, a shape and a word.
type tone string

const (
	well tone = "ok"
	warn tone = "warn" // worth knowing
	fail tone = "fail" // calls fail because of it
)

func (t tone) rank() int { return slices.Index([]tone{fail, warn, well}, t) }

const sagaKind = "saga"

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
	"lease": {order: 7, well: "steady", failing: "store fails",
		calls:  figure("lease.ask.count"),
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

// traffic is which of the series of a policy are its calls.
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

// A status is how a policy is, in one sample.
type status struct {
	tone    tone
	state   string
	detail  string
	err     error
	calls   float64 // a second
	failed  float64
	refused float64
	never   bool // calls never fail: they are only refused
}

// share returns which share of the calls failed or was refused.
func (s status) share() float64 {
	if s.calls <= 0 {
		return 0
	}
	return min((s.failed+s.refused)/s.calls, 1)
}

// judge returns the status of the policy in sample now. The caller holds the lock.
func (t *track) judge(now int) status {
	s := status{
		tone: well, state: t.rules.well,
		calls:   rate(t.traffic.calls, now, recent),
		failed:  rate(t.traffic.failed, now, recent),
		refused: rate(t.traffic.refused, now, recent),
		never:   t.rules.failed == nil,
	}
	var ill *registry.HealthError
	switch {
	case errors.As(t.health, &ill):
		s.tone, s.state, s.detail, s.err = warn, ill.State, ill.Detail, ill.Err
		if ill.Fails {
			s.tone = fail
		}
	case t.health != nil:
		s.tone, s.state, s.err = warn, "ailing", t.health
	case s.refused > 0:
		s.tone, s.state = warn, t.rules.refusing
	case s.failed > 0 && s.share() >= 0.05:
		s.tone, s.state = warn, t.rules.failing
	}
	return s
}

// verbs say the states in which something is wrong with a policy, in a sentence.
var verbs = map[string]string{
	"closed":               "sees calls fail",
	"failing":              "sees calls fail",
	"store fails":          "has a failing store",
	"store down":           "cannot reach its store",
	"invalidations untold": "has invalidations to tell",
	"stuck":                "has stuck sagas",
	"limiting":             "is limiting calls",
	"refusing":             "is refusing calls",
	"giving up":            "is giving up calls",
	"loads fail":           "has loads that fail",
	"loads refused":        "has loads that are refused",
	"steps fail":           "has steps that fail",
	"steps refused":        "has steps that are refused",
	"forced-open":          "is forced open",
}

// clause says in words how a policy is: "the breaker users is open".
func (t *track) clause() string {
	verb, ok := verbs[t.status.state]
	if !ok {
		verb = "is " + t.status.state
	}
	kind := t.entry.Kind
	if kind == sagaKind {
		kind = "runner"
	}
	return "the " + kind + " " + t.entry.Name + " " + verb
}

// verdict says in one sentence what is wrong with the policies, the worst first.
func verdict(tracks []*track) (tone, string) {
	ill := slices.DeleteFunc(slices.Clone(tracks), func(t *track) bool { return t.status.tone == well })
	slices.SortStableFunc(ill, func(a, b *track) int { return a.status.tone.rank() - b.status.tone.rank() })
	if len(ill) == 0 {
		switch len(tracks) {
		case 0:
			return well, "No policy is registered."
		case 1:
			return well, "The only policy is well."
		}
		return well, fmt.Sprintf("All %d policies are well.", len(tracks))
	}
	var clauses []string
	for _, t := range ill[:min(2, len(ill))] {
		clauses = append(clauses, t.clause())
	}
	switch more := len(ill) - 2; {
	case more == 1:
		clauses = append(clauses, "one more policy needs attention")
	case more > 1:
		clauses = append(clauses, fmt.Sprintf("%d more policies need attention", more))
	}
	last := len(clauses) - 1
	sentence := clauses[last]
	if last > 0 {
		comma := ""
		if last > 1 {
			comma = ","
		}
		sentence = strings.Join(clauses[:last], ", ") + comma + " and " + sentence
	}
	return ill[0].status.tone, strings.ToUpper(sentence[:1]) + sentence[1:] + "."
}
