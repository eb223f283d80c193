package registry

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"
)

// A Change is one setting that [Registry.Apply] has changed.
type Change struct {
	Path     string // "breaker/users.Failures"
	From, To string // as in JSON
}

// A Report lists the settings that have changed, in the order of their paths.
type Report []Change

// String returns a line for each change: "breaker/users.Failures: 5 -> 10".
func (r Report) String() string {
	var b strings.Builder
	for _, c := range r {
		fmt.Fprintf(&b, "%s: %s -> %s\n", c.Path, c.From, c.To)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// LogValue returns a group with an attribute for each change.
func (r Report) LogValue() slog.Value {
	attrs := make([]slog.Attr, len(r))
	for i, c := range r {
		attrs[i] = slog.String(c.Path, c.From+" -> "+c.To)
	}
	return slog.GroupValue(attrs...)
}

// Settings returns the present settings of all policies in the form that
// [Registry.Apply] reads: all fields that a file can hold, defaults filled in.
func (r *Registry) Settings() []byte {
	var out []byte
	out = append(out, "{\n"...)
	first := true
	for e := range r.All() {
		settings := e.Settings()
		if settings == nil {
			continue
		}
		if !first {
			out = append(out, ",\n"...)
		}
		first = false
		out = append(out, "  "...)
		out = append(out, quote(e.path())...)
		out = append(out, ": "...)
		var body bytes.Buffer
		if err := json.Indent(&body, settings, "  ", "  "); err != nil {
			panic(err) // write makes valid JSON
		}
		out = append(out, body.Bytes()...)
	}
	return append(out, "\n}\n"...)
}

// Settings returns the present settings of the policy as a JSON object, such as
// [Registry.Apply] reads under the policy's path. It returns nil if there are none.
func (e Entry) Settings() []byte {
	if e.source.config == nil {
		return nil
	}
	return write(e.source.config())
}

// Reload applies the settings in the file at path, as [Registry.Apply] does: at the start of a
// program, and again when it is told that the file has changed, such as by SIGHUP:
//
//	hup := make(chan os.Signal, 1)
//	signal.Notify(hup, syscall.SIGHUP)
//	for range hup {
//		report, err := reg.Reload(path)
//		slog.Info("settings", "changed", report, "err", err)
//	}
func (r *Registry) Reload(path string) (Report, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	return r.Apply(data)
}

// Apply changes the settings of policies while they run. data is a JSON object whose names
// are policies, "kind/name", and whose values are objects of fields of the policy's Config
// by their Go names; fields that are left out stay as they are. Durations are texts such
// as "1.5s".
//
// Apply is all or nothing. First it decodes every entry onto the Config as it was given, and
// asks each policy whether it would take the result. If anything is wrong, the error lists
// every problem with its path, and nothing has changed. If a policy then rejects its change all
// the same, Apply changes back the policies that it has changed.
//
// A field that data names is as data says. A field that data does not name, and that was not
// given, keeps its default, which may follow the fields that change: the Burst of a
// throttle.Limiter follows its Rate.
//
// The report lists the fields that data has changed, without the defaults that followed.
// A zero for which the Config has a default is reported as that default.
// A policy that was given all that data says is not updated.
//
// An entry for a policy that is not registered is an error, unless its name begins with
// a question mark: "?breaker/users". Concurrent calls of Apply take turns.
func (r *Registry) Apply(data []byte) (Report, error) {
	r.applying.Lock()
	defer r.applying.Unlock()
	plans, err := r.plan(data)
	if err != nil {
		return nil, err
	}
	var errs []error
	done := 0
	for i := range plans {
		p := &plans[i]
		if err := p.apply(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", p.entry.path(), err))
			break
		}
		done++
	}
	if errs == nil {
		return report(plans), nil
	}
	for _, p := range slices.Backward(plans[:done]) {
		if err := p.entry.source.change(false, p.reset); err != nil {
			errs = append(errs, fmt.Errorf("%s: cannot be changed back: %w", p.entry.path(), err))
		}
	}
	return nil, errors.Join(errs...)
}

// Preview returns what [Registry.Apply] would report, or its error, and changes nothing. It
// does not know which zeros mean a default, nor what a policy of other origin, without a
// method Change, cannot change in flight.
func (r *Registry) Preview(data []byte) (Report, error) {
	plans, err := r.plan(data)
	if err != nil {
		return nil, err
	}
	return report(plans), nil
}

func report(plans []plan) Report {
	var all Report
	for _, p := range plans {
		all = append(all, p.changes...)
	}
	slices.SortFunc(all, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return all
}

// A plan is the change of one policy.
type plan struct {
	entry   Entry
	data    []byte
	before  reflect.Value // the Config, with its defaults
	given   reflect.Value // the Config as it was given
	changed bool          // anything that was given
	named   []field
	changes []Change
}

// A field of a Config, that the settings name.
type field struct {
	path  string
	index []int
}

// decode writes the settings into a Config as it was given.
func (p *plan) decode(config any) error {
	v := reflect.ValueOf(config).Elem()
	p.given = reflect.New(v.Type()).Elem()
	p.given.Set(v)
	d := decoder{path: p.entry.path()}
	d.fields(v, p.data)
	p.named, p.changes, p.changed = d.named, nil, false
	for _, f := range p.named {
		p.changed = p.changed || !equal(v, p.given, f)
		p.note(f, v)
	}
	if d.errs != nil {
		return undecodable{errors.Join(d.errs...)}
	}
	return nil
}

// An undecodable says what is wrong with settings, each with its path.
type undecodable struct{ error }

func equal(a, b reflect.Value, f field) bool {
	return reflect.DeepEqual(a.FieldByIndex(f.index).Interface(), b.FieldByIndex(f.index).Interface())
}

// note notes that f is as in now, if it was not before.
func (p *plan) note(f field, now reflect.Value) {
	if !equal(p.before, now, f) {
		p.changes = append(p.changes, Change{
			Path: f.path,
			From: string(write(p.before.FieldByIndex(f.index))),
			To:   string(write(now.FieldByIndex(f.index))),
		})
	}
}

// apply changes the policy, or returns an error and leaves it as it was.
func (p *plan) apply() error {
	if err := p.entry.source.change(false, p.decode); err != nil {
		return err
	}
	p.changes = nil // the fields that were noted may have been zero, and have a default now
	now := p.entry.source.config()
	for _, f := range p.named {
		p.note(f, now)
	}
	return nil
}

// reset makes the Config what it was before apply.
func (p *plan) reset(config any) error {
	reflect.ValueOf(config).Elem().Set(p.given)
	return nil
}

// plan decodes and validates data.
func (r *Registry) plan(data []byte) ([]plan, error) {
	members, err := object(data)
	if err != nil {
		return nil, fmt.Errorf("registry: settings: %w", err)
	}
	var plans []plan
	var errs []error
	seen := map[string]bool{}
	for _, m := range members {
		path, optional := strings.CutPrefix(m.name, "?")
		if seen[path] {
			errs = append(errs, fmt.Errorf("%s: is there twice", path))
			continue
		}
		seen[path] = true
		e, ok := r.find(path)
		switch {
		case !ok && optional:
		case !ok:
			errs = append(errs, fmt.Errorf("%s: no such policy is registered", path))
		case e.source.config == nil:
			errs = append(errs, fmt.Errorf("%s: has no settings", path))
		default:
			p, err := e.plan(m.value)
			if err != nil {
				errs = append(errs, err)
			} else if p.changed {
				plans = append(plans, p)
			}
		}
	}
	return plans, errors.Join(errs...)
}

func (e Entry) plan(data []byte) (plan, error) {
	p := plan{entry: e, data: data, before: e.source.config()}
	err := e.source.change(true, p.decode)
	if wrong := (undecodable{}); errors.As(err, &wrong) {
		return p, wrong.error
	}
	if err != nil {
		return p, at(e.path(), err)
	}
	return p, nil
}

// at gives each of the joined errors of a Validate method its path.
func at(path string, err error) error {
	var errs []error
	for _, e := range parts(err) {
		errs = append(errs, fmt.Errorf("%s: %w", path, e))
	}
	return errors.Join(errs...)
}

func parts(err error) []error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, parts(e)...)
	}
	return all
}

