package console

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/go-resilience/resilience/policy"
)

// A tone is how bad a state is. It is shown as a color, a shape and a word.
type tone string

const (
	well tone = "ok"
	warn tone = "warn" // worth knowing
	fail tone = "fail" // calls fail because of it
	idle tone = "idle" // of a saga or step that has ended, or not begun
	blue tone = "blue" // of one that goes on
)

func (t tone) rank() int { return slices.Index([]tone{well, warn, fail}, t) }

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
	failed := t.matching(t.rules.failed)
	s := status{
		tone: well, state: stateOf(policy.Health{State: t.health.State}, t.rules.well), never: failed == nil,
		calls:   rate(t.matching(t.rules.calls), now, recent),
		failed:  rate(failed, now, recent),
		refused: rate(t.matching(t.rules.refused), now, recent),
	}
	switch {
	case t.health.Status > policy.Pass:
		s.tone, s.state, s.detail, s.err = toneOf(t.health), stateOf(t.health, ""), t.health.Detail, t.health.Err
	case s.refused > 0:
		s.tone, s.state = warn, t.rules.refusing
	case s.share() >= 0.05:
		s.tone, s.state = warn, t.rules.failing
	}
	return s
}

// toneOf returns the tone of a health.
func toneOf(h policy.Health) tone {
	return [...]tone{well, warn, fail}[min(max(h.Status, policy.Pass), policy.Fail)]
}

// stateOf returns the state of a health, or a general one if it has none: healthy, say.
func stateOf(h policy.Health, healthy string) string {
	return cmp.Or(h.State, [...]string{healthy, "degraded", "failing"}[min(max(h.Status, policy.Pass), policy.Fail)])
}

// inWords returns a state as text: "forced open".
func inWords(state any) string { return strings.ReplaceAll(fmt.Sprint(state), "_", " ") }

// verbs has the predicate of a sentence about an unhealthy policy by its state. For any other state the predicate
// is "is" and the state.
var verbs = map[string]string{
	"closed":               "sees calls fail",
	"failing":              "sees calls fail",
	"store_fails":          "has a failing store",
	"store_down":           "cannot reach its store",
	"invalidations_untold": "has invalidations to tell",
	"stuck":                "has stuck sagas",
	"overdue":              "has overdue sagas",
	"vacant":               "is held by nobody",
	"limiting":             "is limiting calls",
	"refusing":             "is refusing calls",
	"giving_up":            "is giving up calls",
	"loads_fail":           "has loads that fail",
	"loads_refused":        "has loads that are refused",
	"steps_fail":           "has steps that fail",
	"steps_refused":        "has steps that are refused",
}

// clause says in words how a policy is: "the breaker users is open".
func (t *track) clause() string {
	kind, verb := t.entry.Kind, cmp.Or(verbs[t.status.state], "is "+inWords(t.status.state))
	if kind == sagaKind {
		kind = "runner"
	}
	return "the " + kind + " " + t.entry.Name + " " + verb
}

// verdict says in one sentence what is wrong with the policies, the worst first.
func verdict(tracks []*track) (tone, string) {
	ill := slices.DeleteFunc(slices.Clone(tracks), func(t *track) bool { return t.status.tone == well })
	slices.SortStableFunc(ill, func(a, b *track) int { return b.status.tone.rank() - a.status.tone.rank() })
	sentence := ""
	switch n, all := len(ill), len(tracks); {
	case all == 0:
		return well, "No policy is registered."
	case n == 0 && all == 1:
		return well, "The only policy is well."
	case n == 0:
		return well, fmt.Sprintf("All %d policies are well.", all)
	case n == 1:
		sentence = ill[0].clause()
	case n == 2:
		sentence = ill[0].clause() + " and " + ill[1].clause()
	case n == 3:
		sentence = ill[0].clause() + ", " + ill[1].clause() + ", and one more policy needs attention"
	default:
		sentence = fmt.Sprintf("%s, %s, and %d more policies need attention", ill[0].clause(), ill[1].clause(), n-2)
	}
	return ill[0].status.tone, capital(sentence) + "."
}

// capital returns a text, which begins in ASCII, with a capital letter.
func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// Word returns what a screen reader says of the tone.
func (t tone) Word() string {
	return map[tone]string{fail: "broken", warn: "needs attention", well: "well"}[t]
}
