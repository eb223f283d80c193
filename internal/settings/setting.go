// Package settings holds the configuration of a policy, and changes it while the policy runs.
package settings

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/go-resilience/resilience/internal/invalid"
)

// A config is a struct. So are its parts: the structs in it, and those behind pointers, if
// all of their fields are exported. Parts and slices are copied whenever a config comes
// from outside or goes there.
type config interface{ Validate() error }

// A Version is one configuration of a policy, which never changes. Members of a group share
// theirs.
type Version[C config] struct {
	filled   C // with its defaults
	given    C // without them
	defaults func(C) C
	fixed    []string
}

// New returns the first version of a configuration. It panics with the error of Validate, if
// there is one. defaults returns a valid C, which it may write to, with its zero fields filled
// in. fixed are the names of fields, of the configuration or a part of it, that cannot change; Name is one
// without being named.
func New[C config](given C, defaults func(C) C, fixed ...string) *Version[C] {
	if err := given.Validate(); err != nil {
		panic(err)
	}
	given = detached(given)
	return &Version[C]{defaults(detached(given)), given, defaults, append(fixed, "Name")}
}

// Filled returns the configuration with its defaults. It must not be written to.
func (v *Version[C]) Filled() *C { return &v.filled }

// A Setting is the present configuration of a policy. It is safe for concurrent use and is
// not copied. Adopt makes it ready to use.
type Setting[C config] struct {
	filled   atomic.Pointer[C] // of version: spares a call a check for nil
	version  atomic.Pointer[Version[C]]
	updating sync.Mutex
}

// Load returns the configuration with its defaults, by one atomic load. It must not be
// written to.
func (s *Setting[C]) Load() *C { return s.filled.Load() }

// Config returns a copy of the configuration with its defaults.
func (s *Setting[C]) Config() C { return detached(*s.Load()) }

// Given returns the configuration without its defaults. It must not be written to.
func (s *Setting[C]) Given() C { return s.version.Load().given }

// Adopt makes v the present version. Then it calls follow, if that is not nil.
func (s *Setting[C]) Adopt(v *Version[C], follow func(*C)) {
	s.updating.Lock()
	defer s.updating.Unlock()
	s.adopt(v, follow)
}

func (s *Setting[C]) adopt(v *Version[C], follow func(*C)) {
	s.version.Store(v)
	s.filled.Store(&v.filled)
	if follow != nil {
		follow(&v.filled)
	}
}

// Update calls change with the configuration, its defaults filled in, and makes the result
// the present version if it is valid. A field that change leaves as it is stays as it was
// given: if that is zero, its default is computed anew, perhaps from another field that did
// change. Functions cannot be compared; they are as change leaves them.
//
// Update calls admit before, which may return an error, and follow after. Either may be nil.
// If there is an error, or a panic in change, nothing has changed. Updates take turns.
func (s *Setting[C]) Update(change func(*C), admit func(*C) error, follow func(*C)) error {
	return s.update(func(v *Version[C]) C { return v.changed(change) }, admit, follow)
}

// Set is like Update, but calls change with the configuration as it was given.
func (s *Setting[C]) Set(change func(given *C), admit func(*C) error, follow func(*C)) error {
	return s.update(func(v *Version[C]) C {
		given := v.given
		change(&given)
		return given
	}, admit, follow)
}

func (s *Setting[C]) update(given func(*Version[C]) C, admit func(*C) error, follow func(*C)) error {
	s.updating.Lock()
	defer s.updating.Unlock()
	v := s.version.Load()
	next, err := v.next(given(v))
	if err == nil && admit != nil {
		err = admit(&next.filled)
	}
	if err == nil {
		s.adopt(next, follow)
	}
	return err
}

// Preview returns the configuration that Update would make the present one, with its
// defaults, or the error, except for that of admit. Nothing changes.
func (s *Setting[C]) Preview(change func(*C)) (C, error) {
	v := s.version.Load()
	next, err := v.next(v.changed(change))
	if err != nil {
		var none C
		return none, err
	}
	return detached(next.filled), nil
}

// changed returns what was given, with what change does to the configuration.
func (v *Version[C]) changed(change func(*C)) C {
	is, given := detached(v.filled), v.given
	change(&is)
	v.merge(reflect.ValueOf(&given).Elem(), reflect.ValueOf(v.filled), reflect.ValueOf(is))
	return given
}

