package registry

import (
	"fmt"
	"log/slog"
	"reflect"
	"strings"
)

// A Report is a list of settings that have changed, sorted by path.
type Report []Change

// A Change is a setting that has changed.
type Change struct {
	Path string `json:"path"` // the policy and the field, such as "breaker/users.ConsecutiveFailures"
	From string `json:"from"` // the effective value before the change, as JSON
	To   string `json:"to"`   // the effective value after the change, as JSON
}

// String returns a line for each change, such as "breaker/users.ConsecutiveFailures: 5 -> 10".
func (r Report) String() string {
	var b strings.Builder
	for _, c := range r {
		fmt.Fprintf(&b, "%s: %s -> %s\n", c.Path, c.From, c.To)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// LogValue implements [slog.LogValuer]. LogValue returns a group with an attribute for each change.
func (r Report) LogValue() slog.Value {
	attrs := make([]slog.Attr, len(r))
	for i, c := range r {
		attrs[i] = slog.String(c.Path, c.From+" -> "+c.To)
	}
	return slog.GroupValue(attrs...)
}

// compare appends the changed fields of a Config to report, and returns the report. path is the path of the Config.
// given and next are the Config without its defaults, before and after the update. before and after are the Config with
// its defaults. A field counts as changed if it differs between given and next, and also between before and after.
func compare(report Report, path string, given, next, before, after reflect.Value) Report {
	for i := range given.NumField() {
		f := given.Type().Field(i)
		if !settable(f) {
			continue
		}
		path := path + "." + f.Name
		given, next, before, after := given.Field(i), next.Field(i), before.Field(i), after.Field(i)
		if f.Type.Kind() == reflect.Struct && !isText(f.Type) {
			report = compare(report, path, given, next, before, after)
			continue
		}
		from, to := string(encode(before)), string(encode(after))
		if from != to && !reflect.DeepEqual(given.Interface(), next.Interface()) {
			report = append(report, Change{Path: path, From: from, To: to})
		}
	}
	return report
}
