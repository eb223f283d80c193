package registry

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"

	"github.com/go-resilience/resilience/internal/describe"
)

// A Change is one setting that [Registry.Apply] has changed.
type Change struct {
	Path string `json:"path"` // "breaker/users.Failures"
	From string `json:"from"` // as in JSON
	To   string `json:"to"`
}

// A Report lists the settings that have changed, by path.
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

// Settings returns the settings that can change as [Registry.Apply] reads them: all fields that a file can
// hold, with their defaults.
func (r *Registry) Settings() []byte {
	var all []string
	for e := range r.All() {
		_, changes := e.Policy.(describe.Changer)
		if settings := e.Settings(); changes && settings != nil {
			all = append(all, string(quote(e.String()))+": "+string(settings))
		}
	}
	var out bytes.Buffer
	if err := json.Indent(&out, []byte("{"+strings.Join(all, ", ")+"}\n"), "", "  "); err != nil {
		panic(err) // write makes valid JSON
	}
	return out.Bytes()
}

// Settings returns the settings of the policy as a JSON object, or nil.
func (e Entry) Settings() []byte {
	if config, ok := e.config(); ok {
		return write(config)
	}
	return nil
}

// Reload applies the settings in a file, at the start of a program, and when the file has changed:
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

// Apply changes the settings of policies while they run. data is a JSON object whose names are
// policies, "kind/name", and whose values are objects of fields of the policy's Config by their Go
// names. Durations are texts such as "1.5s", time zones as "Asia/Tokyo". A field that is left out stays
// as it was given; null and zero mean its default. A list is replaced as a whole. A name that is not
// registered is an error, unless it begins with a question mark: "?breaker/users". A Group whose every
// member has the settings already is left alone, and so are those that it makes otherwise later.
//
// Apply first asks every policy whether it would take the change. If anything is wrong, the error
// names all of it, and nothing has changed. A policy that refuses only then stays as it was, and the
// others have changed.
//
// The report lists the fields that data has changed, without the defaults that follow them.
func (r *Registry) Apply(data []byte) (Report, error) {
	return r.apply(data, false)
}

// Preview returns what Apply would report, or its error, and changes nothing. It does not know which
// zeros mean a default.
func (r *Registry) Preview(data []byte) (Report, error) {
	return r.apply(data, true)
}

