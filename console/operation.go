package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/registry"
)

// An Action is the kind of an [Operation].
type Action string

// Actions on a breaker, or on one member of a Group of breakers.
const (
	// Trip opens the breaker for Operation.For.
	Trip Action = "trip"
	// Reset closes the breaker and resets its counts.
	Reset Action = "reset"
	// ForceOpen makes the breaker refuse all calls until Enable.
	ForceOpen Action = "force_open"
	// Disable makes the breaker admit all calls until Enable.
	Disable Action = "disable"
	// Enable ends ForceOpen and Disable.
	Enable Action = "enable"
)

// Actions on any policy with settings.
const (
	// Apply changes the policy's settings to Operation.Settings.
	Apply Action = "apply"
	// Preview reports the changes that Apply would make, but changes nothing.
	Preview Action = "preview"
)

// Actions on a cache.
const (
	// Invalidate removes the value of Operation.Key.
	Invalidate Action = "invalidate"
	// Expire makes the value of Operation.Key stale.
	Expire Action = "expire"
	// InvalidateAll removes all values.
	InvalidateAll Action = "invalidate_all"
)

// Actions on a saga. The actions on a saga call the method Operate of saga.Runner, whose documentation describes the
// actions. Each action requires an Operation.Note, which is written to the saga's log. Retry, Skip and Compensate may
// have a new Operation.State or Operation.Version.
const (
	// Cancel requests that a running saga turns back: it stops going forward and undoes its steps.
	Cancel Action = "cancel"
	// Retry lets a stuck saga continue in the direction that it had, forward or backward.
	Retry Action = "retry"
	// Skip skips Operation.Step, and the saga continues after it. If Step is empty, Skip applies to the step that blocks a
	// stuck saga.
	Skip Action = "skip"
	// Compensate turns the saga back: the saga undoes its steps.
	Compensate Action = "compensate"
	// Abandon ends the saga without doing or undoing its remaining steps.
	Abandon Action = "abandon"
)

// actions describes each action. fields are the fields of its form, in addition to commonFields. done is the message
// after the action. question and because are the text of the confirmation before it; without a question, there is none.
//
// A form with any other field is an error. If the field were ignored, the operation could affect more than the operator
// intended, for example the whole Group instead of one key. The messages are here because a link to a page can then
// select a message, but cannot contain its own text.
var actions = map[Action]struct{ fields, done, question, because string }{
	Trip:  {fields: "key for", done: "The breaker was tripped."},
	Reset: {fields: "key", done: "The breaker was reset."},
	ForceOpen: {"key", "The breaker was forced open. It refuses all calls until it is enabled.",
		"Force %s open?", "It refuses all calls until it is enabled."},
	Disable: {"key", "The breaker was disabled. It admits all calls until it is enabled.",
		"Disable %s?", "It admits all calls until it is enabled."},
	Enable:     {fields: "key", done: "The breaker was enabled."},
	Apply:      {fields: "settings", done: "The settings were changed."},
	Preview:    {fields: "settings"},
	Invalidate: {fields: "key", done: "The key was invalidated."},
	Expire:     {fields: "key", done: "The key was expired."},
	InvalidateAll: {"", "All keys were invalidated.",
		"Invalidate all keys of %s?", "The next request for each key loads its value again."},
	Cancel: {"id ids seq", "The cancellation was recorded.", "Cancel %s?", turnsBack},
	Retry:  {fields: "id ids seq state version", done: "The saga is retried."},
	Skip: {"id ids seq state version", "The step was skipped.", "Skip %s?",
		"The saga continues after the step. The step is not undone later, even if it had an effect."},
	Compensate: {"id ids seq state version", "The saga has turned back.", "Compensate %s?", turnsBack},
	Abandon: {"id ids seq", "The saga was abandoned.", "Abandon %s?",
		"The remaining steps are neither done nor undone. Nothing can revert this."},
}

