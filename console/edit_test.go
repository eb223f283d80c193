package console_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/saga"
)

// A booking is the state of a saga. Its step mail needs the Ticket that its step ticket leaves.
type booking struct {
	Seats  int
	Ticket string `json:",omitempty"`
	Mailed string `json:",omitempty"`
}

// An office has a stuck saga, "stuck", whose step ticket fails, and a parked one, "parked", which waits for a signal.
// Version 2 of the definition has another ticket.
type office struct {
	*shop
	runner *saga.Runner
	audit  []console.Operation
}

func newOffice(t *testing.T, show console.Show) *office {
	step := func(name string, do func(*booking) error) saga.Step[booking] {
		return saga.Step[booking]{Name: name, Do: func(_ context.Context, b *booking) error { return do(b) }}
	}
	seats := step("seats", func(*booking) error { return nil })
	seats.Undo = seats.Do
	ticket := step("ticket", func(*booking) error { return saga.Permanent(errors.New("no such printer")) })
	ticket.Pivot = true
	mail := step("mail", func(b *booking) error { b.Mailed = "mailed " + b.Ticket; return nil })
	fixed := step("ticket", func(b *booking) error { b.Ticket = "T-2"; return nil })
	fixed.Pivot = true
	last := mail
	last.Pivot = true
	approval := saga.Step[booking]{Name: "approval", Await: "approved"}
	v1 := &saga.Saga[booking]{Name: "booking", Version: 1, Steps: []saga.Step[booking]{seats, ticket, mail}}
	v2 := &saga.Saga[booking]{Name: "booking", Version: 2, Steps: []saga.Step[booking]{seats, fixed, mail}}
	waits := &saga.Saga[booking]{Name: "waiting", Version: 1, Steps: []saga.Step[booking]{seats, approval, last}}
	quick := &saga.Saga[booking]{Name: "waiting", Version: 2, Steps: []saga.Step[booking]{seats, last}}
	o := &office{runner: saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "office"})}
	o.runner.Observe(func(context.Context, saga.Event) {})
	bookings, waiting := saga.Register(o.runner, v1, v2), saga.Register(o.runner, waits, quick)
	o.shop = pageOf(t, console.Config{Show: show,
		Allow: func(_ *http.Request, op console.Operation) error {
			if op.Note == "forbidden" {
				return errors.New("not on a Sunday")
			}
			return nil
		},
		Audit: func(_ context.Context, op console.Operation, _ error) { o.audit = append(o.audit, op) },
	}, o.runner)
	for _, id := range []string{"stuck", "other"} {
		_, err := bookings.Start(t.Context(), id, booking{Seats: 2})
		require.NoError(t, err)
	}
	_, err := waiting.Start(t.Context(), "parked", booking{Seats: 3})
	require.NoError(t, err)
	o.run()
	return o
}

// run runs the sagas for a minute.
func (o *office) run() {
	ctx, stop := context.WithCancel(o.t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = o.runner.Run(ctx) })
	time.Sleep(time.Minute)
	stop()
	running.Wait()
}

func (o *office) saga(id string) *saga.Instance {
	o.t.Helper()
	in, err := o.runner.Get(o.t.Context(), id)
	require.NoError(o.t, err)
	return in
}

// form returns the form of a saga's page that changes its state or version, with some fields set.
func (o *office) form(id string, set ...string) url.Values {
	o.t.Helper()
	_, form, found := strings.Cut(o.get("/saga?id="+id, nil).Body.String(), `<details id="edit" class="edit"`)
	require.True(o.t, found, "%s has no form", id)
	form, _, _ = strings.Cut(form, "</form>")
	return fieldsOf(form, set...)
}

var (
	inputs = regexp.MustCompile(`<(?:input type="hidden"|input) name="([^"]*)" value="([^"]*)"`)
	areas  = regexp.MustCompile(`(?s)<textarea name="([^"]*)"[^>]*>\n?(.*?)</textarea>`)
)

