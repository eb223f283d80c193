package console

import (
	"cmp"
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
	"github.com/go-resilience/resilience/saga"
)

// An Action is what an [Operation] does.
type Action string

const (
	// Of a breaker, or of one key of a Group of breakers.
	Trip      Action = "trip"       // opens it, for For
	Reset     Action = "reset"      // closes it, and it counts anew
	ForceOpen Action = "force-open" // refuses all calls until Enable
	Disable   Action = "disable"    // lets all calls through until Enable
	Enable    Action = "enable"     // ends ForceOpen and Disable

	// Of any policy with settings.
	Apply   Action = "apply"   // changes its Settings
	Preview Action = "preview" // tells what an Apply of these Settings would change

	// Of a cache.
	Invalidate    Action = "invalidate"     // drops Key
	Expire        Action = "expire"         // makes Key stale
	InvalidateAll Action = "invalidate-all" // drops all keys

	// Of a saga, or of each of those that a page shows, by Operate of saga.Runner: the
	// actions of package saga. Each needs a Note, which the saga's log keeps.
	Cancel     Action = "cancel"
	Retry      Action = "retry"
	Skip       Action = "skip" // Step, or the step that keeps a stuck saga from going on
	Compensate Action = "compensate"
	Abandon    Action = "abandon"
)

// actions says of each action which fields its form has besides those of all, and what a page says of
// it: when it is done, which a link names and cannot make it say anything else, and what it asks before.
// A field that does nothing must not become an operation on more than was meant: on the whole breaker
// instead of a key.
var actions = map[Action]struct{ fields, done, asks, because string }{
	Trip:  {fields: "key for", done: "The breaker was tripped."},
	Reset: {fields: "key", done: "The breaker was reset."},
	ForceOpen: {"key", "The breaker was forced open. It stays so until it is enabled.",
		"Force %s open?", "It refuses all calls until it is enabled."},
	Disable: {"key", "The breaker was disabled. It stays so until it is enabled.",
		"Disable %s?", "It lets all calls through until it is enabled."},
	Enable:     {fields: "key", done: "The breaker was enabled."},
	Apply:      {fields: "settings", done: "The settings were changed."},
	Preview:    {fields: "settings"},
	Invalidate: {fields: "key", done: "The key was invalidated."},
	Expire:     {fields: "key", done: "The key was expired."},
	InvalidateAll: {"", "All keys were invalidated.",
		"Invalidate all keys of %s?", "Every value is loaded again when it is next asked for."},
	Cancel:     {fields: "id ids seq", done: "The cancellation was recorded."},
	Retry:      {fields: "id ids seq", done: "The saga is tried again."},
	Skip:       {fields: "id ids seq", done: "The step was skipped."},
	Compensate: {fields: "id ids seq", done: "The saga turns back."},
	Abandon: {"id ids seq", "The saga was abandoned.",
		"Abandon %s?", "Nothing more of it is done or undone, and that cannot be taken back."},
}

// fieldsOfAll are the fields that every action has, and those that stand beside several buttons.
const fieldsOfAll = "action policy note preview sure list step for"

// An Operation is an [Action] with its arguments: what an operator does to a policy or to
// sagas. Fields that do not apply are zero.
type Operation struct {
	Action   Action
	Policy   string          // "breaker/users"
	Key      string          // of a Group or a cache
	For      time.Duration   // of Trip; zero means as long as the breaker would open by itself
	Settings json.RawMessage // of Apply and Preview: an object of the fields to change
	ID       string          // of a saga
	Step     string          // of Skip
	Seq      int64           // of a saga: the entries in its log that the operator has seen; 0 means any
	Note     string          // why

	ids  []string // of an action on many sagas, which is an Operation for each of them
	list string   // the query of the page that listed them
}

// LogValue returns a group of the fields that are set.
func (op Operation) LogValue() slog.Value {
	attrs := []slog.Attr{
		slog.String("action", string(op.Action)), slog.String("policy", op.Policy), slog.String("key", op.Key),
		slog.Duration("for", op.For), slog.String("settings", string(op.Settings)), slog.String("id", op.ID),
		slog.String("step", op.Step), slog.Int64("seq", op.Seq), slog.String("note", op.Note),
	}
	return slog.GroupValue(slices.DeleteFunc(attrs, func(a slog.Attr) bool {
		return reflect.ValueOf(a.Value.Any()).IsZero()
	})...)
}