const turnsBack = "The saga stops going forward and undoes its steps."

// commonFields are fields that the form of any action may have. Some of them belong to another button of the same form.
const commonFields = "action policy note preview sure list step for"

// An Operation is an [Action] on a policy or a saga, with its arguments. Fields that the action does not use are
// zero.
type Operation struct {
	Action   Action
	Policy   string          // kind and name, such as "breaker/users"; for a saga, its Runner: "saga/orders"
	Key      string          // key of a Group or a cache
	For      time.Duration   // duration of Trip; zero means the breaker's own OpenFor
	Settings json.RawMessage // argument of Apply and Preview: a JSON object of the fields to change
	ID       string          // the saga's id
	Step     string          // argument of Skip
	Seq      int64           // number of entries in the saga's log when the operator saw the saga; zero means any
	Note     string          // the operator's reason
	State    json.RawMessage // the saga's new state, which may contain secrets; nil means no change
	Version  int             // the registered version to which the saga moves; zero means no change

	targets []target // sagas of an action on many sagas, which becomes one Operation for each
	list    string   // query of the page that lists the sagas; empty if the form is not on that page
}

// A target is a saga, with the seq that the operator saw.
type target struct {
	id  string
	seq int64
}

// LogValue implements [slog.LogValuer]. LogValue returns a group of the fields that are not zero, including State,
// which may contain secrets.
func (op Operation) LogValue() slog.Value {
	attrs := []slog.Attr{
		slog.String("action", string(op.Action)), slog.String("policy", op.Policy), slog.String("key", op.Key),
		slog.Duration("for", op.For), slog.String("settings", string(op.Settings)), slog.String("id", op.ID),
		slog.String("step", op.Step), slog.Int64("seq", op.Seq), slog.String("note", op.Note),
		slog.String("state", string(op.State)), slog.Int("version", op.Version),
	}
	return slog.GroupValue(slices.DeleteFunc(attrs, func(a slog.Attr) bool {
		return reflect.ValueOf(a.Value.Any()).IsZero()
	})...)
}

// actionsOf returns the actions that a policy supports.
func actionsOf(e registry.Entry) (all []Action) {
	if e.Kind == "breaker" {
		all = append(all, Trip, Reset, ForceOpen, Disable, Enable)
	}
	if cacheOf(e.Policy) != nil {
		all = append(all, Invalidate, Expire, InvalidateAll)
	}
	fixed := e.Update(true, func(any) error { return nil }) // a dry run without a change
	if fixed == nil && e.Settings() != nil {
		all = append(all, Apply)
	}
	return all
}

// Can reports whether the page offers an action.
func (p policyPage) Can(v Action) bool { return slices.Contains(p.Actions, v) }

// An operable breaker has the methods of a breaker that an operator may call.
type operable interface {
	Trip(err error, d time.Duration)
	Reset()
	ForceOpen(reason error)
	Disable()
	Enable()
}

// errOperator becomes the last error of a breaker that an operator has tripped or forced open.
var errOperator = errors.New("opened by an operator in the console")

// An actionForm is a submitted form that the response shows again, with an error or a preview.
type actionForm struct {
	Error   string
	Changes registry.Report // result of Preview
	Values  url.Values
}

// Edits reports whether the form edits values: the settings of a policy, or the state and version of a saga.
func (f *actionForm) Edits() bool {
	return f != nil && (f.Values.Has("settings") || f.Values.Has("version"))
}

// Value returns the submitted value of a field, or "" if f is not the selected form. If edits is true, the selected
// form is the form that edits values. If edits is false, the selected form is the form of the other actions.
func (f *actionForm) Value(name string, edits bool) string {
	if f == nil || edits != f.Edits() {
		return ""
	}
	return f.Values.Get(name)
}

