// Package settings stores the configuration of a policy, and changes the configuration while the policy runs.
package settings

import (
	"reflect"
	"sync"
	"sync/atomic"
)

// A Setting is the configuration of a policy. It stores both the given configuration and the configuration with
// defaults filled in. It is safe for concurrent use and must not be copied. Call Init before any other method.
type Setting[C config] struct {
	now atomic.Pointer[version[C]]
	mu  sync.Mutex // serializes changes
}

type config interface{ Validate() error }

// A version holds an immutable configuration twice: the given configuration, and the configuration with defaults
// filled in.
type version[C config] struct {
	given, filled C
	fill          func(C) C
	cloners       []func(*C)
}

// clone returns c with copies of its slices. Without the copies, the caller that passed or received a slice could
// write to the slice while a policy reads it.
func (v *version[C]) clone(c C) C {
	for _, clone := range v.cloners {
		clone(&c)
	}
	return c
}

// next returns the version for given, or the error of given.Validate.
func (v *version[C]) next(given C) (*version[C], error) {
	if err := given.Validate(); err != nil {
		return nil, err
	}
	return &version[C]{v.clone(given), v.fill(v.clone(given)), v.fill, v.cloners}, nil
}

// shown returns the configuration that Update passes to change. Defaults are filled in, except for functions. A
// function that was not given is nil.
func (v *version[C]) shown() C {
	c := v.clone(v.filled)
	copyFuncs(reflect.ValueOf(&c).Elem(), reflect.ValueOf(&v.given).Elem())
	return c
}

// Init sets the first configuration. If given.Validate returns an error, Init panics with this error. fill returns
// its argument with defaults filled in for zero fields; the result must be valid. Each of cloners replaces slices in
// its argument by copies.
func (s *Setting[C]) Init(given C, fill func(C) C, cloners ...func(*C)) {
	v, err := (&version[C]{fill: fill, cloners: cloners}).next(given)
	if err != nil {
		panic(err)
	}
	s.now.Store(v)
}

// Load returns the configuration with its defaults. It costs one atomic load. The caller must not write to the
// result.
func (s *Setting[C]) Load() *C { return &s.now.Load().filled }

// Config returns a copy of the configuration with its defaults.
func (s *Setting[C]) Config() C {
	now := s.now.Load()
	return now.clone(now.filled)
}

// Update calls change with the effective configuration, in which defaults are filled in. If the result is valid and
// check allows it, the result becomes the configuration. A field that change does not alter retains its given value.
// If no value was given, the field continues to follow its default.
//
// check receives the configurations before and after the change, both with their defaults. follow receives the new
// configuration with its defaults, before another Update starts. Both functions may be nil. If Update returns an
// error, or if change panics, nothing has changed.
func (s *Setting[C]) Update(change func(*C), check func(was, next *C) error, follow func(*C)) error {
	return s.apply(false, func(was *version[C]) (C, error) {
		shown := was.shown()
		next := was.clone(shown)
		change(&next)
		given := was.clone(was.given)
		keepGiven(reflect.ValueOf(&next).Elem(), reflect.ValueOf(&shown).Elem(), reflect.ValueOf(&given).Elem())
		return next, nil
	}, check, follow)
}

// Change is like Update, but calls change with a *C that contains the given configuration. In this C, a zero field
// means its default, so a settings file can restore a default. If change returns an error, nothing changes. If
// dryRun is true, nothing changes either, but Change returns the same error as without dryRun.
func (s *Setting[C]) Change(
	dryRun bool, change func(cfg any) error, check func(was, next *C) error, follow func(*C),
) error {
	return s.apply(dryRun, func(was *version[C]) (C, error) {
		next := was.clone(was.given)
		err := change(&next)
		return next, err
	}, check, follow)
}

func (s *Setting[C]) apply(
	dryRun bool, change func(was *version[C]) (C, error), check func(was, next *C) error, follow func(*C),
) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.now.Load()
	given, err := change(was)
	if err != nil {
		return err
	}
	next, err := was.next(given)
	if err == nil && check != nil {
		err = check(&was.filled, &next.filled)
	}
	if err != nil || dryRun {
		return err
	}
	s.now.Store(next)
	if follow != nil {
		follow(&next.filled)
	}
	return nil
}

// copyFuncs sets the functions in c to the functions in given. Update must not pass a default function to change:
// functions cannot be compared, so Update could not distinguish the default from a function that change has set.
func copyFuncs(c, given reflect.Value) {
	for i := range c.NumField() {
		switch f := c.Field(i); {
		case f.Kind() == reflect.Func:
			f.Set(given.Field(i))
		case isOpenStruct(f.Type()):
			copyFuncs(f, given.Field(i))
		}
	}
}

// keepGiven sets each field of next that equals the same field of shown to the value of the field in given. It skips
// functions, because the functions in shown are already the functions in given.
func keepGiven(next, shown, given reflect.Value) {
	for i := range next.NumField() {
		switch f := next.Field(i); {
		case f.Kind() == reflect.Func:
		case isOpenStruct(f.Type()):
			keepGiven(f, shown.Field(i), given.Field(i))
		case equal(f, shown.Field(i)):
			f.Set(given.Field(i))
		}
	}
}

// isOpenStruct reports whether t is a struct that has only exported fields. Each field of such a struct can be set.
func isOpenStruct(t reflect.Type) bool {
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

// equal compares values by ==, and slices and maps element by element. Two separate errors with the same text
// are not equal. Values that cannot be compared are never equal.
func equal(a, b reflect.Value) bool {
	switch a.Kind() {
	case reflect.Slice:
		if a.Len() != b.Len() {
			return false
		}
		for i := range a.Len() {
			if !equal(a.Index(i), b.Index(i)) {
				return false
			}
		}
		return true
	case reflect.Map:
		if a.Len() != b.Len() {
			return false
		}
		for _, key := range a.MapKeys() {
			if other := b.MapIndex(key); !other.IsValid() || !equal(a.MapIndex(key), other) {
				return false
			}
		}
		return true
	}
	return a.Comparable() && b.Comparable() && a.Equal(b)
}
