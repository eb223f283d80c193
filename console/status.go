package console

import (
	"cmp"
	"fmt"
	"html/template"
	"net/url"
	"slices"
	"strings"

	"github.com/go-resilience/resilience/policy"
)

// A tone is the severity of a state. Pages show it as a color, a shape and a word.
type tone string

const (
	well tone = "ok"
	warn tone = "warn" // needs attention
	fail tone = "fail" // calls fail because of the state
	idle tone = "idle" // a saga or step that has ended or not started
	blue tone = "blue" // a saga or step in progress
)

func (t tone) severity() int { return slices.Index([]tone{well, warn, fail}, t) }

// A status is the status of a policy in one sample.
type status struct {
	tone    tone
	state   string // the state in the policy's Health, or a general state such as "healthy"
	stated  bool   // the policy itself has this state, such as "closed"; otherwise problem replaces it
	problem string // a code such as "failing" if calls fail or are refused, although the policy is healthy
	detail  string
	err     error
	calls   float64 // per second
	failed  float64 // per second
	refused float64 // per second
	never   bool    // calls are never counted as failed, only as refused
}

// share returns the fraction of the calls that failed or were refused.
func (s status) share() float64 {
	if s.calls <= 0 {
		return 0
	}
	return min((s.failed+s.refused)/s.calls, 1)
}

// judge returns the status of the policy at the sample with the number now. The caller holds the lock.
func (t *track) judge(now int) status {
	failed := t.matching(t.rules.failed)
	h := t.health
	s := status{
		tone: toneOf(h), state: stateOf(h, t.rules.well), stated: h.State != "" || t.rules.stated, never: failed == nil,
		calls:   rate(t.matching(t.rules.calls), now, recent),
		failed:  rate(failed, now, recent),
		refused: rate(t.matching(t.rules.refused), now, recent),
	}
	switch {
	case h.Status > policy.Pass:
		s.detail, s.err = h.Detail, h.Err
	case s.refused > 0:
		s.tone, s.problem = warn, t.rules.refusing
	case s.share() >= 0.05:
		s.tone, s.problem = warn, t.rules.failing
	}
	if s.problem != "" && !s.stated {
		s.state = s.problem
	}
	return s
}

// trouble returns the problem of a healthy policy as a text, such as "8% failing". It returns "" if there is no
// problem.
func (s status) trouble() string {
	if s.problem == "" {
		return ""
	}
	return strings.Replace(s.bad(), "failed", "failing", 1)
}

// toneOf returns the tone of a Health.
func toneOf(h policy.Health) tone {
	return [...]tone{well, warn, fail}[min(max(h.Status, policy.Pass), policy.Fail)]
}

// stateOf returns the State of h. If h has no State, stateOf returns a general one for its Status: healthy, "degraded"
// or "failing".
func stateOf(h policy.Health, healthy string) string {
	return cmp.Or(h.State, [...]string{healthy, "degraded", "failing"}[min(max(h.Status, policy.Pass), policy.Fail)])
}

// inWords returns a state or an action as text, without underscores, such as "forced open".
func inWords(state any) string { return strings.ReplaceAll(fmt.Sprint(state), "_", " ") }

// predicates has the predicates for sentences about unhealthy policies, such as "refuses calls" in "the breaker users
// refuses calls". The keys are states and problems. For any other state, the predicate is "is" and the state.
var predicates = map[string]string{
	"failing":               "has failing calls",
	"refusing":              "refuses calls",
	"limiting":              "limits calls",
	"spent":                 "has no retries left",
	"store_fails":           "has a failing store",
	"store_down":            "cannot reach its store",
	"invalidations_pending": "has pending invalidations",
	"stuck":                 "has stuck sagas",
	"overdue":               "has overdue sagas",
	"stalled":               "has stalled sagas",
	"unreadable":            "has unreadable sagas",
	"vacant":                "has no holder",
	"loads_fail":            "has failing loads",
	"loads_refused":         "has refused loads",
	"steps_fail":            "has failing steps",
	"steps_refused":         "has refused steps",
}

// A phrase is a part of a sentence. It is a link unless Link is empty.
type phrase struct {
	Text string
	Link template.URL
}

// clause returns the phrases of a clause about a policy, such as "the breaker users is open". The name of the policy is
// a link.
func (t *track) clause() []phrase {
	kind, code := t.entry.Kind, cmp.Or(t.status.problem, t.status.state)
	if kind == sagaKind {
		kind = "runner"
	}
	q := url.Values{"kind": {t.entry.Kind}, "name": {t.entry.Name}}
	return []phrase{
		{Text: "the "}, {kind + " " + t.entry.Name, template.URL("policy?" + q.Encode())},
		{Text: " " + cmp.Or(predicates[code], "is "+inWords(code))},
	}
}

// verdict returns a sentence about the unhealthy policies, and the tone of the worst one. The sentence names the two
// worst policies. If there are more, it has their number and a link to the card of the third.
func verdict(tracks []*track) (tone, []phrase) {
	bad := slices.DeleteFunc(slices.Clone(tracks), func(t *track) bool { return t.status.tone == well })
	slices.SortStableFunc(bad, func(a, b *track) int { return b.status.tone.severity() - a.status.tone.severity() })
	switch n := len(tracks); {
	case n == 0:
		return well, []phrase{{Text: "No policy is registered."}}
	case len(bad) == 0 && n == 1:
		return well, []phrase{{Text: "The only policy is healthy."}}
	case len(bad) == 0:
		return well, []phrase{{Text: fmt.Sprintf("All %d policies are healthy.", n)}}
	}
	sentence := bad[0].clause()
	switch n := len(bad) - 2; {
	case n == 0:
		sentence = append(append(sentence, phrase{Text: " and "}), bad[1].clause()...)
	case n > 0:
		sentence = append(append(sentence, phrase{Text: ", "}), bad[1].clause()...)
		more, need := fmt.Sprintf("%d more policies", n), " need attention"
		if n == 1 {
			more, need = "one more policy", " needs attention"
		}
		sentence = append(sentence,
			phrase{Text: ", and "}, phrase{more, template.URL("#" + bad[2].anchor())}, phrase{Text: need})
	}
	sentence[0].Text = capital(sentence[0].Text)
	return bad[0].status.tone, append(sentence, phrase{Text: "."})
}

// anchor returns the HTML id of the policy's card.
func (t *track) anchor() string { return fmt.Sprintf("policy-%x", t.path) }

// textOf returns the text of a sentence, without links.
func textOf(sentence []phrase) string {
	var b strings.Builder
	for _, p := range sentence {
		b.WriteString(p.Text)
	}
	return b.String()
}

// capital returns a text with a capital first letter, which must be ASCII.
func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// Word returns the word that screen readers read for the tone.
func (t tone) Word() string {
	return map[tone]string{fail: "broken", warn: "needs attention", well: "healthy"}[t]
}
