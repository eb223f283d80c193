package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/breaker"
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

	// Of a saga, or of all that a Filter admits, by Operate of saga.Runner: the
	// actions of package saga. Each needs a Note, which the saga's log keeps.
	Cancel     Action = "cancel"
	Retry      Action = "retry"
	Skip       Action = "skip" // Step, or the step that keeps a stuck saga from going on
	Compensate Action = "compensate"
	Abandon    Action = "abandon"
)

// doneWords say what an action has done. A link names the action, and can make the page say
// nothing else.
var doneWords = map[Action]string{
	Trip:          "The breaker was tripped.",
	Reset:         "The breaker was reset.",
	ForceOpen:     "The breaker was forced open. It stays so until it is enabled.",
	Disable:       "The breaker was disabled. It stays so until it is enabled.",
	Enable:        "The breaker was enabled.",
	Apply:         "The settings were changed.",
	Invalidate:    "The key was invalidated.",
	Expire:        "The key was expired.",
	InvalidateAll: "All keys were invalidated.",
	Cancel:        "The cancellation was recorded.",
	Retry:         "The saga is tried again.",
	Skip:          "The step was skipped.",
	Compensate:    "The saga turns back.",
	Abandon:       "The saga was abandoned.",
}

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
	form sagaForm // what was looked for
}

// LogValue returns a group of the fields that are set.
func (op Operation) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("action", string(op.Action)), slog.String("policy", op.Policy)}
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	add("key", op.Key)
	if op.For != 0 {
		attrs = append(attrs, slog.Duration("for", op.For))
	}
	add("settings", string(op.Settings))
	add("id", op.ID)
	add("step", op.Step)
	if op.Seq != 0 {
		attrs = append(attrs, slog.Int64("seq", op.Seq))
	}
	add("note", op.Note)
	return slog.GroupValue(attrs...)
}

