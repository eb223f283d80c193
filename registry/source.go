package registry

import (
	"context"
	"errors"
	"iter"
	"reflect"
	"slices"
	"sync/atomic"
	"time"
)

// A source is what a registry asks of a policy.
type source struct {
	figures func(emit)
	members func(n int) []Member // nil: the policy is no Group
	observe func(func(context.Context, Event)) (stop func())
	config  func() reflect.Value // nil: there are no settings
	of      reflect.Type         // of config
	// change calls f with a pointer to the Config. A dry one changes nothing.
	change func(dry bool, f func(config any) error) error

	added time.Time // to the registry, or made
	stop  func()    // of the observing, while the registry has an observer
}

// An observed is a policy whose snapshots are S and whose events are E.
type observed[S, E any] interface {
	Policy
	Stats() S
	Observe(func(context.Context, E)) (stop func())
}

// of returns the entry of a policy.
func of[S, E any](kind string, p observed[S, E], figures func(S, emit), event func(E) Event) (Entry, bool) {
	name := p.Name()
	s := &source{
		added:   time.Now(),
		figures: func(to emit) { figures(p.Stats(), to) },
		observe: func(f func(context.Context, Event)) (stop func()) {
			return p.Observe(func(ctx context.Context, own E) {
				e := event(own)
				e.Kind, e.Name, e.Source = kind, name, own
				f(ctx, e)
			})
		},
	}
	s.settings(p)
	return Entry{Kind: kind, Name: name, Policy: p, source: s}, true
}

// other returns the entry of a policy that this package does not know.
func other(p Policy) (Entry, bool) {
	kinded, ok := p.(interface{ Kind() string })
	if !ok {
		return Entry{}, false
	}
	far := new(foreigner)
	kind, noKind := ask(far, kinded.Kind)
	name, noName := ask(far, p.Name)
	if noKind != nil || noName != nil {
		return Entry{}, false
	}
	s := &source{
		added:   time.Now(),
		figures: func(emit) {},
		observe: func(func(context.Context, Event)) func() { return func() {} },
	}
	if f, ok := p.(interface{ Figures() iter.Seq[Figure] }); ok {
		s.figures = func(to emit) {
			all, _ := ask(far, func() []Figure { return slices.Collect(f.Figures()) })
			for _, f := range all {
				to(f)
			}
		}
	}
	if o, ok := p.(interface {
		Observe(func(context.Context, Event)) func()
	}); ok {
		s.observe = func(f func(context.Context, Event)) func() {
			stop, err := ask(far, func() func() {
				return o.Observe(func(ctx context.Context, e Event) {
					e.Kind, e.Name = kind, name
					f(ctx, e)
				})
			})
			return func() {
				if err == nil {
					_, _ = ask(far, func() any { stop(); return nil })
				}
			}
		}
	}
	s.settings(p)
	s.guard(far)
	return Entry{Kind: kind, Name: name, Policy: p, source: s}, true
}

// guard makes the settings those of a policy of other origin. While it does not say what its
// Config is, that is what it was last.
func (s *source) guard(far *foreigner) {
	if s.config == nil {
		return
	}
	config, change := s.config, s.change
	var last atomic.Pointer[reflect.Value]
	s.config = func() reflect.Value {
		now, err := ask(far, config)
		switch was := last.Load(); {
		case err == nil:
			last.Store(&now)
		case was != nil:
			now = *was
		default:
			now = reflect.New(s.of).Elem()
		}
		c := reflect.New(s.of).Elem() // of the caller's own
		c.Set(now)
		return c
	}
	s.change = func(dry bool, f func(any) error) error {
		err, failed := ask(far, func() error { return change(dry, f) })
		return errors.Join(err, failed)
	}
}

// settings finds the methods Config and Change, or Update, of p. Their types differ from policy to
// policy, and those of a Group from key type to key type.
func (s *source) settings(p Policy) {
	v := reflect.ValueOf(p)
	config, update := v.MethodByName("Config"), v.MethodByName("Update")
	if !config.IsValid() || !update.IsValid() {
		return
	}
	ct, ut := config.Type(), update.Type()
	if ct.NumIn() != 0 || ct.NumOut() != 1 || ct.Out(0).Kind() != reflect.Struct ||
		ut != reflect.FuncOf([]reflect.Type{changer(ct.Out(0))}, []reflect.Type{reflect.TypeFor[error]()}, false) {
		return
	}
	s.of = ct.Out(0)
	s.config = func() reflect.Value {
		c := reflect.New(ct.Out(0)).Elem() // addressable
		c.Set(config.Call(nil)[0])
		return c
	}
	if p, ok := p.(interface {
		Change(bool, func(any) error) error
	}); ok {
		s.change = p.Change
		return
	}
	s.change = func(dry bool, change func(any) error) error {
		if dry {
			next := s.config()
			if err := change(next.Addr().Interface()); err != nil {
				return err
			}
			if v, ok := next.Interface().(interface{ Validate() error }); ok {
				return v.Validate()
			}
			return nil
		}
		var failed error
		f := reflect.MakeFunc(changer(s.of), func(args []reflect.Value) []reflect.Value {
			failed = change(args[0].Interface())
			return nil
		})
		err, _ := update.Call([]reflect.Value{f})[0].Interface().(error)
		return errors.Join(failed, err)
	}
}

// changer returns the type func(*C).
func changer(config reflect.Type) reflect.Type {
	return reflect.FuncOf([]reflect.Type{reflect.PointerTo(config)}, nil, false)
}
