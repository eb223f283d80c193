// Package settings holds the configuration of a policy, and changes it while the policy runs.
package settings

import (
	"reflect"
	"sync"
	"sync/atomic"
)

// A Setting is the configuration of a policy: as it was given, and with its defaults filled in.
// It is safe for concurrent use and is not copied. Init makes it ready to use.
type Setting[C config] struct{ setting }

type config interface{ Validate() error }

// A setting is a Setting whose configurations are of type any, which stands for *C: what is
// written for any is not in a program once for each C.
type setting struct {
	now atomic.Pointer[version]
	mu  sync.Mutex // one change at a time
}

// A version is a configuration that never changes: as it was given, and with its defaults.
type version struct {
	given, filled any
	copy          copier
}

// A copier returns a copy that shares no slice with c, if fill is true with its defaults or the
// error of Validate.
type copier func(c any, fill bool) (any, error)

// Init sets the first configuration. It panics with the error of Validate, if there is one.
// fill returns a valid C with defaults in place of its zero fields. own puts copies in the place
// of the slices in a C: otherwise whoever gave a slice could write to it while it is read. Init
// must have returned before the Setting is used.
func (s *Setting[C]) Init(given C, fill func(C) C, own ...func(*C)) {
	s.init(&given, func(c any, filled bool) (any, error) {
		next := *c.(*C)
		for _, own := range own {
			own(&next)
		}
		if filled {
			if err := next.Validate(); err != nil {
				return nil, err
			}
			next = fill(next)
		}
		return &next, nil
	})
}

func (s *setting) init(given any, copy copier) {
	v := recent.like(given)
	if v == nil {
		var err error
		if v, err = newVersion(given, copy); err != nil {
			panic(err)
		}
		if same(given, given) {
			recent.add(v)
		}
	}
	s.now.Store(v)
}

// newVersion returns the version that given makes, if it is valid.
func newVersion(given any, copy copier) (*version, error) {
	given, _ = copy(given, false)
	filled, err := copy(given, true)
	return &version{given, filled, copy}, err
}

// recent has the last versions that Init made and that can be compared: policies that are made
// alike share one, so that a member of a Group does not take the memory of two configurations.
var recent versions

type versions struct {
	mu sync.Mutex
	of [16]*version
	n  int // that were added
}

func (r *versions) like(given any) *version {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, v := range r.of {
		if v != nil && same(v.given, given) {
			return v
		}
	}
	return nil
}

func (r *versions) add(v *version) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.of[r.n%len(r.of)] = v
	r.n++
}

// same reports whether what a and b point to is certainly the same: their fields are, by ==.
func same(a, b any) bool {
	if reflect.TypeOf(a) != reflect.TypeOf(b) {
		return false
	}
	v, w := reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem()
	for i := range v.NumField() {
		f, g := v.Field(i), w.Field(i)
		switch f.Kind() {
		case reflect.Func, reflect.Slice, reflect.Interface:
			if !f.IsNil() || !g.IsNil() {
				return false
			}
		case reflect.Struct: // may hold one of these
			return false
		default:
			if f.Interface() != g.Interface() {
				return false
			}
		}
	}
	return true
}

// Load returns the configuration with its defaults, by one atomic load. It must not be
// written to.
func (s *Setting[C]) Load() *C { return s.now.Load().filled.(*C) }

// Config returns a copy of the configuration with its defaults.
func (s *Setting[C]) Config() C {
	now := s.now.Load()
	c, _ := now.copy(now.filled, false)
	return *c.(*C)
}

// Update calls change with the configuration as it was given: a zero field means its default.
// What change makes of it is the configuration from now on, if it is valid and check allows it.
// check gets the configurations before and after, both with their defaults. follow is called
// with the new one before another Update begins. Both may be nil.
//
// If there is an error, or change panics, nothing has changed.
func (s *Setting[C]) Update(change func(*C), check func(was, next *C) error, follow func(*C)) error {
	return s.Change(false, func(c any) error { change(c.(*C)); return nil }, check, follow)
}

// Change is Update for a caller who does not know C: f gets a *C. Nothing changes if f returns
// an error, or if dry is true: then Change returns the error that it would return otherwise.
func (s *Setting[C]) Change(dry bool, f func(cfg any) error, check func(was, next *C) error, follow func(*C)) error {
	return s.change(dry, f,
		func(was, next any) error {
			if check == nil {
				return nil
			}
			return check(was.(*C), next.(*C))
		},
		func(next any) {
			if follow != nil {
				follow(next.(*C))
			}
		})
}

func (s *setting) change(dry bool, f func(any) error, check func(was, next any) error, follow func(any)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.now.Load()
	given, _ := was.copy(was.given, false)
	if err := f(given); err != nil {
		return err
	}
	next, err := newVersion(given, was.copy)
	if err != nil {
		return err
	}
	if err := check(was.filled, next.filled); err != nil || dry {
		return err
	}
	s.now.Store(next)
	follow(next.filled)
	return nil
}
