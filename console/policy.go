package console

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"

	"github.com/go-resilience/resilience/registry"
)

// membersShown is the maximum number of members on the page of a Group.
const membersShown = 20

// A policyPage is the page of a policy.
type policyPage struct {
	page
	Tick int `json:"tick"` // number of the latest sample, which is the last of Points
	policyCard
	States   []stateRun      `json:"states,omitempty"` // only for a breaker
	Metrics  []metricView    `json:"metrics"`
	Settings json.RawMessage `json:"settings,omitempty"`
	Members  []memberView    `json:"members,omitempty"`
	Actions  []Action        `json:"actions,omitempty"`

	Key   string      `json:"-"` // key of the member to show; empty means all
	Keyed bool        `json:"-"` // the policy is a Group, so an action on a breaker needs a key
	Find  bool        `json:"-"` // the page has a form to find a member by its key
	Form  *actionForm `json:"-"` // submitted form, if it had an error or was a preview
}

// A metricView is a metric over time.
type metricView struct {
	Name    string            `json:"name"`
	Unit    string            `json:"unit"`
	Counter bool              `json:"counter"`
	Attrs   map[string]string `json:"attrs,omitempty"`
	Value   float64           `json:"value"`
	// Points has the gauge's value, or the counter's growth, in each second of the last ten minutes, or since the
	// first sample.
	Points []float64 `json:"points"`
}

// A stateRun is a period during which a breaker had the same state.
type stateRun struct {
	State   string `json:"state"`
	Seconds int    `json:"seconds"`
}

// A memberView is a member of a Group.
type memberView struct {
	Key   string `json:"key"` // the member's key; "hidden" unless Show.Keys is set
	Calls int64  `json:"calls"`
	Tone  tone   `json:"tone,omitempty"`
	State string `json:"state,omitempty"`
	Error string `json:"error,omitempty"`
}

func (c *Console) policy(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	e, ok := c.reg.Get(q.Get("kind"), q.Get("name"))
	if !ok {
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no %s %s", q.Get("kind"), q.Get("name")))
		return
	}
	p := c.policyPage(e, q.Get("key"))
	p.Done = actions[Action(q.Get("done"))].done
	c.show(w, r, http.StatusOK, "policy.html", p)
}

// policyPage returns the page of a policy. If key is not empty and the policy is a Group, the page shows only the
// member with that key.
func (c *Console) policyPage(e registry.Entry, key string) policyPage {
	c.sampler.ensure()
	p := policyPage{page: c.page("policy", e.Kind+" "+e.Name, 1), Key: key}
	c.fillSamples(e, &p)
	p.Settings = e.Settings()
	p.Members, p.Find = c.members(e, key)
	if c.cfg.Allow != nil {
		p.Actions = actionsOf(e)
		_, one := e.Policy.(operable)
		p.Keyed = !one
	}
	return p
}

// fillSamples sets the fields that come from the sampler.
func (c *Console) fillSamples(e registry.Entry, p *policyPage) {
	s := &c.sampler
	s.mu.RLock()
	defer s.mu.RUnlock()
	t := s.byPath[e.String()]
	if t == nil { // the policy was added after the latest sample
		t = newTrack(e, s.now)
		t.status = t.judge(s.now)
	}
	p.Tick, p.policyCard, p.States = s.now, c.cardOf(t), t.states(s.now)
	for _, sr := range t.series {
		attrs := map[string]string{}
		for _, a := range sr.attrs {
			attrs[a.Key] = a.Value
		}
		p.Metrics = append(p.Metrics, metricView{
			sr.name, sr.unit, sr.Counter, attrs, finite(sr.Value), sr.points(s.now)})
	}
}

// members returns the members of a Group that its page shows, and whether the page has a form to find a member by its
// key. If keys are hidden, the page has no such form, because the form would reveal which keys exist.
func (c *Console) members(e registry.Entry, key string) (views []memberView, find bool) {
	n := membersShown
	if key != "" && c.cfg.Show.Keys {
		n = math.MaxInt
	}
	worst := e.Worst(n)
	ctx, cancel := context.WithTimeout(context.Background(), second) // for all members together, as in Worst
	defer cancel()
	for _, m := range worst {
		find = c.cfg.Show.Keys
		if n == membersShown || m.Key == key {
			views = append(views, c.member(ctx, e.Kind, m))
		}
	}
	return views, find
}

// member returns the view of a Group's member. The view of a member without a kind has no state.
func (c *Console) member(ctx context.Context, kind string, m registry.Member) memberView {
	v := memberView{Key: m.Key, Calls: m.Calls}
	if !c.cfg.Show.Keys {
		v.Key = "hidden"
	}
	if m.Kind == "" {
		return v
	}
	h := m.Health(ctx)
	v.Tone, v.State, v.Error = toneOf(h), stateOf(h, rulesOf(kind).well), c.secret(h.Err)
	return v
}

// Indented returns the settings as indented JSON.
func (p policyPage) Indented() string { return indented(p.Settings) }

// Span returns the duration of all States together, in seconds.
func (p policyPage) Span() (seconds float64) {
	for _, run := range p.States {
		seconds += float64(run.Seconds)
	}
	return seconds
}

// states returns the states of a breaker over the last ten minutes, the oldest first. For any other policy it returns
// nil. The caller holds the sampler's lock.
func (t *track) states(now int) (runs []stateRun) {
	if t.byName[t.entry.Kind+".keys"] != nil { // the members of a Group have different states
		return nil
	}
	for i := max(t.born, now-kept+1); i <= now; i++ {
		for _, sr := range t.series {
			if sr.name != t.entry.Kind+".state" || len(sr.attrs) == 0 || i < sr.born || sr.at(i) == 0 {
				continue
			}
			if state := sr.attrs[0].Value; len(runs) == 0 || runs[len(runs)-1].State != state {
				runs = append(runs, stateRun{State: state})
			}
			runs[len(runs)-1].Seconds++
			break
		}
	}
	return runs
}
