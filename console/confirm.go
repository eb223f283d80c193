package console

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// A confirmation is the page on which an operator confirms an operation that is hard to revert.
type confirmation struct {
	page
	Because, Yes string
	Fields       url.Values
	Back         string
	Changes      []change // the changes that a new State or Version makes
}

// A change is a change of a saga's state or version.
type change struct {
	Name          string
	Before, After side
}

// confirm reports whether an operation needs a confirmation. If so, confirm writes the confirmation page.
func (c *Console) confirm(w http.ResponseWriter, r *http.Request, op Operation) bool {
	page, back := op.back()
	var changes []change
	if runner, _, _ := c.runner(back.Get("runner")); runner != nil && op.ID != "" && op.replaces() {
		if r.PostForm.Get("sure") == "0" { // the operator continues to edit
			c.saga(w, r, http.StatusOK, back, &actionForm{Values: r.PostForm})
			return true
		}
		var err error
		if changes, err = c.changes(r.Context(), runner, &op); err != nil {
			c.refuse(w, r, op, http.StatusUnprocessableEntity, result{}, err)
			return true
		}
		if op.State == nil {
			r.PostForm.Del("state")
		}
	}
	q := op.confirmation()
	if q.Title == "" {
		return false
	}
	q.page, q.Fields, q.Back = c.page(page, q.Title, 0), r.PostForm, page+"?"+back.Encode()
	q.Changes = changes
	c.show(w, r, http.StatusOK, "confirm.html", q)
	return true
}

// replaces reports whether the operation changes a saga's state or version.
func (op Operation) replaces() bool { return op.State != nil || op.Version != 0 }

// confirmation returns the question that must be confirmed before an operation. If the operation needs no confirmation,
// the Title is empty.
func (op Operation) confirmation() (q confirmation) {
	a, object := actions[op.Action], cmp.Or(op.ID, op.Policy)
	switch {
	case op.targets != nil:
		object = plural(len(op.targets), "saga")
	case op.Key != "":
		object = fmt.Sprintf("the key %s of %s", op.Key, op.Policy)
	case op.Step != "":
		object = fmt.Sprintf("the step %s of %s", op.Step, op.ID)
	}
	var with []string
	if op.State != nil {
		with = append(with, "a new state")
	}
	if op.Version != 0 {
		with = append(with, fmt.Sprint("version ", op.Version))
	}
	if with != nil {
		object += " with " + strings.Join(with, " and ")
	}
	q.Yes, q.Because = capital(inWords(op.Action)), a.because
	if op.State != nil {
		q.Because = strings.TrimSpace(q.Because + " The saga does not keep the state before.")
	}
	if a.question != "" || op.targets != nil || with != nil {
		q.Title = fmt.Sprintf(cmp.Or(a.question, q.Yes+" %s?"), object)
	}
	return q
}

// A side is a text before or after a change. It is divided into the first lines that both texts have in common, the
// lines that differ, and the last lines that both texts have in common.
type side struct{ Head, Differs, Tail string }

// changeOf returns a change from the text before to the text after.
func changeOf(name, before, after string) change {
	a, b := strings.SplitAfter(before, "\n"), strings.SplitAfter(after, "\n")
	shorter, head, tail := min(len(a), len(b)), 0, 0
	for head < shorter && a[head] == b[head] {
		head++
	}
	for tail < shorter-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	split := func(lines []string) side {
		end := len(lines) - tail
		return side{strings.Join(lines[:head], ""), strings.Join(lines[head:end], ""), strings.Join(lines[end:], "")}
	}
	return change{name, split(a), split(b)}
}

// compacted returns a JSON text without insignificant spaces. For an empty text it returns nil.
func compacted(text string) (json.RawMessage, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	var b bytes.Buffer
	err := json.Unmarshal([]byte(text), new(json.RawMessage))
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return nil, fmt.Errorf("is not JSON: line %d: %w", 1+strings.Count(text[:syntax.Offset], "\n"), err)
	}
	err = json.Compact(&b, []byte(text))
	return b.Bytes(), err
}

// indented returns data as indented JSON, or unchanged if it is not JSON.
func indented(data []byte) string {
	var b bytes.Buffer
	if json.Indent(&b, data, "", "  ") != nil {
		return string(data)
	}
	return b.String()
}