// actionsOf returns what can be done to a policy.
func actionsOf(e registry.Entry) (all []Action) {
	if e.Kind == "breaker" {
		all = append(all, Trip, Reset, ForceOpen, Disable, Enable)
	}
	if cacheOf(e.Policy) != nil {
		all = append(all, Invalidate, Expire, InvalidateAll)
	}
	fixed := e.Update(true, func(any) error { return nil }) // a dry run, which changes nothing
	if fixed == nil && e.Settings() != nil {
		all = append(all, Apply)
	}
	return all
}

// Can reports whether the page offers an action.
func (p policyPage) Can(v Action) bool { return slices.Contains(p.Actions, v) }

// A circuit is what an operator does to a breaker.
type circuit interface {
	Trip(err error, d time.Duration)
	Reset()
	ForceOpen(reason error)
	Disable()
	Enable()
}

// errOperator is the error with which an operator trips a breaker or forces it open.
var errOperator = errors.New("an operator, from the console")

// An actionForm is a form as an operator has filled it in, and its result.
type actionForm struct {
	Error   string
	Changes registry.Report // of a dry run
	Values  url.Values
}

// Value returns what a field of the form of the settings was filled in with, or of any other form.
func (f *actionForm) Value(name string, settings bool) string {
	if f == nil || settings != (f.Values.Get("action") == string(Apply)) {
		return ""
	}
	return f.Values.Get(name)
}

// act answers a POST: it applies the operation of a form.
func (c *Console) act(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", "POST")
		c.fail(w, r, http.StatusMethodNotAllowed, errors.New("an action is a POST"))
		return
	}
	if err := c.origin.Check(r); err != nil {
		c.fail(w, r, http.StatusForbidden, explain(r, err))
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, 1<<20)
	if err := r.ParseForm(); err != nil {
		c.fail(w, r, http.StatusBadRequest, err)
		return
	}
	op, err := c.operation(r.PostForm)
	if err != nil {
		c.refuse(w, r, op, http.StatusBadRequest, err)
		return
	}
	if c.cfg.Allow == nil {
		c.refuse(w, r, op, http.StatusForbidden, errors.New("the console is read-only"))
		return
	}
	if asks := op.question(); asks.Title != "" && r.PostForm.Get("sure") != "1" && !wantsJSON(r) {
		page, q := op.back()
		asks.page, asks.Fields, asks.Back = c.page("", asks.Title, 0), r.PostForm, page+"?"+q.Encode()
		c.show(w, r, http.StatusOK, "confirm.html", asks)
		return
	}
	var done result
	status, err := c.actOnAll(r, op, &done)
	switch {
	case err != nil:
		c.refuse(w, r, op, status, err)
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
		if op.Action != Apply || len(done.Changes) > 0 { // else the settings were so already
			q.Set("done", string(op.Action))
		}
		if op.ids != nil {
			q.Set("acted", strconv.Itoa(done.Acted))
			q.Set("refused", strconv.Itoa(done.Refused))
		}
		w.Header().Set("Location", page+"?"+q.Encode())
		w.WriteHeader(http.StatusSeeOther)
	}
}

// actOnAll does an operation, and one on many sagas to each of them, in the order of the form. It ends with
// the first that is not allowed or whose store fails: permission is asked for each of them, because it may
// be taken away meanwhile.
func (c *Console) actOnAll(r *http.Request, op Operation, done *result) (status int, err error) {
	if op.ids == nil {
		return c.actOnOne(r, op, done)
	}
	for i, id := range op.ids {
		one := op
		one.ID, one.ids = id, nil
		status, err = c.actOnOne(r, one, done)
		switch {
		case err == nil:
			done.Acted++
		case status == http.StatusUnprocessableEntity && aboutTheSaga(err):
			done.Refused++
		default:
			return status, fmt.Errorf("%d done, %d refused, %d left: %w", done.Acted, done.Refused, len(op.ids)-i, err)
		}
	}
	return 0, nil
}

// actOnOne does an operation, unless the console is closed, the request has ended, or it is not
// allowed. It returns the status for an error.
func (c *Console) actOnOne(r *http.Request, op Operation, done *result) (status int, err error) {
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
	if c.cfg.Audit != nil { // also if whoever asked has left meanwhile
		c.cfg.Audit(context.WithoutCancel(r.Context()), op, err)
	}
	return status, err
}