// next returns the version that follows v, or what is wrong with it.
func (v *Version[C]) next(given C) (*Version[C], error) {
	given = detached(given)
	is, err := given, given.Validate()
	if err == nil {
		is = v.defaults(detached(given))
	}
	if err := errors.Join(v.kept(reflect.ValueOf(v.filled), reflect.ValueOf(is), err != nil), err); err != nil {
		return nil, err
	}
	return &Version[C]{is, given, v.defaults, v.fixed}, nil
}

// kept returns an error that names each fixed field that differs. A zero among unfilled
// fields may still become what was.
func (v *Version[C]) kept(was, is reflect.Value, unfilled bool) error {
	name, _, _ := strings.Cut(was.Type().String(), "[")
	f := invalid.Fields{Type: name}
	var parts []error
	for i := range was.NumField() {
		field, was, is := was.Type().Field(i), was.Field(i), is.Field(i)
		switch {
		case slices.Contains(v.fixed, field.Name):
			same := same(was, is) || incomparable(was, is) || unfilled && is.IsZero()
			f.Need(same, field.Name, text(is, "another"), text(was, "the same")+" as before: it cannot change")
		case isPart(field.Type):
			parts = append(parts, v.kept(was, is, unfilled))
		}
	}
	return errors.Join(f.Err(), errors.Join(parts...))
}

// text returns a value as an error shows it: other, if it is that of an interface.
func text(v reflect.Value, other string) string {
	switch v.Kind() {
	case reflect.String:
		return strconv.Quote(v.String())
	case reflect.Interface:
		return other
	}
	return fmt.Sprint(v)
}

// merge sets the fields of to in which is differs from was.
func (v *Version[C]) merge(to, was, is reflect.Value) {
	for i := range to.NumField() {
		field, to, was, is := to.Type().Field(i), to.Field(i), was.Field(i), is.Field(i)
		switch {
		case isPart(field.Type):
			v.merge(to, was, is)
		case pointToParts(to, was, is):
			p := reflect.New(field.Type.Elem())
			p.Elem().Set(to.Elem())
			v.merge(p.Elem(), was.Elem(), is.Elem())
			to.Set(p)
		case slices.Contains(v.fixed, field.Name) && incomparable(was, is):
		case !same(was, is):
			to.Set(is)
		}
	}
}

// same reports whether two values of a field are the same: policies, stores and errors if they
// are one, parts and slices if all in them is the same. Functions never are.
func same(a, b reflect.Value) bool {
	switch {
	case a.Kind() == reflect.Slice:
		return a.IsNil() == b.IsNil() && a.Len() == b.Len() && all(a.Len(), func(i int) bool { return same(a.Index(i), b.Index(i)) })
	case isPart(a.Type()):
		return all(a.NumField(), func(i int) bool { return same(a.Field(i), b.Field(i)) })
	case pointToParts(a, b):
		return same(a.Elem(), b.Elem())
	}
	return a.Comparable() && b.Comparable() && a.Equal(b)
}

func all(n int, ok func(int) bool) bool {
	for i := range n {
		if !ok(i) {
			return false
		}
	}
	return true
}

// incomparable reports whether a and b are of one type, whose values cannot be compared.
func incomparable(a, b reflect.Value) bool {
	return !a.Comparable() && !b.Comparable() && reflect.TypeOf(a.Interface()) == reflect.TypeOf(b.Interface())
}

// detached returns c with copies of what it shares with other values.
func detached[C any](c C) C {
	detach(reflect.ValueOf(&c).Elem())
	return c
}

func detach(v reflect.Value) {
	switch {
	case isPart(v.Type()):
		for i := range v.NumField() {
			detach(v.Field(i))
		}
	case v.Kind() == reflect.Slice && !v.IsNil():
		s := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(s, v)
		v.Set(s)
		for i := range v.Len() {
			detach(v.Index(i))
		}
	case pointToParts(v):
		p := reflect.New(v.Type().Elem())
		p.Elem().Set(v.Elem())
		detach(p.Elem())
		v.Set(p)
	}
}

// pointToParts reports whether all values point to a part.
func pointToParts(values ...reflect.Value) bool {
	return !slices.ContainsFunc(values, func(v reflect.Value) bool {
		return v.Kind() != reflect.Pointer || v.IsNil() || !isPart(v.Type().Elem())
	})
}

// isPart reports whether t is a struct whose fields are all exported: a configuration, and not
// a policy or a lock.
func isPart(t reflect.Type) bool {
	if t.Kind() != reflect.Struct {
		return false
	}
	for i := range t.NumField() {
		if !t.Field(i).IsExported() {
			return false
		}
	}
	return true
}