// act handles a POST request with an operation.
func (c *Console) act(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", "POST")
		c.fail(w, r, http.StatusMethodNotAllowed, errors.New("action must be sent with POST"))
		return
	}
	if err := c.origin.Check(r); err != nil {
		c.fail(w, r, http.StatusForbidden, explain(r, err))
		return
	}
	lastStart, end := timeLimits(time.Now(), r)
	if !end.IsZero() {
		ctx, cancel := context.WithDeadlineCause(r.Context(), end, errTime)
		defer cancel()
		r = r.WithContext(ctx)
	}
	r.Body = http.MaxBytesReader(w, r.Body, 1<<20)
	if err := r.ParseForm(); err != nil {
		c.fail(w, r, http.StatusBadRequest, err)
		return
	}
	op, err := c.parseOperation(r.PostForm)
	if err != nil {
		c.refuse(w, r, op, http.StatusBadRequest, result{}, err)
		return
	}
	if c.cfg.Allow == nil {
		c.refuse(w, r, op, http.StatusForbidden, result{}, errors.New("console is read-only"))
		return
	}
	if r.PostForm.Get("sure") != "1" && !wantsJSON(r) && c.confirm(w, r, op) {
		return
	}
	done, status, err := c.apply(r, op, lastStart)
	switch {
	case err != nil:
		c.refuse(w, r, op, status, done, err)
	case wantsJSON(r):
		done.Done = op.Action != Preview
		c.show(w, r, http.StatusOK, "", done)
	case op.Action == Preview:
		e, _ := c.entry(op.Policy)
		p := c.policyPage(e, op.Key)
		p.Form = &actionForm{Changes: done.Changes, Values: r.PostForm}
		c.show(w, r, http.StatusOK, "policy.html", p)
	default:
		page, q := op.back()
		if op.Action != Apply || len(done.Changes) > 0 { // otherwise nothing changed
			q.Set("done", string(op.Action))
		}
		if op.targets != nil {
			q.Set("acted", strconv.Itoa(done.Acted))
		}
		if done.Refused > 0 { // after a redirect, the page would not have the reasons
			c.sagas(w, r, http.StatusOK, q, done, nil)
			return
		}
		w.Header().Set("Location", page+"?"+q.Encode())
		w.WriteHeader(http.StatusSeeOther)
	}
}

var errTime = errors.New("time for this response is over")

// timeLimits returns the time limits of an action on many sagas. After lastStart, the action does not start with
// another saga. At end, the action must end. Otherwise its response would be later than the server's WriteTimeout or
// the deadline of the request's ctx. Both times are zero if there is no limit.
func timeLimits(now time.Time, r *http.Request) (lastStart, end time.Time) {
	var limit time.Time
	if s, ok := r.Context().Value(http.ServerContextKey).(*http.Server); ok && s.WriteTimeout > 0 {
		limit = now.Add(s.WriteTimeout)
	}
	if d, ok := r.Context().Deadline(); ok && (limit.IsZero() || d.Before(limit)) {
		limit = d
	}
	if limit.IsZero() {
		return limit, limit
	}
	left := limit.Sub(now)
	return now.Add(left * 6 / 10), now.Add(left * 8 / 10)
}

// apply applies an operation. An operation on many sagas is applied to each saga, in the order of the form. It ends
// early at the first saga for which Allow returns an error or the store fails, and at lastStart.
func (c *Console) apply(r *http.Request, op Operation, lastStart time.Time) (done result, status int, err error) {
	if op.targets == nil {
		status, err = c.applyOne(r, op, &done)
		return done, status, err
	}
	for i, t := range op.targets {
		one := op
		one.ID, one.Seq, one.targets = t.id, t.seq, nil
		status, err = http.StatusServiceUnavailable, errTime
		if lastStart.IsZero() || time.Now().Before(lastStart) {
			status, err = c.applyOne(r, one, &done) // calls Allow for each saga: the permission may be revoked
		}
		switch {
		case err == nil:
			done.Acted++
		case status == http.StatusUnprocessableEntity && isRefusal(err):
			done.Refused++
			done.Refusals = append(done.Refusals, refusal{t.id, err.Error()})
		default:
			done.Left = len(op.targets) - i
			return done, status, fmt.Errorf("%d done, %d refused, %d left: %w", done.Acted, done.Refused, done.Left, err)
		}
	}
	return done, 0, nil
}