// settable reports whether a file can hold the field, which is in the types outer.
func settable(f reflect.StructField, outer ...reflect.Type) bool {
	return f.IsExported() && f.Name != "Name" && holds(f.Type, outer...)
}

// holds reports whether a file can hold values of t. outer are the types that t is in: a
// type that contains itself must hold something besides.
func holds(t reflect.Type, outer ...reflect.Type) bool {
	if slices.Contains(outer, t) {
		return false
	}
	outer = append(slices.Clip(outer), t)
	if isText(t) {
		return true
	}
	switch t.Kind() {
	case reflect.Bool, reflect.String,
		reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64,
		reflect.Float32, reflect.Float64:
		return true
	case reflect.Slice, reflect.Pointer:
		return holds(t.Elem(), outer...)
	case reflect.Struct:
		for i := range t.NumField() {
			if settable(t.Field(i), outer...) {
				return true
			}
		}
		return false
	default:
		return false
	}
}

var (
	textType = reflect.TypeFor[encoding.TextUnmarshaler]()
	duration = reflect.TypeFor[time.Duration]()
)

// isText reports whether values of t are written as texts of their own.
func isText(t reflect.Type) bool {
	return reflect.PointerTo(t).Implements(textType)
}

// A decoder reads settings and collects all that is wrong with them.
type decoder struct {
	path  string
	errs  []error
	index []int   // of the field at path
	named []field // those that are structs by their own fields
}

