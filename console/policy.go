package console

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/registry"
)

// membersShown is how many members of a Group are shown.
const membersShown = 20

// A policyPage is the page of one policy.
type policyPage struct {
	page
	Shape uint64 `json:"shape"` // changes with the state, and with the number of Figures
	Tick  int    `json:"tick"`  // the latest sample, which the last of all Points are
	policyCard
	LastError string          `json:"last_error,omitempty"` // of a breaker, or of what is wrong
	Lease     *leaseView      `json:"lease,omitempty"`
	States    []stateRun      `json:"states,omitempty"` // of a breaker
	Figures   []figureView    `json:"figures"`
	Settings  json.RawMessage `json:"settings,omitempty"`
	Members   []memberView    `json:"members,omitempty"`
	Shares    []shareView     `json:"shares,omitempty"` // of a bulkhead, as in bulkhead.Stats
	Actions   []Action        `json:"actions,omitempty"`

	Key    string         `json:"-"` // of the member that was asked for
	Keyed  bool           `json:"-"` // a Group: an action needs a key
	Find   bool           `json:"-"` // a key can be asked for
	Fields []settingField `json:"-"`
	Form   *actionForm    `json:"-"` // what was filled in, after an error
}

// A figureView is one figure over time.
type figureView struct {
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

// A leaseView says who holds a lease, at most ten seconds ago.
type leaseView struct {
	Holder string     `json:"holder,omitempty"` // "" for nobody
	Epoch  int64      `json:"epoch"`
	Since  *time.Time `json:"since,omitempty"` // since when, or since when nobody holds it
	Until  *time.Time `json:"until,omitempty"` // when the term ends unless it is renewed
	At     time.Time  `json:"at"`              // all by the store's clock
}

// A memberView is one key of a Group.
type memberView struct {
	Key   string `json:"key"` // "hidden" unless Show.Keys
	Calls int64  `json:"calls"`
	Tone  tone   `json:"tone,omitempty"`
	State string `json:"state,omitempty"`
	Error string `json:"error,omitempty"` // of a breaker that is not closed: its last one
}

// A shareView is one share of a bulkhead.
type shareView struct {
	Share    string `json:"share"` // "hidden" unless Show.Keys
	InFlight int    `json:"in_flight"`
	Queued   int    `json:"queued"`
}

func (c *Console) policy(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	e, ok := c.reg.Get(q.Get("kind"), q.Get("name"))
	if !ok {
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no %s %s", q.Get("kind"), q.Get("name")))
		return
	}
	after := noPoints
	if wantsJSON(r) {
		after, _ = since(r)
	}
	p := c.policyPage(e, q.Get("key"), after)
	p.Done = doneWords[Action(q.Get("done"))]
	c.show(w, r, http.StatusOK, "policy.html", p)
}

const (
	allPoints = -1
	noPoints  = math.MaxInt
)

// policyPage returns the page of a policy: of a Group with one key alone unless that is "",
// and with the points of its figures after a sample. If that is neither all nor none, only
// what is new from second to second is there.
func (c *Console) policyPage(e registry.Entry, key string, after int) policyPage {
	c.sampler.look()
	p := policyPage{page: c.page("policy", e.Kind+" "+e.Name)}
	p.Refresh = 1
	c.sampled(e, &p, after)
	if after != allPoints && after != noPoints {
		return p
	}
	p.LastError = p.Error
	if b, ok := e.Policy.(interface{ Stats() breaker.Stats }); ok {
		p.LastError = c.secret(b.Stats().LastErr)
	}
	if b, ok := e.Policy.(interface{ Stats() bulkhead.Stats }); ok {
		for _, s := range b.Stats().Shares {
			if !c.cfg.Show.Keys {
				s.Share = "hidden"
			}
			p.Shares = append(p.Shares, shareView(s))
		}
	}
	p.Settings = e.Settings()
	p.Fields = fields("", p.Settings)
	p.Members = c.members(e, &p, key)
	if c.cfg.Allow != nil {
		p.Actions = actionsOf(e)
		_, one := e.Policy.(circuit)
		p.Keyed = !one
	}
	return p
}

// sampled fills in what the sampler knows of a policy, with the points after a sample.
func (c *Console) sampled(e registry.Entry, p *policyPage, after int) {
	s := &c.sampler
	s.mu.RLock()
	defer s.mu.RUnlock()
	t := s.byPath[e.String()]
	if t == nil { // it was added within the last second
		t = &track{entry: e, path: e.String(), rules: rulesOf(e.Kind), born: s.now}
		t.status = t.judge(s.now)
	}
	p.Shape, p.Tick, p.policyCard = t.shape(), s.now, c.card(t)
	p.States = t.states(s.now)
	if h := t.held; h != nil {
		p.Lease = &leaseView{h.Holder, h.Epoch, some(h.Since), some(h.Until), h.Now}
	}
	for _, sr := range t.series {
		f := figureView{Name: sr.what, Unit: sr.unit, Counter: sr.Counter, Value: finite(sr.Value)}
		for _, a := range sr.attrs {
			if f.Attrs == nil {
				f.Attrs = map[string]string{}
			}
			f.Attrs[a.Key] = a.Value
		}
		f.Points = sr.points(after, s.now)
		p.Figures = append(p.Figures, f)
	}
}

// members returns the members of a Group that its page shows. A key is not looked for where
// keys are hidden: that it is there would be told.
func (c *Console) members(e registry.Entry, p *policyPage, key string) (views []memberView) {
	p.Key = key
	n := membersShown
	if key != "" && c.cfg.Show.Keys {
		n = math.MaxInt
	}
	for _, m := range e.Members(n) {
		p.Find = c.cfg.Show.Keys
		if n == membersShown || m.Key == key {
			views = append(views, c.member(m))
		}
	}
	return views
}

func (c *Console) member(m registry.Member) memberView {
	v := memberView{Key: m.Key, Calls: m.Calls}
	if !c.cfg.Show.Keys {
		v.Key = "hidden"
	}
	switch p := m.Policy.(type) {
	case *breaker.Breaker:
		s := p.Stats()
		v.State, v.Tone = string(s.State), warn
		switch s.State {
		case breaker.Closed:
			v.Tone = well
			return v
		case breaker.Open, breaker.ForcedOpen:
			v.Tone = fail
		}
		v.Error = c.secret(s.LastErr)
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
		switch {
		case sr.what == "breaker.state" && len(sr.attrs) > 0: // none of another origin
			all = append(all, sr)
		case sr.Name == "breaker.keys": // a Group has many states at once
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
			// As a word: half-open, forced-open.
			if state := strings.ReplaceAll(sr.attrs[0].Value, "_", "-"); len(runs) > 0 && runs[len(runs)-1].State == state {
				runs[len(runs)-1].Seconds++
			} else {
				runs = append(runs, stateRun{state, 1})
			}
			break
		}
	}
	return runs
}
