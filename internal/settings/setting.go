// Package settings holds the configuration of a policy, and changes it while the policy runs.
package settings

import (
	"reflect"
	"sync"
	"sync/atomic"
)

type config interface{ Validate() error }

// A Setting is the configuration of a policy: as it was given, and with its defaults filled in.
// It is safe for concurrent use and is not copied. Init makes it ready to use.
type Setting[C config] struct {
	now  atomic.Pointer[Version[C]]
	mu   sync.Mutex // one change at a time
	fill func(C) C
}

// A Version is a configuration that never changes.
type Version[C config] struct{ filled, given C }

// Init sets the first configuration. It panics with the error of Validate, if there is one.
// fill returns a valid C with defaults in place of its zero fields; it may write to what C
// points to. Init must have returned before the Setting is used.
func (s *Setting[C]) Init(given C, fill func(C) C) {
	s.fill = fill
	if last, ok := latest.Load(reflect.TypeFor[C]()); ok && same(last.(*Version[C]).given, given) {
		s.now.Store(last.(*Version[C]))
		return
	}
	next, err := s.version(given)
	if err != nil {
		panic(err)
	}
	s.now.Store(next)
	if same(given, given) {
		latest.Store(reflect.TypeFor[C](), next)
	}
}

// latest has the last *Version[C] that Init made, by the type C, if it can be compared: policies
// that are made alike share it, so that a member of a Group does not take the memory of two
// configurations.
var latest sync.Map

// same reports whether a and b are certainly the same: their fields are, by ==.
func same[C any](a, b C) bool {
	v, w := reflect.ValueOf(a), reflect.ValueOf(b)
	for i := range v.NumField() {
		f, g := v.Field(i), w.Field(i)
		switch {
		case f.Comparable() && g.Comparable():
			if !f.Equal(g) {
				return false
			}
		case !f.IsZero() || !g.IsZero(): // functions and slices
			return false
		}
	}
	return true
}

// Load returns the configuration with its defaults, by one atomic load. It must not be
// written to.
func (s *Setting[C]) Load() *C { return &s.now.Load().filled }

// Config returns a copy of the configuration with its defaults.
func (s *Setting[C]) Config() C { return copyOf(*s.Load()) }

// Update calls change with the configuration as it was given: a zero field means its default.
// What change makes of it is the configuration from now on, if it is valid and check allows it.
// check gets the configurations before and after, both with their defaults. follow is called
// with the new one before another Update begins. Both may be nil.
//
// If there is an error, or change panics, nothing has changed.
func (s *Setting[C]) Update(change func(*C), check func(was, next *C) error, follow func(*C)) error {
	return s.change(false, func(given *C) error { change(given); return nil }, check, follow)
}

// Change is Update for a caller who does not know C: f gets a *C. Nothing changes if f returns
// an error, or if dry is true: then Change returns the error that it would return otherwise.
func (s *Setting[C]) Change(dry bool, f func(cfg any) error, check func(was, next *C) error, follow func(*C)) error {
	return s.change(dry, func(given *C) error { return f(given) }, check, follow)
}

func (s *Setting[C]) change(dry bool, change func(*C) error, check func(was, next *C) error, follow func(*C)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.now.Load()
	given := copyOf(was.given)
	if err := change(&given); err != nil {
		return err
	}
	next, err := s.version(given)
	if err != nil {
		return err
	}
	if check != nil {
		if err := check(&was.filled, &next.filled); err != nil {
			return err
		}
	}
	if dry {
		return nil
	}
	s.now.Store(next)
	if follow != nil {
		follow(&next.filled)
	}
	return nil
}

// version returns the configuration that given makes, which shares no slice with it.
func (s *Setting[C]) version(given C) (*Version[C], error) {
	if err := given.Validate(); err != nil {
		return nil, err
	}
	given = copyOf(given)
	return &Version[C]{s.fill(copyOf(given)), given}, nil
}

// copyOf returns c with copies of what it shares with other values: slices, and the
// configurations that it points to. Otherwise whoever gave it could write to it while it is read.
func copyOf[C any](c C) C {
	unshare(reflect.ValueOf(&c).Elem())
	return c
}

func unshare(v reflect.Value) {
	switch {
	case v.Kind() == reflect.Slice && !v.IsNil():
		s := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(s, v)
		v.Set(s)
		for i := range v.Len() {
			unshare(v.Index(i))
		}
	case v.Kind() == reflect.Pointer && !v.IsNil() && isConfig(v.Type().Elem()):
		p := reflect.New(v.Type().Elem())
		p.Elem().Set(v.Elem())
		v.Set(p)
		unshare(p.Elem())
	case isConfig(v.Type()):
		for i := range v.NumField() {
			unshare(v.Field(i))
		}
	}
}

// isConfig reports whether t is a struct whose fields are all exported: a configuration, and not
// a policy or a lock, which must not be copied.
func isConfig(t reflect.Type) bool {
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
