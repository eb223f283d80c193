package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html/template"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga"
)

const (
	sagasShown = 50              // on a page
	storeTime  = 5 * time.Second // for the questions of a page to the store of a Runner
)

// A sagasPage lists sagas, those that are stuck first.
type sagasPage struct {
	page
	Runner  string       `json:"runner"`
	Runners []string     `json:"-"`
	Counts  []sagaRow    `json:"counts"`
	Form    url.Values   `json:"-"`               // see formOf
	Stuck   []sagaView   `json:"stuck,omitempty"` // the newest, if no status was asked for
	Sagas   []sagaView   `json:"sagas"`
	Next    string       `json:"next,omitempty"` // the after of the following page
	More    template.URL `json:"-"`              // the query of the following page
	Error   string       `json:"-"`
	Filter  bool         `json:"-"` // there are conditions
}

// A sagaRow has the numbers of the sagas of one definition.
type sagaRow struct {
	Saga         string  `json:"saga"`
	Stuck        int     `json:"stuck"`
	Running      int     `json:"running"`
	Compensating int     `json:"compensating"`
	Due          int     `json:"due"`
	Late         float64 `json:"late"` // seconds since the first of them became due
}

// formOf returns what q asks for of the sagas of a Runner, as a person or a script writes it: the saga
// is a definition, the text an id or its beginning, and the age one that those have at least that are shown.
func formOf(q url.Values, runner string) url.Values {
	form := url.Values{"runner": {runner}}
	for _, key := range []string{"saga", "status", "text", "age", "after"} {
		if v := strings.TrimSpace(q.Get(key)); v != "" {
			form.Set(key, v)
		}
	}
	return form
}

// filterOf returns a form as a Filter. An age is one by the store's clock, as on the page.
func filterOf(form url.Values, now time.Time) (saga.Filter, error) {
	filter := saga.Filter{
		Saga: form.Get("saga"), ID: form.Get("text"), After: form.Get("after"), Limit: sagasShown, WithoutState: true,
	}
	if status := saga.Status(form.Get("status")); status != "" {
		if filter.Status = []saga.Status{status}; !slices.Contains(statuses, status) {
			return filter, fmt.Errorf("there is no status %q", status)
		}
	}
	if age := form.Get("age"); age != "" {
		d, err := time.ParseDuration(age)
		if err != nil || d < 0 {
			return filter, fmt.Errorf("age: is %q: must be a duration such as 10m", age)
		}
		filter.CreatedBefore = now.Add(-d)
	}
	return filter, nil
}

var statuses = []saga.Status{
	saga.Stuck, saga.Running, saga.Compensating, saga.Completed, saga.Compensated, saga.Abandoned,
}

// A sagaView shows one saga in a list.
type sagaView struct {
	ID        string      `json:"id"`
	Saga      string      `json:"saga"`
	Version   int         `json:"version"`
	State     saga.Status `json:"status"`
	Step      string      `json:"step,omitempty"` // that keeps it from going on, is at work, or at which it turned back
	StepsDone int         `json:"steps_done"`     // of Steps
	Steps     int         `json:"steps"`
	Failures  int         `json:"failures"`
	Error     string      `json:"error,omitempty"`
	Owner     string      `json:"owner,omitempty"`
	Created   time.Time   `json:"created"`
	Age       float64     `json:"age"`   // seconds
	Since     float64     `json:"since"` // seconds without progress

	Tone tone `json:"-"`
}

// sagaTones are the tones of sagas that have not failed lately, and have not ended without an effect.
var sagaTones = map[saga.Status]tone{
	saga.Stuck: fail, saga.Compensating: warn, saga.Running: blue, saga.Completed: well,
}

