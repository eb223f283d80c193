package console

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
)

// A Verb is what an [Action] does. In package saga, an Operation is an Action with its
// arguments, and an Action is a Verb.
type Verb string

const (
	// Of a breaker, or of one key of a breaker.Group.
	Trip      Verb = "trip"       // opens it, for For
	Reset     Verb = "reset"      // closes it, and it counts anew
	ForceOpen Verb = "force-open" // refuses all calls until Enable
	Disable   Verb = "disable"    // lets all calls through until Enable
	Enable    Verb = "enable"     // ends ForceOpen and Disable

	// Of any policy with settings.
	Apply Verb = "apply" // changes its Settings

	// Of a cache.
	Invalidate    Verb = "invalidate"     // drops Key
	Expire        Verb = "expire"         // makes Key stale
	InvalidateAll Verb = "invalidate-all" // drops all keys

	// Of a saga, or of all that a Filter admits, by Cancel, Retry, SkipStep, Compensate or
	// Abandon of saga.Runner. Each needs a Note, which the saga's log keeps.
	Cancel     Verb = "cancel"
	Retry      Verb = "retry"
	Skip       Verb = "skip" // Step, or the step that keeps a stuck saga from going on
	Compensate Verb = "compensate"
	Abandon    Verb = "abandon"
)

// doneWords say what was done. They are all that a link can make the page say.
var doneWords = map[Verb]string{
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

// An Action is something that an operator does to a policy or to sagas. Fields that do not
// apply are zero.
type Action struct {
	Do       Verb
	Policy   string          // "breaker/users"
	Key      string          // of a Group or a cache
	For      time.Duration   // of Trip; zero means as long as the breaker would open by itself
	Settings json.RawMessage // of Apply: an object of the fields to change
	Saga     string          // the id of a saga; "" with a Filter
	Step     string          // of Skip
	Filter   *saga.Filter    // the sagas of an action on many
	Note     string          // why

	form sagaForm // of Filter
}

// LogValue returns a group of the fields that are set.
func (a Action) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("do", string(a.Do)), slog.String("policy", a.Policy)}
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	add("key", a.Key)
	if a.For != 0 {
		attrs = append(attrs, slog.Duration("for", a.For))
	}
	add("settings", string(a.Settings))
	add("saga", a.Saga)
	add("step", a.Step)
	if a.Filter != nil {
		attrs = append(attrs, slog.Any("filter", *a.Filter))
	}
	add("note", a.Note)
	return slog.GroupValue(attrs...)
}

