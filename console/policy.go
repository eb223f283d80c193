package console

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/registry"
)

// busiest is how many members of a Group are shown.
const busiest = 20

// A policyPage is the page of one policy.
type policyPage struct {
	page
	Shape uint64 `json:"shape"`
	Tick  int    `json:"tick"` // the latest sample, which the last of all Points are
	policyCard
	LastError string          `json:"last_error,omitempty"` // of a breaker
	States    []stateRun      `json:"states,omitempty"`     // of a breaker
	Figures   []figureView    `json:"figures"`
	Settings  json.RawMessage `json:"settings,omitempty"`
	Members   []memberView    `json:"members,omitempty"`
	Actions   []Action        `json:"actions,omitempty"`

	Fields []settingField `json:"-"`
	Form   *actionForm    `json:"-"` // what was filled in, after an error
}

// A figureView is one figure over time.
type figureView struct {
	Name  string            `json:"name"`
	Unit  string            `json:"unit"`
	Help  string            `json:"help"`
	Kind  string            `json:"kind"` // "counter" or "gauge"
	Attrs map[string]string `json:"attrs,omitempty"`
	Value float64           `json:"value"`
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
}

func (c *Console) policy(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	e, ok := c.reg.Get(q.Get("kind"), q.Get("name"))
	if !ok {
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no %s %s", q.Get("kind"), q.Get("name")))
		return
	}
	p := c.policyPage(e, wantsJSON(r))
	p.Done = doneWords[Action(q.Get("done"))]
	c.show(w, r, http.StatusOK, "policy.html", p)
}

// policyPage returns the page of a policy, with the points of its figures if they are wanted.
func (c *Console) policyPage(e registry.Entry, points bool) policyPage {
	c.sampler.look()
	p := policyPage{page: c.page("policy", e.Kind+" "+e.Name)}
	p.Refresh = "events?" + policyQuery(e)
	s := &c.sampler
	s.mu.RLock()
	t := s.byPath[e.String()]
	if t == nil { // it was added within the last second
		t = &track{entry: e, path: e.String(), rules: rulesOf(e.Kind), born: s.now}
		t.status = t.judge(s.now)
	}
	p.Shape, p.Tick, p.policyCard = t.shape(), s.now, c.card(t)
	p.States = t.states(s.now)
	for _, sr := range t.series {
		f := figureView{Name: sr.Name, Unit: sr.Unit, Help: sr.Help, Kind: string(sr.Kind), Value: finite(sr.Value)}
		for _, a := range sr.Attrs {
			if f.Attrs == nil {
				f.Attrs = map[string]string{}
			}
			f.Attrs[a.Key] = a.Value
		}
		if points {
			f.Points = sr.points(s.now)
		}
		p.Figures = append(p.Figures, f)
	}
	s.mu.RUnlock()
	if b, ok := e.Policy.(interface{ Stats() breaker.Stats }); ok {
		p.LastError = c.secret(b.Stats().LastErr)
	}
	p.Settings = e.Settings()
	p.Fields = fields("", p.Settings)
	for i, m := range e.Members(busiest) {
		p.Members = append(p.Members, c.member(i, m))
	}
	if c.cfg.Allow != nil {
		p.Actions = actionsOf(e)
	}
	return p
}

func (c *Console) member(i int, m registry.Member) memberView {
	v := memberView{Key: m.Key, Calls: m.Calls}
	if !c.cfg.Show.Keys {
		v.Key = "hidden"
	}
	switch p := m.Policy.(type) {
	case *breaker.Breaker:
		state := p.State()
		v.State, v.Tone = string(state), warn
		switch state {
		case breaker.Closed:
			v.Tone = well
		case breaker.Open, breaker.ForcedOpen:
			v.Tone = fail
		}
	case *bulkhead.Bulkhead:
		s := p.Stats()
		v.State, v.Tone = fmt.Sprintf("%d of %d in flight", s.InFlight, s.Limit), well
		if s.InFlight >= s.Limit {
			v.Tone = warn
		}
	}
	return v
}

// states returns the states of a breaker over the last ten minutes, the oldest first. The
// sampler's lock is held.
func (t *track) states(now int) []stateRun {
	var all []*series
	for _, sr := range t.series {
		switch sr.Name {
		case "breaker.state":
			all = append(all, sr)
		case "breaker.keys": // a Group has many states at once
			return nil
		}
	}
	if all == nil {
		return nil
	}
	var runs []stateRun
	for i := all[0].first(now); i <= now; i++ {
		for _, sr := range all {
			if sr.at(i) == 0 {
				continue
			}
			// As breaker.State has it.
			if state := strings.ReplaceAll(sr.Attrs[0].Value, "_", "-"); len(runs) > 0 && runs[len(runs)-1].State == state {
				runs[len(runs)-1].Seconds++
			} else {
				runs = append(runs, stateRun{state, 1})
			}
			break
		}
	}
	return runs
}