func (r *Registry) apply(data []byte, dry bool) (Report, error) {
	r.applying.Lock()
	defer r.applying.Unlock()
	changes, err := r.changes(data)
	if err != nil {
		return nil, err
	}
	var report Report
	var errs []error
	for _, c := range changes {
		if !dry {
			if err := c.policy.Change(false, c.decode); err != nil {
				errs = append(errs, at(c.String(), err))
				continue
			}
			c.after, _ = c.config()
		}
		report = c.report(report)
	}
	slices.SortFunc(report, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return report, errors.Join(errs...)
}

// changes returns the changes that data says, each of which its policy would take.
func (r *Registry) changes(data []byte) ([]*change, error) {
	var policies map[string]json.RawMessage
	err := json.Unmarshal(data, &policies)
	if err == nil && policies == nil {
		err = errors.New("is null")
	}
	if err != nil {
		return nil, fmt.Errorf("registry: settings: must be a JSON object of policies: %w", err)
	}
	var all []*change
	errs := twice(json.NewDecoder(bytes.NewReader(data)), "")
	for _, name := range slices.Sorted(maps.Keys(policies)) {
		path, optional := strings.CutPrefix(name, "?")
		kind, policyName, _ := strings.Cut(path, "/")
		e, ok := r.Get(kind, policyName)
		policy, changes := e.Policy.(describe.Changer)
		before, has := e.config()
		switch {
		case !ok && optional:
			continue
		case !ok:
			errs = append(errs, fmt.Errorf("%s: no such policy is registered", path))
			continue
		case !changes || !has:
			errs = append(errs, fmt.Errorf("%s: has no settings that can change", path))
			continue
		case optional && policies[path] != nil:
			errs = append(errs, fmt.Errorf("%s: is there twice", path))
			continue
		}
		c := &change{Entry: e, policy: policy, before: before}
		if err := c.try(policies[name]); err != nil {
			errs = append(errs, at(path, err))
		} else if !bytes.Equal(write(c.given), write(c.next)) {
			all = append(all, c)
		}
	}
	return all, errors.Join(errs...)
}

// twice returns an error for each name that is in an object of valid JSON twice: encoding/json takes the
// last one, and nobody would be told of the other.
func twice(d *json.Decoder, path string) (errs []error) {
	open, _ := d.Token()
	if _, holds := open.(json.Delim); !holds {
		return nil
	}
	seen := map[string]bool{}
	for d.More() {
		at := path
		if open == json.Delim('{') {
			name, _ := d.Token()
			at = strings.TrimPrefix(fmt.Sprint(path, ".", name), ".")
			if seen[at] {
				errs = append(errs, fmt.Errorf("%s: is there twice", at))
			}
			seen[at] = true
		}
		errs = append(errs, twice(d, at)...)
	}
	_, _ = d.Token() // the end
	return errs
}

// A change is that of one policy.
type change struct {
	Entry
	policy describe.Changer
	values map[string]any
	before reflect.Value // the Config before, with its defaults
	given  reflect.Value // as it was given
	next   reflect.Value // as it will be given
	after  reflect.Value // the Config after, with its defaults
}

// try asks the policy whether it would take the change.
func (c *change) try(data []byte) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&c.values); err != nil || c.values == nil {
		return fmt.Errorf("must be an object of settings, not %s", data)
	}
	return c.policy.Change(true, func(cfg any) error {
		given := clone(cfg)
		if err := c.decode(cfg); err != nil {
			return err
		}
		switch next := clone(cfg); {
		case !c.given.IsValid():
			c.given, c.next, c.after = given, next, next
		case c.given.Type() == given.Type() && bytes.Equal(write(c.given), write(c.next)):
			// The overflow of a Group is asked first: it has the settings already, and a member perhaps not.
			c.before, c.given, c.next, c.after = given, given, next, next
		}
		return nil
	})
}

func clone(cfg any) reflect.Value {
	v := reflect.New(reflect.TypeOf(cfg).Elem()).Elem()
	v.Set(reflect.ValueOf(cfg).Elem())
	return v
}

// decode writes the values into a Config as it was given.
func (c *change) decode(cfg any) error {
	var errs []error
	values := make(map[string]any, len(c.values)) // those that can be decoded, so that all errors are told at once
	for _, name := range slices.Sorted(maps.Keys(c.values)) {
		if failed := prepare(reflect.ValueOf(cfg).Elem(), map[string]any{name: c.values[name]}); failed != nil {
			errs = append(errs, failed...)
			continue
		}
		values[name] = c.values[name]
	}
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: cfg, ErrorUnused: true, ZeroFields: true,
		MatchName:  func(key, field string) bool { return key == field },
		DecodeHook: fromText,
	})
	if err != nil {
		return err
	}
	err = d.Decode(values)
	if all, ok := errors.AsType[interface {
		error
		Unwrap() []error
	}](err); ok { // it has a text of its own around them
		err = all
	}
	for _, err := range parts(err) {
		if at, ok := errors.AsType[*mapstructure.DecodeError](err); ok {
			err = fmt.Errorf("%s: %w", at.Name(), at.Unwrap())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// prepare returns an error for each value of which no file can set the field. A Config that a
// field points to is written to: prepare copies it, because another may use it.
func prepare(config reflect.Value, values map[string]any) (errs []error) {
	for _, name := range slices.Sorted(maps.Keys(values)) {
		f, ok := config.Type().FieldByName(name)
		switch {
		case !ok || !f.IsExported() || len(f.Index) > 1:
			errs = append(errs, fmt.Errorf("%s: %s has no such field", name, config.Type()))
			continue
		case name == "Name":
			errs = append(errs, fmt.Errorf("%s: a policy cannot change its name", name))
			continue
		case !settable(f):
			errs = append(errs, fmt.Errorf("%s: a file cannot hold a value of type %s", name, f.Type))
			continue
		}
		part := config.FieldByIndex(f.Index)
		switch {
		case values[name] == nil:
			part.SetZero()
		case part.Kind() == reflect.Pointer:
			p := reflect.New(f.Type.Elem())
			if !part.IsNil() {
				p.Elem().Set(part.Elem())
			}
			part.Set(p)
			part = p.Elem()
		}
		if inner, _ := values[name].(map[string]any); part.Kind() == reflect.Struct && !isText(part.Type()) {
			for _, err := range prepare(part, inner) {
				errs = append(errs, fmt.Errorf("%s.%w", name, err))
			}
		}
	}
	return errs
}

// fromText makes durations, time zones, and what reads itself from a text, of texts.
func fromText(from, to reflect.Type, value any) (any, error) {
	text, ok := value.(string)
	switch {
	case to == duration:
		if d, err := time.ParseDuration(text); err == nil {
			return d, nil
		}
		return nil, fmt.Errorf(`is %v: must be a duration in quotes, such as "1.5s"`, value)
	case isText(to):
		if !ok {
			return nil, fmt.Errorf("is %v: must be a text", value)
		}
		if to == location {
			in, err := time.LoadLocation(text)
			_ = in.String() // Local is made by its first use, and copied before
			return in, err
		}
		v := reflect.New(to)
		err := v.Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text))
		return v.Elem().Interface(), err
	case to.Kind() == reflect.String && !ok:
		return nil, fmt.Errorf("is %v: must be a text", value)
	}
	return value, nil
}