// verbsOf returns what can be done to a policy.
func verbsOf(e registry.Entry) (all []Verb) {
	if _, ok := e.Policy.(circuit); ok {
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
func (p policyPage) Can(v Verb) bool {
	for _, a := range p.Actions {
		if a == v {
			return true
		}
	}
	return false
}

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

// An actionForm is what an operator has filled in, with what came of it.
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

// act does what a form says.
func (c *Console) act(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", "POST")
		c.fail(w, r, http.StatusMethodNotAllowed, errors.New("an action is a POST"))
		return
	}
	if err := c.origin.Check(r); err != nil {
		c.fail(w, r, http.StatusForbidden, err)
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, 1<<20)
	if err := r.ParseForm(); err != nil {
		c.fail(w, r, http.StatusBadRequest, err)
		return
	}
	a, err := c.action(r.PostForm)
	if err != nil {
		c.refuse(w, r, a, http.StatusBadRequest, err)
		return
	}
	if c.cfg.Allow == nil {
		c.refuse(w, r, a, http.StatusForbidden, errors.New("the console is read-only"))
		return
	}
	if r.PostForm.Has("preview") {
		c.preview(w, r, a)
		return
	}
	if err := c.cfg.Allow(r, a); err != nil {
		c.audit(r, a, err)
		c.refuse(w, r, a, http.StatusForbidden, err)
		return
	}
	done, err := c.do(r, a)
	c.audit(r, a, err)
	if err != nil {
		c.refuse(w, r, a, http.StatusUnprocessableEntity, err)
		return
	}
	if wantsJSON(r) {
		done.Done = true
		c.show(w, r, http.StatusOK, "", done)
		return
	}
	w.Header().Set("Location", a.back(done))
	w.WriteHeader(http.StatusSeeOther)
}

func (c *Console) audit(r *http.Request, a Action, err error) {
	if c.cfg.Audit != nil {
		c.cfg.Audit(r.Context(), a, err)
	}
}

// action reads an Action from a form.
func (c *Console) action(form url.Values) (Action, error) {
	a := Action{
		Do: Verb(form.Get("do")), Policy: form.Get("policy"), Key: form.Get("key"),
		Note: strings.TrimSpace(form.Get("note")),
	}
	if d := strings.TrimSpace(form.Get("for")); d != "" {
		var err error
		if a.For, err = time.ParseDuration(d); err != nil {
			return a, fmt.Errorf("for: is %q: must be a duration such as 30s", d)
		}
	}
	e, ok := c.entry(a.Policy)
	if !ok {
		return a, fmt.Errorf("there is no policy %s", a.Policy)
	}
	switch a.Do {
	case Trip, Reset, ForceOpen, Disable, Enable, Invalidate, Expire, InvalidateAll:
	case Apply:
		a.Settings = json.RawMessage(form.Get("settings"))
		if len(a.Settings) > 0 {
			if !json.Valid(a.Settings) {
				return a, errors.New("settings: is not JSON")
			}
			break
		}
		var err error
		a.Settings, err = changes(fields("", e.Settings()),
			func(path string) (string, bool) { return form.Get("was." + path), form.Has("was." + path) },
			func(path string) (string, bool) {
				return strings.TrimSpace(form.Get("is." + path)), form.Has("is." + path)
			})
		if err != nil {
			return a, err
		}
	case Cancel, Retry, Skip, Compensate, Abandon:
		a.Saga, a.Step = form.Get("id"), form.Get("step")
		if a.Saga == "" {
			a.form = sagaFormOf(form)
			if a.form.admitsAll() {
				return a, errors.New("an action on all sagas needs a condition")
			}
			filter, err := c.filter(a.form)
			if err != nil {
				return a, err
			}
			filter.After = ""
			a.Filter = &filter
		}
		if a.Note == "" {
			return a, errors.New("note: is empty: say why, for the log of the saga")
		}
	default:
		return a, fmt.Errorf("there is no action %q", a.Do)
	}
	return a, nil
}

// entry returns a policy by its path.
func (c *Console) entry(path string) (registry.Entry, bool) {
	kind, name, _ := strings.Cut(path, "/")
	return c.reg.Get(kind, name)
}

// settings returns the settings of an Apply as Registry.Apply takes them.
func (a Action) settings() []byte { return encode(map[string]json.RawMessage{a.Policy: a.Settings}) }

// do does an action that is allowed.
func (c *Console) do(r *http.Request, a Action) (done result, err error) {
	e, ok := c.entry(a.Policy)
	if !ok {
		return done, fmt.Errorf("there is no policy %s", a.Policy)
	}
	switch a.Do {
	case Trip, Reset, ForceOpen, Disable, Enable:
		b, err := circuitOf(e, a.Key)
		if err != nil {
			return done, err
		}
		return done, operate(b, a)
	case Apply:
		report, err := c.reg.Apply(a.settings())
		done.Changes = changesOf(report)
		return done, err
	case Invalidate, Expire, InvalidateAll:
		cache, ok := cacheOf(e.Policy)
		if !ok {
			return done, fmt.Errorf("%s is not a cache", e)
		}
		return done, cache.do(r.Context(), a)
	}
	runner, ok := e.Policy.(*saga.Runner)
	if !ok {
		return done, fmt.Errorf("%s runs no sagas", e)
	}
	op := saga.Operation{Action: saga.Action(a.Do), Step: a.Step, Note: a.Note}
	if a.Filter == nil {
		return done, sagaError(runner.Operate(r.Context(), a.Saga, op))
	}
	operated, err := runner.OperateAll(r.Context(), *a.Filter, op)
	return result{Sagas: &operated.Done, NotAllowed: &operated.NotAllowed}, sagaError(err)
}

// A storeError is an error of the store of a cache or of a Runner. Its text may hold
// secrets.
type storeError struct{ error }

func (e storeError) Unwrap() error { return e.error }

// ofStore returns err as a storeError, or nil.
func ofStore(err error) error {
	if err == nil {
		return nil
	}
	return storeError{err}
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

func operate(b circuit, a Action) error {
	reason := errOperator
	if a.Note != "" {
		reason = fmt.Errorf("%w: %s", errOperator, a.Note)
	}
	state := func() breaker.State {
		if s, ok := b.(interface{ State() breaker.State }); ok {
			return s.State()
		}
		return breaker.Closed
	}
	switch s := state(); {
	case (a.Do == Trip || a.Do == Reset) && (s == breaker.ForcedOpen || s == breaker.Disabled):
		return fmt.Errorf("the breaker is %s: enable it first", s)
	case a.Do == Trip:
		b.Trip(reason, a.For)
	case a.Do == Reset:
		b.Reset()
	case a.Do == ForceOpen:
		b.ForceOpen(reason)
	case a.Do == Disable:
		b.Disable()
	case a.Do == Enable:
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
func (c *Console) preview(w http.ResponseWriter, r *http.Request, a Action) {
	if a.Do != Apply {
		c.refuse(w, r, a, http.StatusBadRequest, fmt.Errorf("%s has no preview", a.Do))
		return
	}
	report, err := c.reg.Preview(a.settings())
	if err == nil && len(report) == 0 {
		err = errors.New("nothing would change")
	}
	if err != nil {
		c.refuse(w, r, a, http.StatusUnprocessableEntity, err)
		return
	}
	if wantsJSON(r) {
		c.show(w, r, http.StatusOK, "", result{Changes: changesOf(report)})
		return
	}
	e, _ := c.entry(a.Policy)
	p := c.policyPage(e, false)
	p.Form = &actionForm{Changes: report, Values: r.PostForm}
	c.show(w, r, http.StatusOK, "policy.html", p)
}

// refuse answers an action that was not done, with the page that it came from.
func (c *Console) refuse(w http.ResponseWriter, r *http.Request, a Action, status int, err error) {
	if failed, ok := errors.AsType[storeError](err); ok {
		err = errors.New("the store failed: " + c.secret(failed))
	}
	if wantsJSON(r) {
		c.show(w, r, status, "", result{Error: err.Error()})
		return
	}
	e, ok := c.entry(a.Policy)
	_, sagas := e.Policy.(*saga.Runner)
	switch {
	case !ok:
		c.fail(w, r, status, err)
	case sagas && a.Saga != "":
		c.oneSaga(w, r, status, e.Name, a.Saga, r.PostForm, err)
	case sagas && a.Do != Apply:
		q := a.form.values(e.Name)
		c.listSagas(w, r, status, q, err)
	default:
		p := c.policyPage(e, false)
		p.Form = &actionForm{Error: err.Error(), Values: r.PostForm}
		c.show(w, r, status, "policy.html", p)
	}
}

// back returns the page that shows what an action has done, relative to the POST.
func (a Action) back(done result) string {
	kind, name, _ := strings.Cut(a.Policy, "/")
	page, q := "policy?", url.Values{"kind": {kind}, "name": {name}}
	switch {
	case a.Filter != nil:
		page, q = "sagas?", a.form.values(name)
		q.Set("n", strconv.Itoa(*done.Sagas))
		q.Set("left", strconv.Itoa(*done.NotAllowed))
	case a.Saga != "":
		page, q = "saga?", url.Values{"runner": {name}, "id": {a.Saga}}
	}
	q.Set("done", string(a.Do))
	return page + q.Encode()
}

func policyQuery(e registry.Entry) string {
	return url.Values{"kind": {e.Kind}, "name": {e.Name}}.Encode()
}
