// Package invalid creates the errors of Validate methods. These errors have the same form in all packages.
package invalid

import (
	"errors"
	"fmt"
	"reflect"
)

// Fields collects the errors of a configuration's fields.
type Fields struct {
	Type string // the configuration's type, such as "breaker.Config"
	err  error
}

// Need records an error for a field unless ok is true. The text of the error ends with "must be", followed by want.
func (f *Fields) Need(ok bool, field string, value any, want string) {
	if !ok {
		f.err = errors.Join(f.err, fmt.Errorf("%s.%s is %v: must be %s", f.Type, field, value, want))
	}
}

// Same records an error if was and now differ. It is used for fields that Update cannot change.
func (f *Fields) Same(field string, was, now any) {
	// The values are tested, not their types, because an interface type may contain a value that cannot be compared.
	canTell := reflect.ValueOf(was).Comparable() && reflect.ValueOf(now).Comparable()
	same := reflect.TypeOf(was) == reflect.TypeOf(now) && (!canTell || was == now)
	old, other := "the same", "another"
	switch was.(type) {
	case string:
		old, other = fmt.Sprintf("%q", was), fmt.Sprintf("%q", now)
	case bool, int, uint32:
		old, other = fmt.Sprint(was), fmt.Sprint(now)
	}
	f.Need(same, field, other, old+" as before: it cannot change")
}

// Renamed returns an error if Update would change the Name of a configuration.
func Renamed(typ, was, now string) error {
	f := Fields{Type: typ}
	f.Same("Name", was, now)
	return f.Err()
}

// Err returns the recorded errors, joined. It returns nil if no error was recorded.
func (f *Fields) Err() error { return f.err }
