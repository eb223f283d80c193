package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"html/template"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
)

const (
	sagasShown   = 50              // maximum number of sagas in a list
	stuckShown   = 500             // maximum number of stuck sagas, which are shown in groups
	storeTimeout = 5 * time.Second // timeout of all store queries of a page
)

// A sagasPage is the page that lists sagas, the stuck sagas first.
type sagasPage struct {
	page
	Runner  string      `json:"runner"`
	Runners []string    `json:"-"`
	Counts  []sagaRow   `json:"counts"`
	Form    listForm    `json:"-"`
	Groups  []sagaGroup `json:"groups,omitempty"` // groups of the stuck sagas in Stuck or Sagas
	Stuck   []sagaView  `json:"stuck,omitempty"`  // the newest stuck sagas, unless the form has a status
	Sagas   []sagaView  `json:"sagas"`
	Next    string      `json:"next,omitempty"` // value of the parameter after for the next page

	Offers    []Action     `json:"-"` // actions that at least one of the sagas allows
	Others    []sagaView   `json:"-"` // the sagas that are not in Groups
	More      template.URL `json:"-"` // query of the next page
	MoreStuck template.URL `json:"-"` // query of the next page of Stuck
	Error     string       `json:"-"`
	Refusals  []refusal    `json:"-"` // refused sagas of the action
	Note      string       `json:"-"` // note of a failed action
}

// A sagaRow has the numbers of sagas of one definition, by state.
type sagaRow struct {
	Saga         string  `json:"saga"`
	Stuck        int     `json:"stuck"`
	Running      int     `json:"running"`
	Compensating int     `json:"compensating"`
	Due          int     `json:"due"`
	Late         float64 `json:"late"` // seconds since the first of the due sagas became due
}

// A sagaGroup is a group of stuck sagas of one definition that have the same step and similar errors.
type sagaGroup struct {
	Saga   string     `json:"saga"`
	Step   string     `json:"step"`
	Error  string     `json:"error"` // error of the newest saga
	Count  int        `json:"count"`
	Key    string     `json:"-"`
	Varies bool       `json:"-"` // the errors differ in their numbers or ids
	Sagas  []sagaView `json:"-"`
}

// A listForm has the conditions of a list of sagas: runner, saga (a definition), status, text (an id, or the first part
// of one), age (the minimum age) and after (the last id of the previous page).
type listForm struct {
	url.Values
	createdBefore time.Time // computed from age
}

// formOf returns the conditions in a query. It ignores other parameters.
func formOf(q url.Values, runner string) listForm {
	f := url.Values{"runner": {runner}}
	for _, key := range []string{"saga", "status", "text", "age", "after"} {
		if v := strings.TrimSpace(q.Get(key)); v != "" {
			f.Set(key, v)
		}
	}
	return listForm{Values: f}
}

// Query returns the form as an encoded query.
func (f listForm) Query() template.URL { return template.URL(f.Encode()) }

// next returns the query of the page after the saga with the id after, with the given status. If after is empty, the
// query is empty.
func (f listForm) next(status, after string) template.URL {
	if after == "" {
		return ""
	}
	next := maps.Clone(f.Values)
	next["status"], next["after"] = []string{status}, []string{after}
	return formOf(next, f.Get("runner")).Query()
}

// check returns an error if the form is invalid. It computes createdBefore from the store's time.
func (f *listForm) check(now time.Time) error {
	if status := f.Get("status"); status != "" && !slices.Contains(statuses, sagaStatus(status)) {
		return fmt.Errorf("there is no status %q", status)
	}
	if age := f.Get("age"); age != "" {
		d, err := time.ParseDuration(age)
		if err != nil || d < 0 {
			return fmt.Errorf("age: is %q: must be a duration such as 10m", age)
		}
		f.createdBefore = now.Add(-d)
	}
	return nil
}

// A sagaView is a saga in a list.
type sagaView struct {
	ID          string     `json:"id"`
	Seq         int64      `json:"seq"` // number of entries in the log
	Saga        string     `json:"saga"`
	Version     int        `json:"version"`
	State       sagaStatus `json:"status"`
	Step        string     `json:"step,omitempty"` // the step that blocks the saga, is in progress, or turned it back
	StepsDone   int        `json:"steps_done"`     // number of the Steps that are done
	Steps       int        `json:"steps"`
	TurnedBack  bool       `json:"turned_back,omitempty"`
	StepsUndone int        `json:"steps_undone,omitempty"`  // number of the StepsToUndo that are undone
	StepsToUndo int        `json:"steps_to_undo,omitempty"` // steps that had, or may have had, an effect
	Failures    int        `json:"failures"`
	Error       string     `json:"error,omitempty"`
	Owner       string     `json:"owner,omitempty"`
	Created     time.Time  `json:"created"`
	Age         float64    `json:"age"`   // seconds
	Since       float64    `json:"since"` // seconds without progress
	Actions     []Action   `json:"actions,omitempty"`

	Ended bool `json:"-"`
	Tone  tone `json:"-"`
}