// actionsOf returns what can be done to a policy.
func actionsOf(e registry.Entry) (all []Action) {
	if e.Kind == "breaker" {
		all = append(all, Trip, Reset, ForceOpen, Disable, Enable)
	}
	if _, ok := cacheOf(e.Policy); ok {
		all = append(all, Invalidate, Expire, InvalidateAll)
	}
	if e.Settings() != nil {
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
	Changes registry.Report // of a preview
	Values  url.Values
}

// Is returns what a field of the settings was changed to, or present.
func (f *actionForm) Is(path, present string) string {
	if f == nil || !f.Values.Has("is."+path) {
		return present
	}
	return f.Values.Get("is." + path)
}

// Note returns the note of the form of the settings, or else of another one.
func (f *actionForm) Note(settings bool) string {
	if f == nil || settings != (f.Values.Get("action") == string(Apply)) {
		return ""
	}
	return f.Values.Get("note")
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
	if question, ok := op.question(); ok && r.PostForm.Get("sure") != "1" && !wantsJSON(r) {
		c.confirm(w, r, op, question)
		return
	}
	if op.ids != nil {
		c.actOnMany(w, r, op)
		return
	}
	if err := c.cfg.Allow(r, op); err != nil {
		c.audit(r, op, err)
		c.refuse(w, r, op, http.StatusForbidden, err)
		return
	}
	if op.Action == Preview {
		c.preview(w, r, op)
		return
	}
	done, err := c.do(r, op)
	c.audit(r, op, err)
	if err != nil {
		c.refuse(w, r, op, http.StatusUnprocessableEntity, err)
		return
	}
	if wantsJSON(r) {
		done.Done = true
		c.show(w, r, http.StatusOK, "", done)
		return
	}
	said := op.Action
	if said == Apply && len(done.Changes) == 0 {
		said = "" // the settings were so already
	}
	w.Header().Set("Location", op.back(said))
	w.WriteHeader(http.StatusSeeOther)
}

var errClosed = errors.New("the console is closed")

// actOnMany does an operation to each of some sagas, if that is allowed. It ends with the first
// that is not, and with the request. Permission is asked for each of them, because it may be
// taken away meanwhile.
func (c *Console) actOnMany(w http.ResponseWriter, r *http.Request, op Operation) {
	done := result{Done: true}
	for i, id := range op.ids {
		one := op
		one.ID, one.ids = id, nil
		status, err := c.actOnOne(r, one)
		switch {
		case err == nil:
			done.Acted++
		case errors.Is(err, saga.ErrNotAllowed), errors.Is(err, saga.ErrNotFound), errors.Is(err, saga.ErrNotRegistered):
			done.Refused++
		default:
			text := fmt.Sprintf("%d done, %d refused, %d left", done.Acted, done.Refused, len(op.ids)-i)
			if failed, ok := errors.AsType[secretError](err); ok {
				err = secretError{text + ": " + failed.where, failed.error}
			} else {
				err = fmt.Errorf("%s: %w", text, err)
			}
			c.refuse(w, r, op, status, err)
			return
		}
	}
	if wantsJSON(r) {
		c.show(w, r, http.StatusOK, "", done)
		return
	}
	q := op.form.values(strings.TrimPrefix(op.Policy, sagaKind+"/"))
	q.Set("done", string(op.Action))
	q.Set("acted", strconv.Itoa(done.Acted))
	q.Set("refused", strconv.Itoa(done.Refused))
	w.Header().Set("Location", "sagas?"+q.Encode())
	w.WriteHeader(http.StatusSeeOther)
}

// actOnOne does the operation to one of many sagas, and returns the status for an error.
func (c *Console) actOnOne(r *http.Request, op Operation) (status int, err error) {
	select {
	case <-c.closed:
		return http.StatusServiceUnavailable, errClosed
	case <-r.Context().Done():
		return http.StatusServiceUnavailable, context.Cause(r.Context())
	default:
	}
	status = http.StatusForbidden
	if err = c.cfg.Allow(r, op); err == nil {
		status = http.StatusUnprocessableEntity
		_, err = c.do(r, op)
	}
	c.audit(r, op, err)
	return status, err
}

// explain says what is wrong with a request that seems to be of another origin, where that may
// be a proxy that has changed its Host.
func explain(r *http.Request, err error) error {
	from, bad := url.Parse(r.Header.Get("Origin"))
	if r.Header.Get("Sec-Fetch-Site") != "" || bad != nil || from.Host == "" {
		return err
	}
	return fmt.Errorf("the page is of %s (Origin), and the request is for %s (Host). If there is a proxy between, it must keep the Host: in nginx, proxy_set_header Host $http_host", from.Host, r.Host)
}

func (c *Console) audit(r *http.Request, op Operation, err error) {
	if c.cfg.Audit != nil {
		c.cfg.Audit(r.Context(), op, err)
	}
}

// fieldsOf are the fields of a form by action, besides those of every action, and was.* and
// is.* of the settings. A field that does nothing must not become an operation on more than was
// meant: on the whole breaker instead of a key, on all sagas instead of some.
var fieldsOf = map[Action][]string{
	Trip: {"key", "for"}, Reset: {"key"}, ForceOpen: {"key"}, Disable: {"key"}, Enable: {"key"},
	Apply: {"settings"}, Preview: {"settings"},
	Invalidate: {"key"}, Expire: {"key"}, InvalidateAll: {},
	Cancel: sagaFields, Retry: sagaFields, Skip: append(slices.Clone(sagaFields), "step"), Compensate: sagaFields, Abandon: sagaFields,
}

var sagaFields = append([]string{"id", "ids", "seq", "after", "runner"}, conditions...)

// conditions are the fields of a filter, which an operation on one saga does not have.
var conditions = []string{"saga", "status", "text", "age"}

// checkFields returns an error if a form has a field that its action does not.
func checkFields(action Action, form url.Values) error {
	own, ok := fieldsOf[action]
	if !ok {
		return fmt.Errorf("there is no action %q", action)
	}
	for field, values := range form {
		setting := strings.HasPrefix(field, "was.") || strings.HasPrefix(field, "is.")
		switch {
		case slices.Contains([]string{"action", "policy", "note", "preview", "sure"}, field), slices.Contains(own, field):
		case setting && slices.Contains(own, "settings"):
		case setting, !slices.ContainsFunc(slices.Collect(maps.Values(fieldsOf)), func(all []string) bool { return slices.Contains(all, field) }):
			return fmt.Errorf("there is no field %s", field)
		case values[0] != "" && field != "step" && field != "for": // which stand beside several buttons
			return fmt.Errorf("%s: is not for %s", field, action)
		}
		if form.Get("id") != "" && slices.Contains(conditions, field) && values[0] != "" {
			return fmt.Errorf("%s: is not for one saga", field)
		}
	}
	return nil
}

// operation reads an Operation from a form.
func (c *Console) operation(form url.Values) (Operation, error) {
	op := Operation{Action: Action(form.Get("action")), Policy: form.Get("policy"), Note: strings.TrimSpace(form.Get("note"))}
	if op.Action == Apply && form.Has("preview") {
		op.Action = Preview
	}
	if err := checkFields(op.Action, form); err != nil {
		return op, err
	}
	op.Key = form.Get("key")
	if d := strings.TrimSpace(form.Get("for")); d != "" && op.Action == Trip {
		var err error
		if op.For, err = time.ParseDuration(d); err != nil {
			return op, fmt.Errorf("for: is %q: must be a duration such as 30s", d)
		}
	}
	e, ok := c.entry(op.Policy)
	if !ok {
		return op, fmt.Errorf("there is no policy %s", op.Policy)
	}
	switch op.Action {
	case Apply, Preview:
		op.Settings = json.RawMessage(form.Get("settings"))
		if len(op.Settings) > 0 {
			if !json.Valid(op.Settings) {
				return op, errors.New("settings: is not JSON")
			}
			break
		}
		var err error
		op.Settings, err = changes(fields("", e.Settings()),
			func(path string) (string, bool) { return form.Get("was." + path), form.Has("was." + path) },
			func(path string) (string, bool) {
				return strings.TrimSpace(form.Get("is." + path)), form.Has("is." + path)
			})
		if err != nil {
			return op, err
		}
	case Cancel, Retry, Skip, Compensate, Abandon:
		op.ID = form.Get("id")
		if op.Action == Skip {
			op.Step = form.Get("step")
		}
		if seq := form.Get("seq"); seq != "" {
			var err error
			if op.Seq, err = strconv.ParseInt(seq, 10, 64); err != nil || op.Seq < 0 {
				return op, fmt.Errorf("seq: is %q: must be a number of entries", seq)
			}
		}
		if op.ID == "" {
			op.form = sagaFormOf(form)
			if op.ids = form["ids"]; len(op.ids) == 0 {
				return op, errors.New("ids: is empty: which sagas?")
			}
		}
		if op.Note == "" {
			return op, errors.New("note: is empty: say why, for the log of the saga")
		}
	}
	return op, nil
}

// A question is what a person is asked before an operation that is hard to take back.
type question struct {
	page
	Question string     `json:"-"`
	What     string     `json:"-"`
	Yes      string     `json:"-"`
	Fields   url.Values `json:"-"`
	Back     string     `json:"-"`
}

// question returns what a person is asked before the operation, if anything.
func (op Operation) question() (q question, ok bool) {
	of := op.Policy
	if op.Key != "" {
		of = fmt.Sprintf("the key %s of %s", op.Key, op.Policy)
	}
	switch {
	case op.ids != nil:
		verb := strings.ToUpper(string(op.Action[:1])) + string(op.Action[1:])
		return question{Question: fmt.Sprintf("%s the %d that were shown?", verb, len(op.ids)), Yes: verb + " all"}, true
	case op.Action == ForceOpen:
		return question{Question: "Force " + of + " open?", What: "It refuses all calls until it is enabled.", Yes: "Force open"}, true
	case op.Action == Disable:
		return question{Question: "Disable " + of + "?", What: "It lets all calls through until it is enabled.", Yes: "Disable"}, true
	case op.Action == InvalidateAll:
		return question{Question: "Invalidate all keys of " + of + "?", What: "Every value is loaded again when it is next asked for.", Yes: "Invalidate all"}, true
	case op.Action == Abandon:
		return question{Question: "Abandon " + op.ID + "?", What: "Nothing more of it is done or undone, and that cannot be taken back.", Yes: "Abandon"}, true
	}
	return q, false
}

// confirm answers with a question, whose form does the operation.
func (c *Console) confirm(w http.ResponseWriter, r *http.Request, op Operation, q question) {
	q.page, q.Fields, q.Back = c.page("", q.Question), r.PostForm, op.back("")
	c.show(w, r, http.StatusOK, "confirm.html", q)
}

// entry returns a policy by its path.
func (c *Console) entry(path string) (registry.Entry, bool) {
	kind, name, _ := strings.Cut(path, "/")
	return c.reg.Get(kind, name)
}

// settings returns the settings of an Apply as Registry.Apply takes them.
func (op Operation) settings() []byte {
	return encode(map[string]json.RawMessage{op.Policy: op.Settings})
}

// do applies an operation that was allowed.
func (c *Console) do(r *http.Request, op Operation) (done result, err error) {
	e, ok := c.entry(op.Policy)
	if !ok {
		return done, fmt.Errorf("there is no policy %s", op.Policy)
	}
	switch op.Action {
	case Trip, Reset, ForceOpen, Disable, Enable:
		b, err := circuitOf(e, op.Key)
		if err != nil {
			return done, err
		}
		return done, operate(b, op)
	case Apply:
		report, err := c.reg.Apply(op.settings())
		done.Changes = changesOf(report)
		return done, err
	case Invalidate, Expire, InvalidateAll:
		cache, ok := cacheOf(e.Policy)
		if !ok {
			return done, fmt.Errorf("%s is not a cache", e)
		}
		return done, cache.do(r.Context(), op)
	}
	runner, ok := e.Policy.(*saga.Runner)
	if !ok {
		return done, fmt.Errorf("%s runs no sagas", e)
	}
	err = runner.Operate(r.Context(), op.ID, op.ofSaga())
	if changed := c.changed(r.Context(), runner, op, err); changed != nil {
		err = changed
	}
	return done, sagaError(err)
}

// ofSaga returns the operation as package saga has it.
func (op Operation) ofSaga() saga.Operation {
	return saga.Operation{Action: saga.Action(op.Action), Step: op.Step, Note: op.Note, Seq: op.Seq}
}

// changed returns what has happened to a saga since its page was shown, if that is why an
// action was not allowed.
func (c *Console) changed(ctx context.Context, runner *saga.Runner, op Operation, err error) error {
	if op.Seq == 0 || !errors.Is(err, saga.ErrNotAllowed) {
		return nil
	}
	log, _ := runner.HistoryPage(ctx, op.ID, op.Seq, 5)
	if len(log) == 0 {
		return nil
	}
	var news []string
	for _, e := range log {
		news = append(news, strings.TrimSpace(e.Step+" "+string(e.Kind)))
	}
	return fmt.Errorf("%w: the saga has changed since this page was shown: %s", saga.ErrNotAllowed, strings.Join(news, ", "))
}

// A secretError is an error whose text may hold secrets.
type secretError struct {
	where string // without secrets
	error
}

func (e secretError) Unwrap() error { return e.error }

// ofStore returns an error of the store of a cache or of a Runner as a secretError, or nil.
func ofStore(err error) error {
	if err == nil {
		return nil
	}
	return secretError{"the store failed", err}
}

// told returns the text of an error of an operation, secrets only if errors are shown.
func (c *Console) told(err error) string {
	if failed, ok := errors.AsType[secretError](err); ok {
		return failed.where + ": " + c.secret(failed.error)
	}
	if err == nil {
		return ""
	}
	return err.Error()
}

// sagaError returns the error of a Runner's method as one of its store, unless it says that
// the saga does not allow the action.
func sagaError(err error) error {
	if errors.Is(err, saga.ErrNotAllowed) || errors.Is(err, saga.ErrNotFound) || errors.Is(err, saga.ErrNotRegistered) {
		return err
	}
	return ofStore(err)
}

// circuitOf returns the breaker of an action: that of a key, if the policy is a Group.
func circuitOf(e registry.Entry, key string) (circuit, error) {
	if b, ok := e.Policy.(circuit); ok {
		if key != "" {
			return nil, fmt.Errorf("key: %s is one breaker, without keys", e)
		}
		return b, nil
	}
	for _, m := range e.Members(math.MaxInt) {
		if b, ok := m.Policy.(circuit); ok && m.Key == key {
			return b, nil
		}
	}
	if e.Kind == "breaker" {
		return nil, fmt.Errorf("%s has no breaker for the key %q now", e, key)
	}
	return nil, fmt.Errorf("%s is not a breaker", e)
}

func operate(b circuit, op Operation) error {
	reason := errOperator
	if op.Note != "" {
		reason = fmt.Errorf("%w: %s", errOperator, op.Note)
	}
	state := breaker.Closed
	if b, ok := b.(interface{ State() breaker.State }); ok {
		state = b.State()
	}
	switch {
	case (op.Action == Trip || op.Action == Reset) && (state == breaker.ForcedOpen || state == breaker.Disabled):
		return fmt.Errorf("the breaker is %s: enable it first", state)
	case op.Action == Trip:
		b.Trip(reason, op.For)
	case op.Action == Reset:
		b.Reset()
	case op.Action == ForceOpen:
		b.ForceOpen(reason)
	case op.Action == Disable:
		b.Disable()
	case op.Action == Enable:
		b.Enable()
	}
	return nil
}

// A settingChange is the JSON twin of a registry.Change.
type settingChange struct {
	Path string `json:"path"`
	From string `json:"from"`
	To   string `json:"to"`
}

func changesOf(r registry.Report) []settingChange {
	all := make([]settingChange, 0, len(r))
	for _, c := range r {
		all = append(all, settingChange(c))
	}
	return all
}

// preview answers with the difference that settings would make.
func (c *Console) preview(w http.ResponseWriter, r *http.Request, op Operation) {
	report, err := c.reg.Preview(op.settings())
	c.audit(r, op, err)
	if err == nil && len(report) == 0 {
		err = errors.New("nothing would change")
	}
	if err != nil {
		c.refuse(w, r, op, http.StatusUnprocessableEntity, err)
		return
	}
	if wantsJSON(r) {
		c.show(w, r, http.StatusOK, "", result{Changes: changesOf(report)})
		return
	}
	e, _ := c.entry(op.Policy)
	p := c.policyPage(e, op.Key, noPoints)
	p.Form = &actionForm{Changes: report, Values: r.PostForm}
	c.show(w, r, http.StatusOK, "policy.html", p)
}

// refuse answers an action that was not done, with the page that it came from.
func (c *Console) refuse(w http.ResponseWriter, r *http.Request, op Operation, status int, err error) {
	err = errors.New(c.told(err))
	if wantsJSON(r) {
		c.show(w, r, status, "", result{Error: err.Error()})
		return
	}
	e, ok := c.entry(op.Policy)
	_, sagas := e.Policy.(*saga.Runner)
	switch {
	case !ok:
		c.fail(w, r, status, err)
	case sagas && op.ID != "":
		c.oneSaga(w, r, status, e.Name, op.ID, r.PostForm, err)
	case sagas && op.Action != Apply && op.Action != Preview:
		q := op.form.values(e.Name)
		c.listSagas(w, r, status, q, err)
	default:
		p := c.policyPage(e, op.Key, noPoints)
		p.Form = &actionForm{Error: err.Error(), Values: r.PostForm}
		c.show(w, r, status, "policy.html", p)
	}
}

// back returns the page of an operation, relative to the POST, which says that action was done
// unless that is "".
func (op Operation) back(action Action) string {
	kind, name, _ := strings.Cut(op.Policy, "/")
	page, q := "policy?", url.Values{"kind": {kind}, "name": {name}}
	switch {
	case op.ids != nil:
		page, q = "sagas?", op.form.values(name)
	case op.Key != "" && kind == "breaker":
		q.Set("key", op.Key)
	case op.ID != "":
		page, q = "saga?", url.Values{"runner": {name}, "id": {op.ID}}
	}
	if action != "" {
		q.Set("done", string(action))
	}
	return page + q.Encode()
}

// result is what a POST answers to a script.
type result struct {
	Done    bool            `json:"done"`
	Error   string          `json:"error,omitempty"`
	Changes []settingChange `json:"changes,omitempty"` // of an apply
	Acted   int             `json:"acted,omitempty"`   // of an action on many sagas: how many
	Refused int             `json:"refused,omitempty"` // how many do not allow it, as they are
}
