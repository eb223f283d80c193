package console

import (
	"cmp"
	"net/http"
	"slices"
	"time"
)

// A sparkline, which is a small chart, has one value for every ten seconds.
const (
	sparkStep = 10
	sparks    = kept / sparkStep
)

// An overview is the page of all policies.
type overview struct {
	page
	Tick     int          `json:"tick"` // number of the latest sample; see spark
	Tone     tone         `json:"tone"`
	Verdict  string       `json:"verdict"`
	Sentence []phrase     `json:"-"` // Verdict with links
	Policies []policyCard `json:"policies"`
	Groups   []cardGroup  `json:"-"`
}

// A cardGroup holds the cards of the policies with the same name.
type cardGroup struct {
	Name  string
	Cards []policyCard
}

// A policyCard shows one policy.
type policyCard struct {
	Path    string  `json:"path"`
	Kind    string  `json:"kind"`
	Name    string  `json:"name"`
	Tone    tone    `json:"tone"`
	State   string  `json:"state"`
	Problem string  `json:"problem,omitempty"` // such as "8% failing", if the policy itself is healthy
	Detail  string  `json:"detail,omitempty"`
	Error   string  `json:"error,omitempty"`
	Calls   float64 `json:"calls"`   // per second
	Failed  float64 `json:"failed"`  // per second
	Refused float64 `json:"refused"` // per second
	Spark   *spark  `json:"spark,omitempty"`
	Words   words   `json:"words"`

	Since  time.Time `json:"since,omitzero"` // the time at which the console first saw the policy unhealthy
	Anchor string    `json:"-"`
	Stated bool      `json:"-"` // State is worth showing next to Problem
}

// words has the numbers of a card as texts.
type words struct {
	Rate  string `json:"rate"`
	Share string `json:"share"`
	Since string `json:"since,omitempty"`
}

// A spark has the values of a sparkline over the last ten minutes, the oldest value first. Each value is the mean of up
// to ten consecutive samples, whose numbers differ only in the last digit. The last value includes the latest sample.
type spark struct {
	Calls []float64 `json:"calls"` // per second
	Bad   []float64 `json:"bad"`   // failed or refused calls per second
}

func (c *Console) overview(w http.ResponseWriter, r *http.Request) {
	c.sampler.ensure()
	o := overview{page: c.page("overview", "Overview", 1)}
	c.cards(&o)
	c.show(w, r, http.StatusOK, "overview.html", o)
}

// cards sets the cards of the policies and the verdict.
func (c *Console) cards(o *overview) {
	s := &c.sampler
	s.mu.RLock()
	defer s.mu.RUnlock()
	o.Tick = s.now
	o.Tone, o.Sentence = verdict(s.tracks)
	o.Verdict = textOf(o.Sentence)
	for _, t := range inOrder(s.tracks) {
		card := c.cardOf(t)
		card.Spark = t.sparkline(s.now)
		o.Policies = append(o.Policies, card)
		if len(o.Groups) == 0 || o.Groups[len(o.Groups)-1].Name != card.Name {
			o.Groups = append(o.Groups, cardGroup{Name: card.Name})
		}
		g := &o.Groups[len(o.Groups)-1]
		g.Cards = append(g.Cards, card)
	}
}

// cardOf returns the card of a policy. The caller holds the sampler's lock.
func (c *Console) cardOf(t *track) policyCard {
	card := policyCard{
		Path: t.path, Kind: t.entry.Kind, Name: t.entry.Name,
		Tone: t.status.tone, State: t.status.state, Detail: t.status.detail, Error: c.secret(t.status.err),
		Calls: round(t.status.calls), Failed: round(t.status.failed), Refused: round(t.status.refused),
		Words: words{Rate: number(t.status.calls), Share: t.status.bad()}, Since: t.unhealthy,
		Problem: t.status.trouble(), Stated: t.status.stated, Anchor: t.anchor(),
	}
	if !t.unhealthy.IsZero() {
		card.Words.Since = "for " + ago(time.Since(t.unhealthy))
	}
	return card
}

// inOrder returns the tracks in the order of the overview. Policies with the same name are together, in the order in
// which they would be in a chain. Names with a broken policy come first, then names with a policy that needs attention,
// then the other names. Within these groups, the names are sorted.
func inOrder(tracks []*track) []*track {
	worst := map[string]int{}
	for _, t := range tracks {
		worst[t.entry.Name] = max(worst[t.entry.Name], t.status.tone.severity())
	}
	all := slices.Clone(tracks)
	slices.SortStableFunc(all, func(a, b *track) int {
		return cmp.Or(
			cmp.Compare(worst[b.entry.Name], worst[a.entry.Name]),
			cmp.Compare(a.entry.Name, b.entry.Name),
			cmp.Compare(a.rules.order, b.rules.order),
			cmp.Compare(a.path, b.path),
		)
	})
	return all
}

// sparkline returns the sparkline of a policy. The caller holds the sampler's lock.
func (t *track) sparkline(now int) *spark {
	calls, bad := t.matching(t.rules.calls), append(t.matching(t.rules.failed), t.matching(t.rules.refused)...)
	s := &spark{}
	for i := max(now/sparkStep-sparks+1, 0); i <= now/sparkStep; i++ {
		last := min((i+1)*sparkStep-1, now)
		if last < t.born {
			continue
		}
		n := last - i*sparkStep + 1
		s.Calls = append(s.Calls, round(rate(calls, last, n)))
		s.Bad = append(s.Bad, round(rate(bad, last, n)))
	}
	return s
}