// explain says what is wrong with a request that seems to be of another origin, where that may
// be a proxy that has changed its Host.
func explain(r *http.Request, err error) error {
	from, bad := url.Parse(r.Header.Get("Origin"))
	if r.Header.Get("Sec-Fetch-Site") != "" || bad != nil || from.Host == "" {
		return err
	}
	return fmt.Errorf("the page is of %s (Origin), and the request is for %s (Host). "+
		"If there is a proxy between, it must keep the Host: in nginx, proxy_set_header Host $http_host", from.Host, r.Host)
}

// operation reads an Operation from a form.
func (c *Console) operation(form url.Values) (op Operation, err error) {
	op = Operation{Action: Action(form.Get("action")), Policy: form.Get("policy"), Key: form.Get("key"),
		Note: strings.TrimSpace(form.Get("note"))}
	if op.Action == Apply && form.Has("preview") {
		op.Action = Preview
	}
	a, ok := actions[op.Action]
	if !ok {
		return op, fmt.Errorf("there is no action %q", op.Action)
	}
	for field, values := range form {
		if values[0] != "" && !slices.Contains(strings.Fields(fieldsOfAll+" "+a.fields), field) {
			return op, fmt.Errorf("%s: is no field of %s", field, op.Action)
		}
	}
	if _, ok := c.entry(op.Policy); !ok {
		return op, fmt.Errorf("there is no policy %s", op.Policy)
	}
	switch op.Action {
	case Trip:
		if d := strings.TrimSpace(form.Get("for")); d != "" {
			if op.For, err = time.ParseDuration(d); err != nil {
				return op, fmt.Errorf("for: is %q: must be a duration such as 30s", d)
			}
		}
	case Apply, Preview:
		if op.Settings = json.RawMessage(form.Get("settings")); !json.Valid(op.Settings) {
			return op, errors.New(
				`settings: is not JSON: must be an object of the fields to change, such as {"Limit": 8}`)
		}
	case Cancel, Retry, Skip, Compensate, Abandon:
		op.ID, op.ids, op.list = form.Get("id"), form["ids"], form.Get("list")
		if op.Action == Skip {
			op.Step = form.Get("step")
		}
		if seq := form.Get("seq"); seq != "" {
			if op.Seq, err = strconv.ParseInt(seq, 10, 64); err != nil || op.Seq < 0 {
				return op, fmt.Errorf("seq: is %q: must be a number of entries", seq)
			}
		}
		switch {
		case (op.ID == "") == (op.ids == nil):
			return op, errors.New("id, or ids: one of them must be there: which sagas?")
		case op.Note == "":
			return op, errors.New("note: is empty: say why, for the log of the saga")
		}
	}
	return op, nil
}

// A question is what a person is asked before an operation that is hard to take back.
type question struct {
	page
	Because, Yes string
	Fields       url.Values
	Back         string
}

// question returns what a person is asked before the operation, its Title, if anything.
func (op Operation) question() (q question) {
	a, of := actions[op.Action], cmp.Or(op.ID, op.Policy)
	q.Yes, q.Because = capital(strings.ReplaceAll(string(op.Action), "-", " ")), a.because
	switch {
	case op.ids != nil:
		q.Title, q.Because = fmt.Sprintf("%s the %d that were shown?", q.Yes, len(op.ids)), ""
		q.Yes += " all"
		return q
	case op.Key != "":
		of = fmt.Sprintf("the key %s of %s", op.Key, op.Policy)
	}
	if a.asks != "" {
		q.Title = fmt.Sprintf(a.asks, of)
	}
	return q
}

// entry returns a policy by its path.
func (c *Console) entry(path string) (registry.Entry, bool) {
	kind, name, _ := strings.Cut(path, "/")
	return c.reg.Get(kind, name)
}

// do applies an operation that was allowed.
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
	runner, ok := e.Policy.(*saga.Runner)
	if !ok {
		return fmt.Errorf("%s runs no sagas", e)
	}
	err = runner.Operate(ctx, op.ID, saga.Operation{
		Action: saga.Action(op.Action), Step: op.Step, Note: op.Note, Seq: op.Seq,
	})
	if aboutTheSaga(err) {
		return err
	}
	return ofStore(err)
}

// A storeError is the error of a store of a cache or of a Runner, whose text may hold secrets.
type storeError struct{ error }

const storeFailed = "the store failed: "