// applyOne applies an operation to one policy or saga. It returns an error if the console is closed, the request's ctx
// is done, or Allow forbids the operation. It also returns the HTTP status for the error.
func (c *Console) applyOne(r *http.Request, op Operation, done *result) (status int, err error) {
	if c.sampler.ctx.Err() != nil {
		return http.StatusServiceUnavailable, errClosed
	}
	if r.Context().Err() != nil {
		return http.StatusServiceUnavailable, context.Cause(r.Context())
	}
	status = http.StatusForbidden
	if err = c.cfg.Allow(r, op); err == nil {
		status = http.StatusUnprocessableEntity
		err = c.do(r.Context(), op, done)
	}
	if c.cfg.Audit != nil { // even if the client has disconnected
		c.cfg.Audit(context.WithoutCancel(r.Context()), op, err)
	}
	return status, err
}

// explain returns err, the error of a cross-origin request. If a proxy may have changed the Host header, explain adds
// how to configure the proxy.
func explain(r *http.Request, err error) error {
	from, bad := url.Parse(r.Header.Get("Origin"))
	if r.Header.Get("Sec-Fetch-Site") != "" || bad != nil || from.Host == "" {
		return err
	}
	return fmt.Errorf("page is from %s (Origin), but the request is for %s (Host). "+
		"A proxy must keep the Host: in nginx, proxy_set_header Host $http_host", from.Host, r.Host)
}

// parseOperation parses a form. If it returns an error, op has the fields that were parsed before the error.
func (c *Console) parseOperation(form url.Values) (op Operation, err error) {
	op = Operation{Action: Action(form.Get("action")), Policy: form.Get("policy"), Key: form.Get("key"),
		ID: form.Get("id"), Note: strings.TrimSpace(form.Get("note")), list: form.Get("list")}
	if op.Action == Apply && form.Has("preview") {
		op.Action = Preview
	}
	a, ok := actions[op.Action]
	if !ok {
		return op, fmt.Errorf("there is no action %q", op.Action)
	}
	for field, values := range form {
		if values[0] != "" && !slices.Contains(strings.Fields(commonFields+" "+a.fields), field) {
			return op, fmt.Errorf("%s: is not a field of %s", field, op.Action)
		}
	}
	if _, ok := c.entry(op.Policy); !ok {
		return op, fmt.Errorf("there is no policy %s", op.Policy)
	}
	switch op.Action {
	case Trip:
		if d := strings.TrimSpace(form.Get("for")); d != "" {
			if op.For, err = time.ParseDuration(d); err != nil || op.For < 0 {
				return op, fmt.Errorf("for: is %q: must be a duration such as 30s", d)
			}
		}
	case Apply, Preview:
		if op.Settings = json.RawMessage(form.Get("settings")); !json.Valid(op.Settings) {
			return op, errors.New(
				`settings: is not JSON: must be an object of the fields to change, such as {"Limit": 8}`)
		}
	case Cancel, Retry, Skip, Compensate, Abandon:
		return op, op.parseSagas(form)
	}
	return op, nil
}

