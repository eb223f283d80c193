package console

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"

	"github.com/go-resilience/resilience/registry"
)

// membersShown is how many members of a Group are shown.
const membersShown = 20

// A policyPage is the page of one policy.
type policyPage struct {
	page
	Tick int `json:"tick"` // the latest sample, which the last of all Points are
	policyCard
	States   []stateRun      `json:"states,omitempty"` // of a breaker
	Metrics  []metricView    `json:"metrics"`
	Settings json.RawMessage `json:"settings,omitempty"`
	Members  []memberView    `json:"members,omitempty"`
	Actions  []Action        `json:"actions,omitempty"`

	Key   string      `json:"-"` // of the member that was asked for
	Keyed bool        `json:"-"` // a Group: an action needs a key
	Find  bool        `json:"-"` // a key can be asked for
	Form  *actionForm `json:"-"` // what was filled in, after an error or a dry run
}

// A metricView is one metric over time.
type metricView struct {
	Name    string            `json:"name"`
	Unit    string            `json:"unit"`
	Counter bool              `json:"counter"`
	Attrs   map[string]string `json:"attrs,omitempty"`
	Value   float64           `json:"value"`
	// Points are the values of a gauge, or the growth of a counter in a second, one for
	// each second of at most ten minutes.
	Points []float64 `json:"points"`
}

// A stateRun is a time that a breaker spent in one state.
type stateRun struct {
	State   string `json:"state"`
	Seconds int    `json:"seconds"`
}

// A memberView is one key of a Group.
type memberView struct {
	Key   string `json:"key"` // "hidden" unless Show.Keys
	Calls int64  `json:"calls"`
	Tone  tone   `json:"tone,omitempty"`
	State string `json:"state,omitempty"`
	Error string `json:"error,omitempty"` // why it is not well
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

// policyPage returns the page of a policy: of a Group with one key alone unless that is "".
func (c *Console) policyPage(e registry.Entry, key string) policyPage {
	c.sampler.look()
	p := policyPage{page: c.page("policy", e.Kind+" "+e.Name, 1), Key: key}
	c.sampled(e, &p)
	p.Settings = e.Settings()
	p.Members, p.Find = c.members(e, key)
	if c.cfg.Allow != nil {
		p.Actions = actionsOf(e)
		_, one := e.Policy.(circuit)
		p.Keyed = !one
	}
	return p
}

// sampled fills in what the sampler knows of a policy.
func (c *Console) sampled(e registry.Entry, p *policyPage) {
	s := &c.sampler
	s.mu.RLock()
	defer s.mu.RUnlock()
	t := s.byPath[e.String()]
	if t == nil { // it was added within the last second
		t = newTrack(e, s.now)
		t.status = t.judge(s.now)
	}
	p.Tick, p.policyCard, p.States = s.now, c.card(t), t.states(s.now)
	for _, sr := range t.series {
		attrs := map[string]string{}
		for _, a := range sr.attrs {
			attrs[a.Key] = a.Value
		}
		p.Metrics = append(p.Metrics, metricView{
			sr.what, sr.unit, sr.Counter, attrs, finite(sr.Value), sr.points(s.now)})
	}
}

// members returns the members of a Group that its page shows, and whether a key can be looked for.
// It cannot where keys are hidden: that it is there would be told.
func (c *Console) members(e registry.Entry, key string) (views []memberView, find bool) {
	n := membersShown
	if key != "" && c.cfg.Show.Keys {
		n = math.MaxInt
	}
	for _, m := range e.Worst(n) {
		find = c.cfg.Show.Keys
		if n == membersShown || m.Key == key {
			views = append(views, c.member(e.Kind, m))
		}
	}
	return views, find
}

// member returns the view of a member of a group of a kind. A member that does not describe itself has no state.
func (c *Console) member(kind string, m registry.Member) memberView {
	v := memberView{Key: m.Key, Calls: m.Calls}
	if !c.cfg.Show.Keys {
		v.Key = "hidden"
	}
	if m.Kind == "" {
		return v
	}
	h := m.Health(context.Background())
	v.Tone, v.State, v.Error = toneOf(h), stateOf(h, rulesOf(kind).well), c.secret(h.Err)
	return v
}

// Indented returns the settings as a person reads them.
func (p policyPage) Indented() string {
	var b bytes.Buffer
	_ = json.Indent(&b, p.Settings, "", "  ") // they are valid JSON
	return b.String()
}

// states returns the states of a policy over the last ten minutes, the oldest first: of a breaker.
// The sampler's lock is held.
func (t *track) states(now int) (runs []stateRun) {
	if t.byName[t.entry.Kind+".keys"] != nil { // a Group has many states at once
		return nil
	}
	for i := max(t.born, now-kept+1); i <= now; i++ {
		for _, sr := range t.series {
			if sr.what != t.entry.Kind+".state" || len(sr.attrs) == 0 || i < sr.born || sr.at(i) == 0 {
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