func (c *Console) sagaView(in *saga.Instance) sagaView {
	v := sagaView{
		ID: in.ID, Saga: in.Saga, Version: in.Version, State: in.Status, Step: in.Step, Steps: len(in.Steps),
		Failures: in.Failures, Error: c.text(cmp.Or(in.LastError, in.Cause)), Owner: in.Owner,
		Created: in.CreatedAt, Age: seconds(in.Now.Sub(in.CreatedAt)), Since: seconds(in.Since()),
		Tone: cmp.Or(sagaTones[in.Status], idle),
	}
	if v.Tone == blue && v.Failures > 0 {
		v.Tone = warn
	}
	held := false // by the step that keeps it from going on, or back
	for _, s := range in.Steps {
		switch s.Status {
		case saga.StepDone, saga.StepSkipped:
			v.StepsDone++
		case saga.StepStarted, saga.StepUndoing, saga.StepWaiting:
			v.Step = cmp.Or(v.Step, s.Name)
		}
		holds := in.Back && s.Status == saga.StepUndoFailed || !in.Back && s.Name == in.Step
		if holds && !held && in.Status == saga.Stuck {
			held, v.Step, v.Error = true, s.Name, c.text(s.Error)
		}
	}
	return v
}

func seconds(d time.Duration) float64 { return d.Round(time.Millisecond).Seconds() }

// runner returns the Runner with a name, or the first one if name is empty, its name, and the names of all.
func (c *Console) runner(name string) (found *saga.Runner, its string, names []string) {
	for e := range c.reg.All() {
		if r, ok := e.Policy.(*saga.Runner); ok {
			names = append(names, e.Name)
			if e.Name == name || name == "" && found == nil {
				found, its = r, e.Name
			}
		}
	}
	return found, its, names
}

// sagas answers with the list that q asks for, and with what went wrong.
func (c *Console) sagas(w http.ResponseWriter, r *http.Request, status int, q url.Values, wrong error) {
	runner, name, names := c.runner(q.Get("runner"))
	if runner == nil {
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no Runner %s", q.Get("runner")))
		return
	}
	p := sagasPage{
		page: c.page("sagas", "Sagas", 5), Runner: name, Runners: names,
		Form: formOf(q, name), Sagas: []sagaView{}, Counts: []sagaRow{},
	}
	p.Filter = len(p.Form) > 2 || len(p.Form) == 2 && !p.Form.Has("after")
	if actions[Action(q.Get("done"))].done != "" {
		acted, _ := strconv.Atoi(q.Get("acted"))
		refused, _ := strconv.Atoi(q.Get("refused"))
		p.Done = fmt.Sprintf("%s: %d done, %d refused as they are.", q.Get("done"), acted, refused)
	}
	_, err := filterOf(p.Form, time.Time{})
	if err != nil {
		status = max(status, http.StatusBadRequest)
	} else if err = p.fill(r.Context(), c, runner); err != nil {
		status = max(status, http.StatusBadGateway)
		err = errors.New("the store cannot be asked: " + c.secret(err))
	}
	if err = errors.Join(wrong, err); err != nil {
		p.Error = err.Error()
		if wantsJSON(r) {
			c.fail(w, r, status, err)
			return
		}
	}
	c.show(w, r, status, "sagas.html", p)
}

// fill asks the store for what the page lists.
func (p *sagasPage) fill(ctx context.Context, c *Console, runner *saga.Runner) error {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	counts, now, err := runner.Counts(ctx)
	if err != nil {
		return err
	}
	filter, err := filterOf(p.Form, now)
	if err != nil {
		return err
	}
	for _, n := range counts {
		p.Counts = append(p.Counts, sagaRow{n.Saga, n.Stuck, n.Running, n.Compensating, n.Due, seconds(n.DueFor)})
	}
	if filter.Status == nil {
		if filter.After == "" {
			filter.Status = statuses[:1] // that of those that are stuck
			if p.Stuck, _, err = c.list(ctx, runner, filter); err != nil {
				return err
			}
		}
		filter.Status = statuses[1:]
	}
	if p.Sagas, p.Next, err = c.list(ctx, runner, filter); p.Next != "" {
		next := maps.Clone(p.Form)
		next.Set("after", p.Next)
		p.More = template.URL(next.Encode())
	}
	return err
}

func (c *Console) list(ctx context.Context, runner *saga.Runner, f saga.Filter) ([]sagaView, string, error) {
	views := []sagaView{}
	page, next, err := runner.List(ctx, f)
	for _, in := range page {
		views = append(views, c.sagaView(in))
	}
	return views, next, err
}

// Self returns the query of the page.
func (p sagasPage) Self() template.URL { return template.URL(p.Form.Encode()) }

// Statuses returns the statuses that can be asked for.
func (p sagasPage) Statuses() []saga.Status { return statuses }
