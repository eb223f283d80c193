// Package invalid words the errors that a Validate method returns, so that they
// read alike in every package.
package invalid

import (
	"errors"
	"fmt"
	"reflect"
)

// Fields collects what is wrong with the fields of one configuration.
type Fields struct {
	Type string // "breaker.Config": what the fields belong to
	err  error
}

// Need records that the field's value is not within what it may be, unless ok.
// want completes the sentence "must be ...".
func (f *Fields) Need(ok bool, field string, value any, want string) {
	if !ok {
		f.err = errors.Join(f.err, fmt.Errorf("%s.%s is %v: must be %s", f.Type, field, value, want))
	}
}

// Same records that a field that cannot change has changed.
func (f *Fields) Same(field string, was, now any) {
	// Of values, not of types: a struct may hold in an interface what cannot be compared.
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

// Renamed returns an error if the field Name of a configuration, which cannot change, has changed.
func Renamed(typ, was, now string) error {
	f := Fields{Type: typ}
	f.Same("Name", was, now)
	return f.Err()
}

// Err returns all that was recorded, joined, or nil.
func (f *Fields) Err() error { return f.err }