// parseSagas parses the fields of an action on sagas.
func (op *Operation) parseSagas(form url.Values) (err error) {
	if op.Action == Skip {
		op.Step = form.Get("step")
	}
	if op.State, err = compacted(form.Get("state")); err != nil {
		return fmt.Errorf("state: %w", err)
	}
	if v := strings.TrimSpace(form.Get("version")); v != "" {
		if op.Version, err = strconv.Atoi(v); err != nil || op.Version < 1 {
			return fmt.Errorf("version: is %q: must be the number of a registered version", v)
		}
	}
	if seq := form.Get("seq"); seq != "" {
		if op.Seq, err = parseSeq(seq); err != nil {
			return fmt.Errorf("seq: %w", err)
		}
	}
	for _, v := range form["ids"] {
		i := strings.LastIndexByte(v, '@')
		if i < 1 {
			return fmt.Errorf("ids: is %q: must be id@seq, with the seq that the list shows", v)
		}
		seq, err := parseSeq(v[i+1:])
		if err != nil {
			return fmt.Errorf("ids: %w", err)
		}
		op.targets = append(op.targets, target{v[:i], seq})
	}
	switch {
	case op.ID == "" && op.targets == nil && op.list != "":
		return errors.New("select at least one saga")
	case (op.ID == "") == (op.targets == nil):
		return errors.New("must have either id or ids")
	case op.targets != nil && op.Seq != 0:
		return errors.New("seq: must be part of ids, as id@seq")
	case op.targets != nil && op.State != nil:
		return errors.New("state: must have id: sagas have different states")
	case op.Note == "":
		return errors.New("note: is empty: must have the reason, for the saga's log")
	}
	return nil
}

func parseSeq(text string) (int64, error) {
	seq, err := strconv.ParseInt(text, 10, 64)
	if err != nil || seq < 0 {
		return 0, fmt.Errorf("is %q: must be a number of log entries", text)
	}
	return seq, nil
}

// entry returns the policy with a path such as "breaker/users".
func (c *Console) entry(path string) (registry.Entry, bool) {
	kind, name, _ := strings.Cut(path, "/")
	return c.reg.Get(kind, name)
}

// do applies an operation that Allow has permitted.
func (c *Console) do(ctx context.Context, op Operation, done *result) (err error) {
	e, ok := c.entry(op.Policy)
	if !ok {
		return fmt.Errorf("there is no policy %s", op.Policy)
	}
	switch op.Action {
	case Trip, Reset, ForceOpen, Disable, Enable:
		return operate(e, op)
	case Apply, Preview:
		change := c.reg.Apply
		if op.Action == Preview {
			change = c.reg.Preview
		}
		done.Changes, err = change(encode(map[string]json.RawMessage{op.Policy: op.Settings}))
		if op.Action == Preview && err == nil && len(done.Changes) == 0 {
			err = errors.New("nothing would change")
		}
		return err
	case Invalidate, Expire, InvalidateAll:
		if do := cacheOf(e.Policy); do != nil {
			return do(ctx, op)
		}
		return fmt.Errorf("%s is not a cache", e)
	}
	return operateSaga(ctx, e.Policy, op)
}

// A storeError is an error from the store of a cache or of a Runner. Its text may hold secrets.
type storeError struct{ error }

const storeFailed = "store failed: "

func (e storeError) Error() string { return storeFailed + fmt.Sprint(e.error) }
func (e storeError) Unwrap() error { return e.error }

// ofStore returns err, an error of a store, as a storeError. It returns nil if err is nil.
func ofStore(err error) error {
	if err == nil {
		return nil
	}
	return storeError{err}
}

// errorText returns the text of an operation's error. If Show.Errors is not set, it hides the text of a store's error.
func (c *Console) errorText(err error) string {
	if failed, ok := errors.AsType[storeError](err); ok {
		before, _, _ := strings.Cut(err.Error(), storeFailed)
		return before + storeFailed + c.secret(failed.error)
	}
	return err.Error()
}

// storeError returns the error that a page shows if its query to a store failed.
func (c *Console) storeError(err error) error { return errors.New(c.errorText(storeError{err})) }

