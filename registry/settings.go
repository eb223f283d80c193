package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
)

// Settings returns the settings of all policies that can be updated. The result is a JSON object that [Registry.Apply]
// accepts. The result has all fields that a settings file can hold, with defaults filled in.
func (r *Registry) Settings() []byte {
	var all []string
	for e := range r.All() {
		if settings := e.Settings(); e.canUpdate && settings != nil {
			all = append(all, string(quote(e.String()))+": "+string(settings))
		}
	}
	var out bytes.Buffer
	if err := json.Indent(&out, []byte("{"+strings.Join(all, ", ")+"}\n"), "", "  "); err != nil {
		panic(err) // a bug: encode returned invalid JSON
	}
	return out.Bytes()
}

// Reload applies the settings in a file. Call Reload when the program starts and when the file has changed:
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

// Apply changes the settings of running policies. data is a JSON object. Each key is the "kind/name" of a policy. Each
// value is an object that maps the Go names of fields of the policy's Config to their new values:
//
//   - A duration is a text such as "1.5s". A time zone is a text such as "Asia/Tokyo".
//   - The constants Unlimited and None are the texts "unlimited" and "none".
//   - A field that is not in data keeps its value. The value null or zero restores the default of a field.
//   - A list is replaced as a whole.
//   - A field that the Config does not have, or that a settings file cannot hold, is an error. So is the field Name,
//     and a key or a field that occurs twice.
//   - A key whose policy is not registered is an error. If such a key starts with a question mark, as in
//     "?breaker/users", the key is ignored instead.
//
// If all members of a group already have the settings, the group is not updated.
//
// Apply first tries the update of every policy in a dry run. If the dry run finds problems, Apply changes nothing, and
// the error lists all problems. A policy may still reject an update that succeeded in the dry run. A policy that
// rejects its update keeps its settings, and the error names the policy. The settings of the other policies change.
//
// The report lists the fields in data that have changed. If a change also changes the default of another field, the
// report does not list that other field.
func (r *Registry) Apply(data []byte) (Report, error) {
	return r.apply(data, false)
}

// Preview returns the report or the error that Apply would return, and changes nothing. If data restores the default of
// a field, the report has the zero value of the field instead of its default.
func (r *Registry) Preview(data []byte) (Report, error) {
	return r.apply(data, true)
}

func (r *Registry) apply(data []byte, dryRun bool) (Report, error) {
	r.applying.Lock()
	defer r.applying.Unlock()
	updates, err := r.updates(data)
	if err != nil {
		return nil, err
	}
	var report Report
	var errs []error
	for _, u := range updates {
		if !dryRun {
			if err := u.Update(false, u.decode); err != nil {
				errs = append(errs, prefixed(u.String(), err))
				continue
			}
			u.after, _ = u.config()
		}
		report = compare(report, u.String(), u.given, u.next, u.before, u.after)
	}
	slices.SortFunc(report, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return report, errors.Join(errs...)
}

// updates returns the updates in data that change something. Each returned update has succeeded in a dry run.
func (r *Registry) updates(data []byte) ([]*update, error) {
	var policies map[string]json.RawMessage
	err := json.Unmarshal(data, &policies)
	if err == nil && policies == nil {
		err = errors.New("is null")
	}
	if err != nil {
		return nil, fmt.Errorf("registry: settings: must be a JSON object of policies: %w", err)
	}
	var all []*update
	errs := duplicates(json.NewDecoder(bytes.NewReader(data)), "")
	for _, name := range slices.Sorted(maps.Keys(policies)) {
		path, optional := strings.CutPrefix(name, "?")
		kind, policyName, _ := strings.Cut(path, "/")
		e, ok := r.Get(kind, policyName)
		if !ok {
			if !optional {
				errs = append(errs, fmt.Errorf("%s: no such policy is registered", path))
			}
			continue
		}
		before, hasConfig := e.config()
		switch {
		case !e.canUpdate || !hasConfig:
			errs = append(errs, fmt.Errorf("%s: %w", path, errNoSettings))
			continue
		case optional && policies[path] != nil:
			errs = append(errs, fmt.Errorf("%s: occurs twice", path))
			continue
		}
		u := &update{Entry: e, before: before}
		if err := u.try(policies[name]); err != nil {
			errs = append(errs, prefixed(path, err))
		} else if !bytes.Equal(encode(u.given), encode(u.next)) {
			all = append(all, u)
		}
	}
	return all, errors.Join(errs...)
}

// An update changes the settings of one policy.
type update struct {
	Entry
	values map[string]any // the values from the settings file, by field name
	before reflect.Value  // the Config before the update, with its defaults
	given  reflect.Value  // the Config before the update, without its defaults
	next   reflect.Value  // the Config after the update, without its defaults
	after  reflect.Value  // the Config after the update, with its defaults; after a dry run, the same as next
}

// try decodes data, an object of settings, and tries the update in a dry run.
func (u *update) try(data []byte) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&u.values); err != nil || u.values == nil {
		return fmt.Errorf("must be an object of settings, not %s", data)
	}
	return u.Update(true, func(cfg any) error {
		given := clone(cfg)
		if err := u.decode(cfg); err != nil {
			return err
		}
		switch next := clone(cfg); {
		case !u.given.IsValid():
			u.given, u.next, u.after = given, next, next
		case u.given.Type() == given.Type() && bytes.Equal(encode(u.given), encode(u.next)):
			// A group calls this function for several Configs. The Configs so far already have the settings, but the Config of
			// this member may not.
			u.before, u.given, u.next, u.after = given, given, next, next
		}
		return nil
	})
}

// clone returns a shallow copy of the struct that cfg points to.
func clone(cfg any) reflect.Value {
	v := reflect.New(reflect.TypeOf(cfg).Elem()).Elem()
	v.Set(reflect.ValueOf(cfg).Elem())
	return v
}

// decode sets the fields of cfg, a pointer to the Config without its defaults.
func (u *update) decode(cfg any) error { return decode(cfg, u.values) }