func (e storeError) Error() string { return storeFailed + fmt.Sprint(e.error) }
func (e storeError) Unwrap() error { return e.error }

// ofStore returns an error of a store as a storeError, or nil.
func ofStore(err error) error {
	if err == nil {
		return nil
	}
	return storeError{err}
}

// errorText returns the text of an error of an operation, secrets only if errors are shown.
func (c *Console) errorText(err error) string {
	if failed, ok := errors.AsType[storeError](err); ok {
		before, _, _ := strings.Cut(err.Error(), storeFailed)
		return before + storeFailed + c.secret(failed.error)
	}
	return err.Error()
}

// aboutTheSaga reports whether a Runner says that a saga does not allow an action, and not that its
// store has failed.
func aboutTheSaga(err error) bool {
	return errors.Is(err, saga.ErrNotAllowed) || errors.Is(err, saga.ErrNotFound) ||
		errors.Is(err, saga.ErrNotRegistered)
}

// circuitOf returns the breaker of an action and its entry: the member with a key, if the policy is a Group.
func circuitOf(e registry.Entry, key string) (b circuit, of registry.Entry, err error) {
	of = e
	b, one := e.Policy.(circuit)
	for _, m := range e.Worst(math.MaxInt) {
		if m.Key == key {
			b, _ = m.Policy.(circuit)
			of = m.Entry
		}
	}
	switch {
	case one && key != "":
		err = fmt.Errorf("key: %s is one breaker, without keys", e)
	case b == nil && e.Kind == "breaker":
		err = fmt.Errorf("%s has no breaker for the key %q now", e, key)
	case b == nil:
		err = fmt.Errorf("%s is not a breaker", e)
	}
	return b, of, err
}

// operate applies an action to a breaker.
func operate(e registry.Entry, op Operation) error {
	b, of, err := circuitOf(e, op.Key)
	if err != nil {
		return err
	}
	reason := errOperator
	if op.Note != "" {
		reason = fmt.Errorf("%w: %s", errOperator, op.Note)
	}
	state := of.Health(context.Background()).State
	if (op.Action == Trip || op.Action == Reset) && (state == "forced_open" || state == "disabled") {
		return fmt.Errorf("the breaker is %s: enable it first", inWords(state))
	}
	map[Action]func(){
		Trip:      func() { b.Trip(reason, op.For) },
		ForceOpen: func() { b.ForceOpen(reason) },
		Reset:     b.Reset, Disable: b.Disable, Enable: b.Enable,
	}[op.Action]()
	return nil
}

// refuse answers an action that was not done, with the page that it came from.
func (c *Console) refuse(w http.ResponseWriter, r *http.Request, op Operation, status int, err error) {
	err = errors.New(c.errorText(err))
	if wantsJSON(r) {
		c.show(w, r, status, "", result{Error: err.Error()})
		return
	}
	e, ok := c.entry(op.Policy)
	_, sagas := e.Policy.(*saga.Runner)
	switch page, q := op.back(); {
	case !ok:
		c.fail(w, r, status, err)
	case sagas && op.ID != "":
		q.Set("note", op.Note)
		c.saga(w, r, status, q, err)
	case sagas && page == "sagas":
		c.sagas(w, r, status, q, err)
	default:
		p := c.policyPage(e, op.Key)
		p.Form = &actionForm{Error: err.Error(), Values: r.PostForm}
		c.show(w, r, status, "policy.html", p)
	}
}

// back returns the page of an operation, relative to the POST, and its query.
func (op Operation) back() (page string, q url.Values) {
	kind, name, _ := strings.Cut(op.Policy, "/")
	switch {
	case op.ids != nil:
		listed, _ := url.ParseQuery(op.list) // what it does not understand, it leaves out
		return "sagas", formOf(listed, name)
	case op.ID != "":
		return "saga", url.Values{"runner": {name}, "id": {op.ID}}
	}
	q = url.Values{"kind": {kind}, "name": {name}}
	if op.Key != "" && kind == "breaker" {
		q.Set("key", op.Key)
	}
	return "policy", q
}

// result is what a POST answers to a script.
type result struct {
	Done    bool            `json:"done"`
	Error   string          `json:"error,omitempty"`
	Changes registry.Report `json:"changes,omitempty"` // of an apply, or a dry run
	Acted   int             `json:"acted,omitempty"`   // of an action on many sagas: how many
	Refused int             `json:"refused,omitempty"` // how many do not allow it, as they are
}