// fieldsOf returns the fields of a form's markup, with some of them set.
func fieldsOf(form string, set ...string) url.Values {
	fields := url.Values{}
	for _, field := range append(inputs.FindAllStringSubmatch(form, -1), areas.FindAllStringSubmatch(form, -1)...) {
		fields.Add(field[1], html.UnescapeString(field[2]))
	}
	for i := 0; i < len(set); i += 2 {
		fields.Set(set[i], set[i+1])
	}
	return fields
}

// send posts a form as a browser does, and returns the status and the text of the response.
func (o *office) send(form url.Values) (status int, body string) {
	o.t.Helper()
	pairs := []string{"sure", ""}
	for name, values := range form {
		pairs = append(pairs, name, values[0])
	}
	w := o.post(pairs...)
	return w.Code, w.Body.String()
}

// confirm presses the button of a confirmation.
func (o *office) confirm(page, sure string) (status int, body string) {
	o.t.Helper()
	return o.send(fieldsOf(page, "sure", sure))
}

func TestOperatorEntersStateOfSkippedStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice(t, console.Show{Errors: true, State: true})
		form := o.form("stuck", "action", "skip", "step", "ticket", "note", "printed by hand")
		require.Equal(t, "{\n  \"Seats\": 2\n}", form.Get("state"))
		form.Set("state", "{\r\n  \"Seats\": 2,\r\n  \"Ticket\": \"T-1 <b>\"\r\n}")
		seq := o.saga("stuck").Seq
		status, page := o.send(form)
		require.Equal(t, http.StatusOK, status)
		for _, text := range []string{
			"<h1>Skip the step ticket of stuck with a new state?</h1>", "The saga does not keep the state before.",
			"<pre tabindex=\"0\">{\n<del>  &#34;Seats&#34;: 2\n</del>}</pre>",
			"<pre tabindex=\"0\">{\n<ins>  &#34;Seats&#34;: 2,\n  &#34;Ticket&#34;: &#34;T-1 &lt;b&gt;&#34;\n</ins>}</pre>",
		} {
			require.Contains(t, page, text)
		}
		require.NotContains(t, page, `aria-label="Version"`)
		require.Equal(t, seq, o.saga("stuck").Seq)
		require.Empty(t, o.audit)

		status, page = o.confirm(page, "0")
		require.Equal(t, http.StatusOK, status, "back to the form")
		require.Contains(t, page, "T-1 &lt;b&gt;")
		require.Contains(t, page, `value="printed by hand"`)
		require.Contains(t, page, `<details id="edit" class="edit" open>`)

		_, page = o.send(form)
		status, _ = o.confirm(page, "1")
		require.Equal(t, http.StatusSeeOther, status)
		require.Equal(t, []console.Operation{{
			Action: console.Skip, Policy: "saga/office", ID: "stuck", Step: "ticket", Seq: seq, Note: "printed by hand",
			State: json.RawMessage(`{"Seats":2,"Ticket":"T-1 <b>"}`),
		}}, o.audit)
		o.run()
		in := o.saga("stuck")
		require.Equal(t, saga.Completed, in.Status)
		require.JSONEq(t, `{"Seats":2,"Ticket":"T-1 <b>","Mailed":"mailed T-1 <b>"}`, string(in.State))
		require.Contains(t, o.get("/saga?id=stuck", nil).Body.String(), "printed by hand (the state was replaced)")
		require.NotContains(t, o.get("/saga?id=stuck", nil).Body.String(), `class="edit"`, "it has ended")
	})
}

