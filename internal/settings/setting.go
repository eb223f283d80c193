// Package settings holds the configuration of a policy, and changes it while the policy runs.
package settings

import (
	"reflect"
	"sync"
	"sync/atomic"
)

// A Setting is the configuration of a policy: as it was given, and with its defaults filled in.
// It is safe for concurrent use and is not copied. Init makes it ready to use.
type Setting[C config] struct {
	now atomic.Pointer[version[C]]
	mu  sync.Mutex // one change at a time
}

type config interface{ Validate() error }

// A version is a configuration that never changes: as it was given, and with its defaults.
type version[C config] struct {
	given, filled C
	fill          func(C) C
	cloners       []func(*C)
}

// clone returns c with copies in place of its slices: otherwise whoever gave or got a slice could
// write to it while it is read.
func (v *version[C]) clone(c C) C {
	for _, clone := range v.cloners {
		clone(&c)
	}
	return c
}

// next returns the version that given makes, if it is valid.
func (v *version[C]) next(given C) (*version[C], error) {
	if err := given.Validate(); err != nil {
		return nil, err
	}
	return &version[C]{v.clone(given), v.fill(v.clone(given)), v.fill, v.cloners}, nil
}

// Init sets the first configuration. It panics with the error of Validate, if there is one.
// fill returns a valid C with defaults in place of its zero fields. cloners put copies in the place
// of the slices in a C. Init must have returned before the Setting is used.
func (s *Setting[C]) Init(given C, fill func(C) C, cloners ...func(*C)) {
	v := recentLike(given)
	if v == nil {
		var err error
		if v, err = (&version[C]{fill: fill, cloners: cloners}).next(given); err != nil {
			panic(err)
		}
		addRecent(v)
	}
	s.now.Store(v)
}

// recent has the last versions that Init made and that can be compared: policies that are made
// alike share one, so that a member of a Group does not take the memory of two configurations.
var recent struct {
	mu       sync.Mutex
	versions [16]any // of *version[C]
	added    int
}

func recentLike[C config](given C) *version[C] {
	recent.mu.Lock()
	defer recent.mu.Unlock()
	for _, v := range recent.versions {
		if v, ok := v.(*version[C]); ok && same(reflect.ValueOf(v.given), reflect.ValueOf(given)) {
			return v
		}
	}
	return nil
}

func addRecent[C config](v *version[C]) {
	if given := reflect.ValueOf(v.given); !same(given, given) {
		return
	}
	recent.mu.Lock()
	defer recent.mu.Unlock()
	recent.versions[recent.added%len(recent.versions)] = v
	recent.added++
}

// same reports whether two structs of one type are certainly the same: their fields are zero, or
// equal by ==. Nobody can tell of functions and slices.
func same(a, b reflect.Value) bool {
	for i := range a.NumField() {
		f, g := a.Field(i), b.Field(i)
		zero := f.IsZero() && g.IsZero()
		if !zero && (!f.Comparable() || !g.Comparable() || !f.Equal(g)) {
			return false
		}
	}
	return true
}

// Load returns the configuration with its defaults, by one atomic load. It must not be
// written to.
func (s *Setting[C]) Load() *C { return &s.now.Load().filled }

// Config returns a copy of the configuration with its defaults.
func (s *Setting[C]) Config() C {
	now := s.now.Load()
	return now.clone(now.filled)
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
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.now.Load()
	given := was.clone(was.given)
	if err := f(&given); err != nil {
		return err
	}
	next, err := was.next(given)
	if err == nil && check != nil {
		err = check(&was.filled, &next.filled)
	}
	if err != nil || dry {
		return err
	}
	s.now.Store(next)
	if follow != nil {
		follow(&next.filled)
	}
	return nil
}