// Progress returns the progress of a saga as a text, such as "4 of 6 done" or "3 of 4 undone".
func (v sagaView) Progress() string {
	switch {
	case v.TurnedBack && v.StepsToUndo == 0:
		return "nothing to undo"
	case v.TurnedBack:
		return fmt.Sprintf("%d of %d undone", v.StepsUndone, v.StepsToUndo)
	}
	return fmt.Sprintf("%d of %d done", v.StepsDone, v.Steps)
}

// Target returns the value that identifies the saga in the field ids of a form.
func (v sagaView) Target() string { return fmt.Sprintf("%s@%d", v.ID, v.Seq) }

// sagas writes the page that lists the sagas that q selects. After an action, done is its result, and wrong is its
// error.
func (c *Console) sagas(w http.ResponseWriter, r *http.Request, status int, q url.Values, done result, wrong error) {
	runner, name, names := c.runner(q.Get("runner"))
	if runner == nil {
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no runner %s", q.Get("runner")))
		return
	}
	p := sagasPage{
		page: c.page("sagas", "Sagas", 5), Runner: name, Runners: names, Form: formOf(q, name),
		Sagas: []sagaView{}, Counts: []sagaRow{}, Refusals: done.Refusals, Note: q.Get("note"),
	}
	if a := Action(q.Get("done")); actions[a].done != "" {
		p.Done = fmt.Sprintf("%s applied to %s.", capital(inWords(a)), plural(max(atoi(q.Get("acted")), 0), "saga"))
	}
	err := p.Form.check(time.Time{})
	if err != nil {
		status = max(status, http.StatusBadRequest)
	} else if err = p.fill(r.Context(), c, runner); err != nil {
		status = max(status, http.StatusBadGateway)
		err = c.storeError(err)
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

// fill queries the store for the sagas of the page.
func (p *sagasPage) fill(ctx context.Context, c *Console, runner *sagaRunner) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	counts, now, err := count(ctx, runner)
	if err != nil {
		return err
	}
	p.Counts = append(p.Counts, counts...)
	if err := p.Form.check(now); err != nil {
		return err
	}
	status := p.Form.Get("status")
	limit, of := sagasShown, []sagaStatus{sagaStatus(status)}
	switch status {
	case "":
		of = statuses[1:]
		if !p.Form.Has("after") {
			var after string
			if p.Stuck, after, err = c.list(ctx, runner, p.Form, stuckShown, stuck); err != nil {
				return err
			}
			p.MoreStuck = p.Form.next(string(stuck), after)
		}
	case string(stuck):
		limit = stuckShown
	}
	if p.Sagas, p.Next, err = c.list(ctx, runner, p.Form, limit, of...); err != nil {
		return err
	}
	p.More, p.Others = p.Form.next(status, p.Next), p.Sagas
	grouped := p.Stuck
	if limit == stuckShown {
		grouped, p.Others = p.Sagas, nil
	}
	p.Groups, p.Offers = groupsOf(grouped), offers(grouped, p.Others)
	return nil
}

// groupsOf groups stuck sagas by definition, step and similar error, the largest group first.
func groupsOf(sagas []sagaView) (groups []sagaGroup) {
	index := map[[3]string]int{}
	for _, v := range sagas {
		key := [3]string{v.Saga, v.Step, similar(v.Error, v.ID)}
		i, ok := index[key]
		if !ok {
			i = len(groups)
			index[key] = i
			sum := crc32.ChecksumIEEE([]byte(strings.Join(key[:], "/"))) // identifies the group on the page
			groups = append(groups, sagaGroup{Saga: v.Saga, Step: v.Step, Error: v.Error, Key: fmt.Sprintf("%08x", sum)})
		}
		groups[i].Sagas = append(groups[i].Sagas, v)
		groups[i].Count++
		groups[i].Varies = groups[i].Varies || v.Error != groups[i].Error
	}
	slices.SortStableFunc(groups, func(a, b sagaGroup) int { return cmp.Compare(b.Count, a.Count) })
	return groups
}

// variable matches words that contain a digit, such as ids and times. Of these words, similar retains the words of up
// to three characters, such as the status 503, because they distinguish errors.
var variable = regexp.MustCompile(`[\pL\d_-]*\d[\pL\d_-]*`)

// similar returns the text of a saga's error without the parts that differ between sagas, such as ids.
func similar(text, id string) string {
	return variable.ReplaceAllStringFunc(strings.ReplaceAll(text, id, "…"), func(word string) string {
		if len(word) < 4 {
			return word
		}
		return "…"
	})
}

// offers returns the actions that at least one of the sagas allows. Skip is not included, because it applies to a step
// of one saga.
func offers(lists ...[]sagaView) (all []Action) {
	for _, a := range []Action{Retry, Cancel, Compensate, Abandon} {
		if slices.ContainsFunc(slices.Concat(lists...), func(v sagaView) bool { return slices.Contains(v.Actions, a) }) {
			all = append(all, a)
		}
	}
	return all
}

// Statuses returns the statuses that the form offers.
func (p sagasPage) Statuses() []sagaStatus { return statuses }
