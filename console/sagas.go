package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
)

const (
	sagasShown = 50              // on a page
	storeTime  = 5 * time.Second // for the questions of a page to the store of a Runner

	fromStart = "*" // as the after of a list: from its start, without a look for an id
)

// A sagasPage lists sagas, those that are stuck first.
type sagasPage struct {
	page
	Runner  string       `json:"runner"`
	Runners []string     `json:"-"`
	Counts  []sagaRow    `json:"counts"`
	Form    sagaForm     `json:"-"`
	Stuck   []sagaView   `json:"stuck,omitempty"` // the newest, if no status was asked for
	Sagas   []sagaView   `json:"sagas"`
	Next    string       `json:"next,omitempty"`  // the after of the following page
	Exact   bool         `json:"exact,omitempty"` // the text is the id of the one saga that is shown
	More    template.URL `json:"-"`               // the query of the following page
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

// A sagaForm is a filter as a person or a script writes it.
type sagaForm struct {
	Saga   string // of the definition
	Status string
	ID     string // the id, or its beginning
	Age    string // a duration such as 10m: only those that were started before that
	After  string
}

func sagaFormOf(q url.Values) sagaForm {
	return sagaForm{
		Saga: q.Get("saga"), Status: q.Get("status"),
		ID: strings.TrimSpace(q.Get("text")), Age: strings.TrimSpace(q.Get("age")),
		After: q.Get("after"),
	}
}

// values returns the form as a query.
func (f sagaForm) values(runner string) url.Values {
	v := url.Values{}
	for key, value := range map[string]string{
		"runner": runner, "saga": f.Saga, "status": f.Status, "text": f.ID, "age": f.Age, "after": f.After,
	} {
		if value != "" {
			v.Set(key, value)
		}
	}
	return v
}

// filter returns a form as a Filter. An age is one by the store's clock, as on the page.
func (f sagaForm) filter(now time.Time) (saga.Filter, error) {
	filter := saga.Filter{Saga: f.Saga, ID: f.ID, After: f.After, Limit: sagasShown, WithoutState: true}
	if f.After == fromStart {
		filter.After = ""
	}
	if f.Status != "" {
		if !slices.Contains(statuses, saga.Status(f.Status)) {
			return filter, fmt.Errorf("there is no status %q", f.Status)
		}
		filter.Status = []saga.Status{saga.Status(f.Status)}
	}
	if f.Age != "" {
		d, err := time.ParseDuration(f.Age)
		if err != nil || d < 0 {
			return filter, fmt.Errorf("age: is %q: must be a duration such as 10m", f.Age)
		}
		filter.CreatedBefore = now.Add(-d)
	}
	return filter, nil
}

// admitsAll reports whether the form has no conditions.
func (f sagaForm) admitsAll() bool {
	return f.Saga == "" && f.Status == "" && f.ID == "" && f.Age == ""
}

var statuses = []saga.Status{
	saga.Stuck, saga.Running, saga.Compensating, saga.Completed, saga.Compensated, saga.Abandoned,
}

// A sagaView shows one saga in a list.
type sagaView struct {
	ID        string      `json:"id"`
	Saga      string      `json:"saga"`
	Version   int         `json:"version"`
	Status    saga.Status `json:"status"`
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

// State returns the status for the template of a state.
func (v sagaView) State() string { return string(v.Status) }

// toneOf returns the tone of a status. idle and blue say that nothing is wrong: the one of
// what has ended, the other of what goes on.
func toneOf(s saga.Status, failing bool) tone {
	switch {
	case s == saga.Stuck:
		return fail
	case s == saga.Compensating, failing && !s.Ended():
		return warn
	case s == saga.Running:
		return "blue"
	case s == saga.Completed:
		return well
	}
	return "idle"
}

func (c *Console) sagaView(in *saga.Instance) sagaView {
	v := sagaView{
		ID: in.ID, Saga: in.Saga, Version: in.Version, Status: in.Status, Step: in.Step,
		Failures: in.Failures, Owner: in.Owner, Tone: toneOf(in.Status, in.Failures > 0),
		Created: in.CreatedAt, Age: seconds(in.Now.Sub(in.CreatedAt)), Since: seconds(in.Since()),
	}
	for _, s := range in.Steps {
		v.Steps++
		if s.Status == saga.StepDone || s.Status == saga.StepSkipped {
			v.StepsDone++
		}
		if v.Step == "" &&
			(s.Status == saga.StepStarted || s.Status == saga.StepUndoing || s.Status == saga.StepWaiting) {
			v.Step = s.Name
		}
	}
	v.Error = c.text(cmp.Or(in.LastError, in.Cause))
	if u, ok := heldUp(in); ok {
		v.Step, v.Error = u.Name, c.text(u.Error)
	}
	return v
}

// heldUp returns the step that keeps a stuck saga from going on, or back.
func heldUp(in *saga.Instance) (saga.StepState, bool) {
	for _, u := range in.Steps {
		if in.Status == saga.Stuck && (in.Back && u.Status == saga.StepUndoFailed || !in.Back && u.Name == in.Step) {
			return u, true
		}
	}
	return saga.StepState{}, false
}

func seconds(d time.Duration) float64 {
	return float64(d.Round(time.Millisecond)) / float64(time.Second)
}

// Ago and Quiet return the age, and the time without progress, as texts.
func (v sagaView) Ago() string { return ago(time.Duration(v.Age * float64(time.Second))) }

func (v sagaView) Quiet() string { return ago(time.Duration(v.Since * float64(time.Second))) }

// Waits returns for how long the first due saga has waited, as a text.
func (r sagaRow) Waits() string { return ago(time.Duration(r.Late * float64(time.Second))) }

// Count returns a number as a text; one at the limit of a Count means so many or more.
func (r sagaRow) Count(n int) string {
	if n >= 10_000 {
		return strconv.Itoa(n) + "+"
	}
	return strconv.Itoa(n)
}

// runner returns the Runner of a name. An empty one means the first.
func (c *Console) runner(name string) (*saga.Runner, registry.Entry, []string) {
	var found registry.Entry
	var names []string
	for e := range c.reg.All() {
		if _, ok := e.Policy.(*saga.Runner); ok {
			names = append(names, e.Name)
			if e.Name == name || name == "" && found.Policy == nil {
				found = e
			}
		}
	}
	r, _ := found.Policy.(*saga.Runner)
	return r, found, names
}

func (c *Console) sagas(w http.ResponseWriter, r *http.Request) {
	c.listSagas(w, r, http.StatusOK, r.URL.Query(), nil)
}

// listSagas answers with the list that q asks for, and with what went wrong.
func (c *Console) listSagas(w http.ResponseWriter, r *http.Request, status int, q url.Values, wrong error) {
	runner, e, names := c.runner(q.Get("runner"))
	if runner == nil {
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no Runner %s", q.Get("runner")))
		return
	}
	p := sagasPage{
		page: c.page("sagas", "Sagas"), Runner: e.Name, Runners: names,
		Form: sagaFormOf(q), Sagas: []sagaView{}, Counts: []sagaRow{},
	}
	p.Refresh = 5
	p.Filter = !p.Form.admitsAll()
	if _, ok := doneWords[Action(q.Get("done"))]; ok {
		acted, _ := strconv.Atoi(q.Get("acted"))
		refused, _ := strconv.Atoi(q.Get("refused"))
		p.Done = fmt.Sprintf("%s: %d done, %d refused as they are.", q.Get("done"), acted, refused)
	}
	ctx, cancel := context.WithTimeout(r.Context(), storeTime)
	defer cancel()
	_, err := p.Form.filter(time.Time{})
	if err != nil {
		status = max(status, http.StatusBadRequest)
	} else if err = c.fill(ctx, runner, &p); err != nil {
		status = max(status, http.StatusBadGateway)
		err = errors.New("the store cannot be asked: " + c.secret(err))
	}
	if p.Next != "" {
		form := p.Form
		form.After = p.Next
		p.More = template.URL(form.values(p.Runner).Encode())
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

// fill asks the store for what a page lists.
func (c *Console) fill(ctx context.Context, runner *saga.Runner, p *sagasPage) error {
	counts, now, err := runner.Counts(ctx)
	if err != nil {
		return err
	}
	filter, err := p.Form.filter(now)
	if err != nil {
		return err
	}
	for _, n := range counts {
		p.Counts = append(p.Counts, sagaRow{n.Saga, n.Stuck, n.Running, n.Compensating, n.Due, seconds(n.DueFor)})
	}
	if p.Exact = c.byID(ctx, runner, p, filter); p.Exact {
		return nil
	}
	if filter.Status == nil && filter.After == "" {
		stuck := filter
		stuck.Status = []saga.Status{saga.Stuck}
		if p.Stuck, _, err = c.list(ctx, runner, stuck); err != nil {
			return err
		}
	}
	if filter.Status == nil {
		filter.Status = statuses[1:] // those that are stuck have been shown
	}
	p.Sagas, p.Next, err = c.list(ctx, runner, filter)
	return err
}

// byID looks for the saga whose id is the text that a list is to have, and reports whether it
// is there and meets the other conditions.
func (c *Console) byID(ctx context.Context, runner *saga.Runner, p *sagasPage, f saga.Filter) bool {
	id := p.Form.ID
	if id == "" || p.Form.After != "" {
		return false
	}
	in, err := runner.Get(ctx, id)
	if err != nil || f.Saga != "" && in.Saga != f.Saga || f.Status != nil && in.Status != f.Status[0] ||
		!f.CreatedBefore.IsZero() && !in.CreatedAt.Before(f.CreatedBefore) {
		return false
	}
	p.Sagas, p.Next = []sagaView{c.sagaView(in)}, fromStart
	return true
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
func (p sagasPage) Self() template.URL { return template.URL(p.Form.values(p.Runner).Encode()) }

// With returns the query of the list of a definition's sagas with a status.
func (p sagasPage) With(definition, status string) template.URL {
	return template.URL(sagaForm{Saga: definition, Status: status}.values(p.Runner).Encode())
}

// Statuses returns the statuses that can be asked for.
func (p sagasPage) Statuses() []saga.Status { return statuses }

// Ages returns the ages that can be asked for.
func (p sagasPage) Ages() []string {
	ages := []string{"1m", "10m", "1h", "24h", "168h"}
	if p.Form.Age != "" && !slices.Contains(ages, p.Form.Age) {
		ages = append(ages, p.Form.Age)
	}
	return ages
}