func TestOperatorMovesSagaToVersion(t *testing.T) {
	for _, id := range []string{"stuck", "parked"} {
		t.Run(id, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOffice(t, console.Show{State: true})
				_, page := o.send(o.form(id, "action", "retry", "version", "2", "note", "fixed in 2"))
				require.Contains(t, page, "<h1>Retry "+id+" with version 2?</h1>")
				require.Contains(t, page, `<pre tabindex="0"><del>1</del></pre>`)
				require.Contains(t, page, `<pre tabindex="0"><ins>2</ins></pre>`)
				require.NotContains(t, page, "The saga does not keep", "the state stays the same")
				status, _ := o.confirm(page, "1")
				require.Equal(t, http.StatusSeeOther, status)
				require.Equal(t, 2, o.audit[0].Version)
				require.Nil(t, o.audit[0].State)
				o.run()
				require.Equal(t, saga.Completed, o.saga(id).Status)
				require.Equal(t, 2, o.saga(id).Version)
			})
		})
	}
}

// A refused form is shown again with what the operator has entered.
func TestRefusedEditKeepsItsFields(t *testing.T) {
	const state = "{\"Seats\": 2,\n \"Ticket\": \"T-1\"}"
	for name, c := range map[string]struct {
		set    []string
		before func(t *testing.T, o *office)
		status int
		want   []string
	}{
		"invalid JSON": {[]string{"state", "{\n\"Seats\": 2,\n}"}, nil, 400,
			[]string{"state: is not JSON: line 3: invalid character '}'"}},
		"wrong type": {[]string{"state", `{"Seats": "two"}`}, nil, 422, []string{"state does not decode"}},
		"no change": {[]string{"state", `{"Seats":2}`, "version", ""}, nil, 422,
			[]string{"nothing would change: enter another state or a version"}},
		"no version": {[]string{"version", "two"}, nil, 400,
			[]string{`version: is "two": must be the number of a registered version`}},
		"version 0":       {[]string{"version", "0"}, nil, 400, []string{`version: is "0": must be`}},
		"unknown version": {[]string{"version", "9"}, nil, 422, []string{"not registered: booking version 9"}},
		"no note":         {[]string{"note", ""}, nil, 400, []string{"note: is empty: must have the reason"}},
		"forbidden":       {[]string{"note", "forbidden"}, nil, 403, []string{"not on a Sunday"}},
		"other action":    {[]string{"action", "abandon"}, nil, 400, []string{"is not a field of abandon"}},
		"changed": {nil, func(t *testing.T, o *office) {
			require.NoError(t, o.runner.Operate(t.Context(), "stuck", saga.Operation{Action: saga.ActionRetry, Note: "again"}))
		}, 422, []string{"its log has grown from",
			"The saga has changed since you saw it. This page shows it as it is now."}},
		"ended": {[]string{"seq", "0"}, func(t *testing.T, o *office) {
			require.NoError(t, o.runner.Operate(t.Context(), "stuck", saga.Operation{Action: saga.ActionAbandon, Note: "x"}))
		}, 422, []string{"it is abandoned"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOffice(t, console.Show{Errors: true, State: true})
				form := o.form("stuck", append([]string{
					"action", "skip", "step", "ticket", "state", state, "version", "1", "note", "by hand",
				}, c.set...)...)
				if c.before != nil {
					c.before(t, o)
				}
				status, page := o.send(form)
				if status == http.StatusOK { // the confirmation
					status, page = o.confirm(page, "1")
				}
				require.Equal(t, c.status, status)
				for _, want := range c.want {
					require.Contains(t, html.UnescapeString(page), want)
				}
				require.Equal(t, name == "changed", strings.Contains(page, "The saga has changed since"))
				in := o.saga("stuck")
				require.JSONEq(t, `{"Seats":2}`, string(in.State))
				require.Equal(t, 1, in.Version)
				if name == "ended" {
					return // it has no form any more
				}
				_, again, _ := strings.Cut(page, `<details id="edit" class="edit" open>`)
				again, _, _ = strings.Cut(again, "</form>")
				fields := fieldsOf(again)
				require.Equal(t, fmt.Sprint(in.Seq), fields.Get("seq"), "of the saga that the page shows")
				for _, field := range []string{"state", "version", "note"} {
					require.Equal(t, form.Get(field), fields.Get(field), field)
				}
				require.Contains(t, again, "<option selected>ticket</option>")
			})
		})
	}
}