// breakerOf returns the breaker to which an action applies, and its entry. If the policy is a Group, this is the member
// with the given key.
func breakerOf(e registry.Entry, key string) (b operable, of registry.Entry, err error) {
	of = e
	b, single := e.Policy.(operable)
	found := 0
	for _, m := range e.Worst(math.MaxInt) {
		if m.Key == key {
			b, _ = m.Policy.(operable)
			of = m.Entry
			found++
		}
	}
	switch {
	case found > 1: // different keys, because a text of a key is cut after 100 bytes, and a key may be a struct
		err = fmt.Errorf("%s has several breakers for the key %q", e, key)
	case single && key != "":
		err = fmt.Errorf("key: %s is a single breaker without keys", e)
	case b == nil && e.Kind == "breaker":
		err = fmt.Errorf("%s has no breaker for the key %q", e, key)
	case b == nil:
		err = fmt.Errorf("%s is not a breaker", e)
	}
	return b, of, err
}

// operate applies an action to a breaker.
func operate(e registry.Entry, op Operation) error {
	b, of, err := breakerOf(e, op.Key)
	if err != nil {
		return err
	}
	reason := errOperator
	if op.Note != "" {
		reason = fmt.Errorf("%w: %s", errOperator, op.Note)
	}
	state := of.Health(context.Background()).State
	if (op.Action == Trip || op.Action == Reset) && (state == "forced_open" || state == "disabled") {
		return fmt.Errorf("breaker is %s: enable it first", inWords(state))
	}
	map[Action]func(){
		Trip:      func() { b.Trip(reason, op.For) },
		ForceOpen: func() { b.ForceOpen(reason) },
		Reset:     b.Reset, Disable: b.Disable, Enable: b.Enable,
	}[op.Action]()
	return nil
}

// refuse responds to an operation that failed. It shows the error on the page that sent the operation. done has the
// results of the part that succeeded.
func (c *Console) refuse(w http.ResponseWriter, r *http.Request, op Operation, status int, done result, err error) {
	err = errors.New(c.errorText(err))
	if wantsJSON(r) {
		done.Error = err.Error()
		c.show(w, r, status, "", done)
		return
	}
	e, ok := c.entry(op.Policy)
	runner := e.Kind == sagaKind
	switch page, q := op.back(); {
	case !ok:
		c.fail(w, r, status, err)
	case runner && page == "saga":
		c.saga(w, r, status, q, &actionForm{Error: err.Error(), Values: r.PostForm})
	case runner && page == "sagas":
		q.Set("note", op.Note)
		c.sagas(w, r, status, q, done, err)
	default:
		p := c.policyPage(e, op.Key)
		p.Form = &actionForm{Error: err.Error(), Values: r.PostForm}
		c.show(w, r, status, "policy.html", p)
	}
}

// back returns the page that sends an operation, as a path relative to the path of the POST request, and the query of
// that page.
func (op Operation) back() (page string, q url.Values) {
	kind, name, _ := strings.Cut(op.Policy, "/")
	switch {
	case op.ID != "":
		return "saga", url.Values{"runner": {name}, "id": {op.ID}}
	case op.targets != nil, op.list != "":
		listed, _ := url.ParseQuery(op.list) // invalid parts are ignored
		return "sagas", formOf(listed, name).Values
	}
	q = url.Values{"kind": {kind}, "name": {name}}
	if op.Key != "" && kind == "breaker" {
		q.Set("key", op.Key)
	}
	return "policy", q
}

// A result is the JSON response to a POST.
type result struct {
	Done     bool            `json:"done"`
	Error    string          `json:"error,omitempty"`
	Changes  registry.Report `json:"changes,omitempty"`  // changes made by Apply, or shown by Preview
	Acted    int             `json:"acted,omitempty"`    // number of sagas that an action on many sagas changed
	Refused  int             `json:"refused,omitempty"`  // number of sagas that do not allow the action, or have changed
	Left     int             `json:"left,omitempty"`     // number of sagas not reached because of the error
	Refusals []refusal       `json:"refusals,omitempty"` // reasons of the refused sagas
}

// A refusal is a saga that an action on many sagas did not change, with the reason.
type refusal struct {
	ID    string `json:"id"`
	Error string `json:"error"`
}
