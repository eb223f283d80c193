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
)

// A sagaPage is the page of one saga.
type sagaPage struct {
	page
	Runner string `json:"runner"`
	sagaView
	Cause    string      `json:"cause,omitempty"`
	Turned   string      `json:"turned_back_at,omitempty"` // the step whose error is Cause
	Epoch    int64       `json:"epoch"`
	Wake     time.Time   `json:"wake,omitzero"`
	Deadline time.Time   `json:"deadline,omitzero"`
	Takeover int         `json:"takeovers"`
	Canceled bool        `json:"cancel_requested"`
	Updated  time.Time   `json:"updated"`
	Units    []unitView  `json:"units"`
	Log      []entryView `json:"log"`
	Older    int64       `json:"older,omitempty"` // number of older log entries, which are not shown
	Content  string      `json:"state,omitempty"` // the state of the saga; "hidden" unless Show.State

	Form  *actionForm `json:"-"` // submitted form that had an error, or that the operator continues to edit
	Edits bool        `json:"-"` // the page offers to change the state and the version
	JSON  bool        `json:"-"` // the state is JSON
}

// A unitView is a step of a saga.
type unitView struct {
	Name         string     `json:"name"`
	State        stepStatus `json:"status"`
	After        []string   `json:"after,omitempty"`
	Pivot        bool       `json:"pivot,omitempty"`
	Attempts     int        `json:"attempts"`
	Undos        int        `json:"undos"`
	Refusals     int        `json:"refusals"`
	MaybeApplied bool       `json:"maybe_applied,omitempty"`
	Error        string     `json:"error,omitempty"`
	NotBefore    time.Time  `json:"not_before,omitzero"`
	Waiting      time.Time  `json:"waiting_since,omitzero"`
	Children     []string   `json:"children,omitempty"` // ids of up to 20 child sagas

	Tone      tone `json:"-"`
	skippable bool
}

// An entryView is an entry of a saga's log.
type entryView struct {
	Seq     int64     `json:"seq"`
	Kind    string    `json:"kind"`
	Step    string    `json:"step,omitempty"`
	Op      string    `json:"op,omitempty"`
	Attempt int       `json:"attempt,omitempty"`
	Epoch   int64     `json:"epoch"`
	Text    string    `json:"text,omitempty"` // an error, or an operator's note
	At      time.Time `json:"at"`
}

// logShown is the maximum number of log entries on a page. If there are more, the newest are shown.
const logShown = 500

// saga writes the page of the saga that q names. form is a submitted form that the page shows again, or nil.
func (c *Console) saga(w http.ResponseWriter, r *http.Request, status int, q url.Values, form *actionForm) {
	runner, name, _ := c.runner(q.Get("runner"))
	if runner == nil {
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no runner %s", q.Get("runner")))
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), storeTimeout)
	defer cancel()
	id := strings.TrimSpace(cmp.Or(q.Get("id"), q.Get("text"))) // the Open button of a list sends the id as text
	p, err := c.sagaPage(ctx, runner, name, id)
	switch {
	case errors.Is(err, errNoSaga):
		c.fail(w, r, http.StatusNotFound, fmt.Errorf("there is no saga %s", id))
		return
	case err != nil:
		err = c.storeError(err)
		if form != nil && form.Error != "" {
			err = errors.Join(errors.New(form.Error), err)
		}
		c.fail(w, r, http.StatusBadGateway, err)
		return
	}
	p.Done, p.Form = actions[Action(q.Get("done"))].done, form
	if form != nil && form.Error != "" && !slices.Contains([]string{"", "0", fmt.Sprint(p.Seq)}, form.Values.Get("seq")) {
		form.Error += "\nThe saga has changed since you saw it. This page shows it as it is now."
	}
	c.show(w, r, status, "saga.html", p)
}

// Skippable returns the names of the steps that an operator may skip.
func (p sagaPage) Skippable() (names []string) {
	for _, u := range p.Units {
		if u.skippable {
			names = append(names, u.Name)
		}
	}
	return names
}

// Can reports whether the page offers an action.
func (p sagaPage) Can(v Action) bool { return slices.Contains(p.Actions, v) }

// Indented returns the saga's state, indented if it is JSON.
func (p sagaPage) Indented() string { return indented([]byte(p.Content)) }

// Draft returns the state to show in the form: the text that the operator has entered. If there is no such text, Draft
// returns the saga's state.
func (p sagaPage) Draft() string {
	switch {
	case p.Form.Edits():
		return p.Form.Values.Get("state")
	case p.Content == "hidden":
		return ""
	}
	return p.Indented()
}