// report appends the fields whose given value has changed, if what is in effect has changed by it.
func (c *change) report(to Report) Report {
	return compare(to, c.String(), c.given, c.next, c.before, c.after)
}

func compare(to Report, path string, given, next, before, after reflect.Value) Report {
	for i := range given.NumField() {
		f := given.Type().Field(i)
		if !settable(f) {
			continue
		}
		path := path + "." + f.Name
		given, next, before, after := given.Field(i), next.Field(i), before.Field(i), after.Field(i)
		if f.Type.Kind() == reflect.Struct && !isText(f.Type) {
			to = compare(to, path, given, next, before, after)
			continue
		}
		from, now := string(write(before)), string(write(after))
		if from != now && !reflect.DeepEqual(given.Interface(), next.Interface()) {
			to = append(to, Change{Path: path, From: from, To: now})
		}
	}
	return to
}

// at puts path in front of each of the errors that err joins.
func at(path string, err error) error {
	var errs []error
	for _, e := range parts(err) {
		errs = append(errs, fmt.Errorf("%s: %w", path, e))
	}
	return errors.Join(errs...)
}

func parts(err error) []error {
	if err == nil {
		return nil
	}
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
	case reflect.Slice, reflect.Pointer:
		return holds(t.Elem(), outer...)
	case reflect.Struct:
		for i := range t.NumField() {
			if settable(t.Field(i), outer...) {
				return true
			}
		}
		return false
	case reflect.Bool, reflect.String:
		return true
	default:
		return t.ConvertibleTo(reflect.TypeFor[float64]())
	}
}

var (
	textType = reflect.TypeFor[encoding.TextUnmarshaler]()
	duration = reflect.TypeFor[time.Duration]()
	location = reflect.TypeFor[time.Location]() // without which a quota would go by UTC after a change
)

// isText reports whether values of t are written as texts of their own.
func isText(t reflect.Type) bool {
	return t == location || reflect.PointerTo(t).Implements(textType)
}

// write returns v as Apply reads it. It leaves out what no file can hold.
func write(v reflect.Value) []byte {
	var all []string
	switch {
	case v.Type() == duration:
		return quote(time.Duration(v.Int()).String())
	case isText(v.Type()):
		return quote(text(v))
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); settable(f) {
				all = append(all, string(quote(f.Name))+": "+string(write(v.Field(i))))
			}
		}
		return []byte("{" + strings.Join(all, ", ") + "}")
	case v.Kind() == reflect.Pointer && v.IsNil(), v.Kind() == reflect.Slice && v.IsNil():
		return []byte("null")
	case v.Type() == reflect.PointerTo(location):
		return quote(fmt.Sprint(v.Interface()))
	case v.Kind() == reflect.Pointer:
		return write(v.Elem())
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			all = append(all, string(write(v.Index(i))))
		}
		return []byte("[" + strings.Join(all, ", ") + "]")
	}
	return quote(v.Interface())
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