func (d *decoder) fail(format string, args ...any) {
	d.errs = append(d.errs, fmt.Errorf("%s: %s", d.path, fmt.Sprintf(format, args...)))
}

// within runs f with a path that goes on.
func (d *decoder) within(path string, f func()) {
	outer := d.path
	d.path += path
	f()
	d.path = outer
}

func (d *decoder) fields(v reflect.Value, data []byte) {
	members, err := object(data)
	if err != nil {
		d.fail("%v", err)
		return
	}
	seen := map[string]bool{}
	for _, m := range members {
		d.within("."+m.name, func() {
			f, ok := v.Type().FieldByName(m.name)
			switch {
			case seen[m.name]:
				d.fail("is there twice")
			case !ok || !f.IsExported() || len(f.Index) > 1: // those of an embedded struct go by its name
				d.fail("%s has no such field%s", v.Type(), elsewhere(v.Type(), m.name))
			case m.name == "Name":
				d.fail("a policy cannot change its name")
			case !settable(f):
				d.fail("a file cannot hold a value of type %s", f.Type)
			default:
				d.field(v, f, m.value)
			}
			seen[m.name] = true
		})
	}
}

// elsewhere tells of a field that a Group has in its Config.
func elsewhere(t reflect.Type, name string) string {
	if config, ok := t.FieldByName("Config"); ok && config.Type.Kind() == reflect.Struct {
		if f, ok := config.Type.FieldByName(name); ok && f.IsExported() {
			return fmt.Sprintf(`, but its Config has: {"Config": {%q: ...}}`, name)
		}
	}
	return ""
}

// field decodes data onto a field of v.
func (d *decoder) field(v reflect.Value, f reflect.StructField, data []byte) {
	outer, before := d.index, len(d.named)
	d.index = append(slices.Clone(outer), f.Index...)
	d.value(v.FieldByIndex(f.Index), data)
	if f.Type.Kind() != reflect.Struct || isText(f.Type) {
		d.named = append(d.named[:before], field{d.path, d.index}) // as a whole
	}
	d.index = outer
}

func (d *decoder) value(v reflect.Value, data []byte) {
	switch {
	case v.Type() == duration:
		d.duration(v, data)
	case isText(v.Type()):
		var s string
		if d.read(&s, data, "a text") {
			if err := v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s)); err != nil {
				d.fail("%v", err)
			}
		}
	case v.Kind() == reflect.Struct:
		d.fields(v, data)
	case v.Kind() == reflect.Pointer:
		d.pointer(v, data)
	case v.Kind() == reflect.Slice:
		d.slice(v, data)
	default:
		d.read(v.Addr().Interface(), data, article(v.Kind().String()))
	}
}

func article(kind string) string {
	if strings.HasPrefix(kind, "i") {
		return "an " + kind
	}
	return "a " + kind
}

