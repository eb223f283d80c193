package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// A sagaPage shows one saga.
type sagaPage struct {
	page
	Runner string `json:"runner"`
	sagaView
	Cause    string      `json:"cause,omitempty"`
	Turned   string      `json:"turned_back_at,omitempty"` // the step, if Cause is why
	Seq      int64       `json:"seq"`                      // entries in the log
	Epoch    int64       `json:"epoch"`
	Wake     time.Time   `json:"wake,omitzero"`
	Deadline time.Time   `json:"deadline,omitzero"`
	Takeover int         `json:"takeovers"`
	Canceled bool        `json:"cancel_requested"`
	Updated  time.Time   `json:"updated"`
	Units    []unitView  `json:"units"`
	Log      []entryView `json:"log"`
	Older    int64       `json:"older,omitempty"` // entries that are not shown
	Content  string      `json:"state,omitempty"` // "hidden" unless Show.State
	Allowed  []Action    `json:"actions,omitempty"`

	Wrong string `json:"-"`
	Note  string `json:"-"`
}

// A unitView is a step.
type unitView struct {
	Name      string          `json:"name"`
	State     saga.StepStatus `json:"status"`
	After     []string        `json:"after,omitempty"`
	Pivot     bool            `json:"pivot,omitempty"`
	Attempts  int             `json:"attempts"`
	Undos     int             `json:"undos"`
	Refusals  int             `json:"refusals"`
	InDoubt   bool            `json:"in_doubt,omitempty"`
	Error     string          `json:"error,omitempty"`
	NotBefore time.Time       `json:"not_before,omitzero"`
	Waiting   time.Time       `json:"waiting_since,omitzero"`
	Children  []string        `json:"children,omitempty"` // the ids of the sagas that it has started, at most 20

	Tone tone `json:"-"`
}

// An entryView is one entry of the log.
type entryView struct {
	Seq     int64     `json:"seq"`
	Kind    string    `json:"kind"`
	Step    string    `json:"step,omitempty"`
	Op      string    `json:"op,omitempty"`
	Attempt int       `json:"attempt,omitempty"`
	Epoch   int64     `json:"epoch"`
	Text    string    `json:"text,omitempty"` // the reason, or an operator's note
	At      time.Time `json:"at"`
}

// logShown is how many entries of a log are shown, the latest.
const logShown = 500

// saga answers with the page of a saga, and with what went wrong.
func (c *Console) saga(w http.ResponseWriter, r *http.Request, status int, q url.Values, wrong error) {
	runner, name, _ := c.runner(q.Get("runner"))
	if runner == nil {
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no Runner %s", q.Get("runner")))
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), storeTime)
	defer cancel()
	id := strings.TrimSpace(cmp.Or(q.Get("id"), q.Get("text"))) // the text of a list, for the button beside it
	in, err := runner.Get(ctx, id)
	var log []saga.Entry
	if err == nil {
		log, err = runner.History(ctx, id, in.Seq-logShown, logShown)
	}
	switch {
	case errors.Is(err, saga.ErrNotFound):
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no saga %s", id))
		return
	case err != nil:
		c.fail(w, r, http.StatusBadGateway, errors.New("the store cannot be asked: "+c.secret(err)))
		return
	}
	p := c.sagaPage(name, in, log)
	p.Done = actions[Action(q.Get("done"))].done
	if wrong != nil {
		p.Wrong, p.Note = wrong.Error(), q.Get("note")
	}
	c.show(w, r, status, "saga.html", p)
}

func (c *Console) sagaPage(runner string, in *saga.Instance, log []saga.Entry) sagaPage {
	p := sagaPage{
		page: c.page("saga", in.ID, 3), Runner: runner, sagaView: c.sagaView(in), Cause: c.text(in.Cause),
		Seq: in.Seq, Epoch: in.Epoch, Takeover: in.Takeovers, Canceled: in.CancelRequested, Updated: in.UpdatedAt,
		Wake: in.WakeAt, Deadline: in.CompleteBy, Older: max(in.Seq-logShown, 0), Content: "hidden",
	}
	if in.Status.Ended() {
		p.Refresh = 0
	}
	if in.Back {
		p.Turned = in.Step
	}
	if c.cfg.Show.State {
		p.Content = string(in.State)
	}
	var before, group []string // the names of the steps that run beside each other
	for _, s := range in.Steps {
		if !s.Parallel {
			before, group = group, nil
		}
		group = append(group, s.Name)
		u := unitView{
			Name: s.Name, State: s.Status, After: before, Pivot: s.Pivot,
			Attempts: s.Attempts, Undos: s.Undos, Refusals: s.Refusals,
			InDoubt: s.InDoubt, Error: c.text(s.Error), NotBefore: s.NotBefore, Waiting: s.WaitingSince,
			Tone: cmp.Or(stepTones[s.Status], blue),
		}
		for i := range min(s.Children, 20) {
			u.Children = append(u.Children, saga.ChildID(in.ID, s.Name, i))
		}
		p.Units = append(p.Units, u)
	}
	for _, e := range log {
		p.Log = append(p.Log, entryView{
			e.Seq, string(e.Kind), e.Step, string(e.Op), e.Attempt, e.Epoch, c.text(e.Error), e.At,
		})
	}
	for _, a := range in.Actions {
		if p.Acts {
			p.Allowed = append(p.Allowed, Action(a))
		}
	}
	return p
}

// Skippable returns the units that an operator may skip.
func (p sagaPage) Skippable() (names []string) {
	for _, u := range p.Units {
		if tone := stepTones[u.State]; tone != well && tone != idle {
			names = append(names, u.Name)
		}
	}
	return names
}

// Can reports whether the page offers an action.
func (p sagaPage) Can(v Action) bool { return slices.Contains(p.Allowed, v) }

// stepTones are the tones of steps at which the saga is not.
var stepTones = map[saga.StepStatus]tone{
	saga.StepDone: well, saga.StepSkipped: well, saga.StepIdle: idle, saga.StepUndone: idle,
	saga.StepFailed: fail, saga.StepUndoFailed: fail, saga.StepUndoing: warn, saga.StepNoEffect: warn,
}
