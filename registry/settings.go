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

// Settings returns the settings that can change as a JSON object for [Registry.Apply]: all fields that a
// settings file can hold, with their defaults.
func (r *Registry) Settings() []byte {
	var all []string
	for e := range r.All() {
		if settings := e.Settings(); e.canUpdate && settings != nil {
			all = append(all, string(quote(e.String()))+": "+string(settings))
		}
	}
	var out bytes.Buffer
	if err := json.Indent(&out, []byte("{"+strings.Join(all, ", ")+"}\n"), "", "  "); err != nil {
		panic(err) // encode returned invalid JSON
	}
	return out.Bytes()
}

// Reload applies the settings in a file. Call it when the program starts and when the file has changed:
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

// Apply changes the settings of running policies. data is a JSON object from "kind/name" to an object of fields
// of the policy's Config, by their Go names. A duration is text such as "1.5s", a time zone text such as
// "Asia/Tokyo". The constants Unlimited and None are text, too: "unlimited" and "none". A field that is left out
// keeps its value; null and zero restore its default. A list is replaced as a whole. A name that is not
// registered is an error, unless it starts with a question mark: "?breaker/users". A group is not updated if all
// its members have the settings already.
//
// If anything is wrong, the error lists every problem, and nothing changes. Apply finds out with a dry run of
// every policy; if a policy nevertheless rejects the update after that, it keeps its settings, the error names
// it, and the other policies have changed.
//
// The report lists the fields in data that have changed, without the defaults that follow them.
func (r *Registry) Apply(data []byte) (Report, error) {
	return r.apply(data, false)
}

// Preview returns the report or the error that Apply would return, and changes nothing. In the report, a field
// whose default data restores has its zero value.
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

// updates returns the updates in data that change something. Each has passed a dry run.
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
	values map[string]any // by field, from the settings file
	before reflect.Value  // the Config before, with its defaults
	given  reflect.Value  // the Config before, as it was given
	next   reflect.Value  // the Config after, as it will be given
	after  reflect.Value  // the Config after, with its defaults; after a dry run equal to next
}

// try decodes data, an object of settings, and updates the policy with them in a dry run.
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
			// The first Config of a group has the settings already, but this member's may not.
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

// decode sets the fields of cfg, a pointer to the Config as it was given.
func (u *update) decode(cfg any) error { return decode(cfg, u.values) }