func (d *decoder) duration(v reflect.Value, data []byte) {
	var s string
	if !d.read(&s, data, `a duration in quotes, such as "1.5s"`) {
		return
	}
	t, err := time.ParseDuration(s)
	if err != nil {
		d.fail("is %q: must be a duration such as %q", s, "1.5s")
		return
	}
	v.SetInt(int64(t))
}

func (d *decoder) pointer(v reflect.Value, data []byte) {
	if string(data) == "null" {
		v.SetZero()
		return
	}
	p := reflect.New(v.Type().Elem())
	if !v.IsNil() {
		p.Elem().Set(v.Elem())
	}
	d.value(p.Elem(), data)
	v.Set(p)
}

func (d *decoder) slice(v reflect.Value, data []byte) {
	var items []json.RawMessage
	if !d.read(&items, data, "a list") {
		return
	}
	if items == nil { // null
		v.SetZero()
		return
	}
	s := reflect.MakeSlice(v.Type(), len(items), len(items))
	for i, item := range items {
		d.within(fmt.Sprintf("[%d]", i), func() { d.value(s.Index(i), item) })
	}
	v.Set(s)
}

// read decodes data, which must be what want says. Null is nothing but an empty list.
func (d *decoder) read(to any, data []byte, want string) bool {
	if _, list := to.(*[]json.RawMessage); string(data) == "null" && !list {
		d.fail("is null: must be %s", want)
		return false
	}
	if err := json.Unmarshal(data, to); err != nil {
		d.fail("is %s: must be %s", abbreviate(data), want)
		return false
	}
	return true
}

func abbreviate(data []byte) string {
	if len(data) > 40 {
		return string(data[:40]) + "..."
	}
	return string(data)
}

// A member is one member of a JSON object.
type member struct {
	name  string
	value json.RawMessage
}

// object reads a JSON object with its members in order, those of one name too.
func object(data []byte) ([]member, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil {
		return nil, fmt.Errorf("is not JSON: %w", err)
	} else if t != json.Delim('{') {
		return nil, fmt.Errorf("is %s: must be an object", abbreviate(data))
	}
	var members []member
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, fmt.Errorf("is not JSON: %w", err)
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, fmt.Errorf("is not JSON: %w", err)
		}
		members = append(members, member{name.(string), value})
	}
	if _, err := d.Token(); err != nil {
		return nil, fmt.Errorf("is not JSON: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("is not JSON: there is something behind the object")
	}
	return members, nil
}

// write returns v as the decoder reads it.
func write(v reflect.Value) []byte {
	switch {
	case v.Type() == duration:
		return quote(time.Duration(v.Int()).String())
	case isText(v.Type()):
		return quote(text(v))
	case v.Kind() == reflect.Struct:
		return writeFields(v)
	case v.Kind() == reflect.Pointer && v.IsNil(), v.Kind() == reflect.Slice && v.IsNil():
		return []byte("null")
	case v.Kind() == reflect.Pointer:
		return write(v.Elem())
	case v.Kind() == reflect.Slice:
		out := []byte("[")
		for i := range v.Len() {
			if i > 0 {
				out = append(out, ", "...)
			}
			out = append(out, write(v.Index(i))...)
		}
		return append(out, ']')
	default:
		return quote(v.Interface())
	}
}

// text returns the text of a value that is written as one.
func text(v reflect.Value) string {
	p := reflect.New(v.Type())
	p.Elem().Set(v)
	if m, ok := p.Interface().(encoding.TextMarshaler); ok {
		if b, err := m.MarshalText(); err == nil {
			return string(b)
		}
	}
	return fmt.Sprint(v.Interface())
}

func writeFields(v reflect.Value) []byte {
	out := []byte("{")
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if !settable(f) {
			continue
		}
		if len(out) > 1 {
			out = append(out, ", "...)
		}
		out = append(out, quote(f.Name)...)
		out = append(out, ": "...)
		out = append(out, write(v.Field(i))...)
	}
	return append(out, '}')
}

// quote returns a text, number or bool as JSON. A number that JSON has no form for is
// its text: no Config is valid with one.
func quote(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return quote(fmt.Sprint(v))
	}
	return bytes.TrimSpace(b.Bytes())
}