// A saga that a runner holds cannot be changed, and its page has no form.
func TestHeldSagaCannotBeEdited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held := &saga.Saga[booking]{Name: "held", Steps: []saga.Step[booking]{{Name: "seats", Pivot: true,
			Do: func(ctx context.Context, _ *booking) error { <-ctx.Done(); return ctx.Err() }}}}
		o := newOffice(t, console.Show{State: true})
		form := o.form("parked", "action", "retry", "id", "held", "seq", "0", "state", `{"Seats": 1}`, "note", "x")
		_, err := saga.Register(o.runner, held).Start(t.Context(), "held", booking{})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = o.runner.Run(ctx) })
		defer func() { stop(); running.Wait() }()
		time.Sleep(10 * time.Second)
		require.NotContains(t, o.get("/saga?id=held", nil).Body.String(), `class="edit"`)
		_, page := o.send(form)
		status, page := o.confirm(page, "1")
		require.Equal(t, http.StatusUnprocessableEntity, status)
		require.Contains(t, html.UnescapeString(page), `not allowed: retry of "held": it is running, held by`)
	})
}

// If states are hidden, the form and the confirmation do not show them. The state can still be replaced.
func TestHiddenStateIsNotShownInForm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice(t, console.Show{})
		form := o.form("stuck", "action", "skip", "step", "ticket", "note", "by hand")
		require.Empty(t, form.Get("state"))
		form.Set("state", `{"Ticket": "T-1"}`)
		_, page := o.send(form)
		require.Contains(t, page, `<del>hidden</del>`)
		require.NotContains(t, page, "Seats")
		status, _ := o.confirm(page, "1")
		require.Equal(t, http.StatusSeeOther, status)
		require.JSONEq(t, `{"Ticket":"T-1"}`, string(o.saga("stuck").State))
	})
}

// A state that is not JSON cannot be entered as JSON.
func TestStateOfAnotherCodecIsNotOffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice(t, console.Show{State: true})
		sg := &saga.Saga[booking]{Name: "gob", Codec: gob{}, Steps: []saga.Step[booking]{{Name: "go", Await: "go"}}}
		_, err := saga.Register(o.runner, sg).Start(t.Context(), "gob", booking{})
		require.NoError(t, err)
		o.run()
		form := o.form("gob", "action", "retry", "note", "x")
		require.NotContains(t, form, "state")
		require.Contains(t, o.get("/saga?id=gob", nil).Body.String(), "The state is not JSON")
		form.Set("state", "{}")
		_, page := o.send(form)
		status, page := o.confirm(page, "1")
		require.Equal(t, http.StatusUnprocessableEntity, status)
		require.Contains(t, page, "state does not decode")
	})
}

// gob is a Codec that is not JSON.
type gob struct{}

func (gob) Encode(*booking) ([]byte, error) { return []byte("gob"), nil }
func (gob) Decode(data []byte, _ *booking) error {
	if string(data) != "gob" {
		return errors.New("not gob")
	}
	return nil
}

// A script moves many sagas to a version, but cannot give them one state.
func TestScriptMovesManySagas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice(t, console.Show{})
		form := "action=retry&policy=saga/office&version=2&note=fixed&ids=stuck@0&ids=other@0"
		var answer manyResult
		require.NoError(t, json.Unmarshal(o.postJSON(form+"&state={}").Body.Bytes(), &answer))
		require.Contains(t, answer.Error, "state: must have id")
		require.NoError(t, json.Unmarshal(o.postJSON(form).Body.Bytes(), &answer))
		require.Equal(t, 2, answer.Acted)
		o.run()
		require.Equal(t, saga.Completed, o.saga("stuck").Status)
		require.Equal(t, saga.Completed, o.saga("other").Status)
	})
}
