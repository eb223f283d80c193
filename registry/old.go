package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
)

// The files old_*.go describe the patterns that do not describe themselves yet. Each is deleted
// when its pattern does, and this one with the last of them.

// oldReaders return the old reader of a policy, or nil.
var oldReaders []func(Policy) any

func oldReaderOf(p Policy) any {
	for _, reader := range oldReaders {
		if r := reader(p); r != nil {
			return r
		}
	}
	return nil
}

// An observed is a policy whose snapshots are S and whose events are E.
type observed[S, E any] interface {
	Policy
	Stats() S
	Observe(func(context.Context, E)) (stop func())
}

type oldReader[S, E any] struct {
	Policy  observed[S, E]
	kind    string
	figures func(S, emit)
	event   func(E) oldEvent
	health  func(S) *ailment // or nil
}

// read returns an oldReader of p, or nil if p is of another type.
func read[S, E any](p Policy, kind string, figures func(S, emit), event func(E) oldEvent, health func(S) *ailment) any {
	if o, ok := p.(observed[S, E]); ok {
		return &oldReader[S, E]{o, kind, figures, event, health}
	}
	return nil
}

func (o *oldReader[S, E]) Kind() string { return o.kind }

func (o *oldReader[S, E]) Figures() (all []Figure) {
	o.figures(o.Policy.Stats(), func(f Figure) { all = append(all, f) })
	return all
}

func (o *oldReader[S, E]) Health() error {
	if o.health != nil {
		if ill := o.health(o.Policy.Stats()); ill != nil {
			return ill
		}
	}
	return nil
}

func (o *oldReader[S, E]) Settings() any {
	config := reflect.ValueOf(o.Policy).MethodByName("Config")
	return config.Call(nil)[0].Interface()
}

func (o *oldReader[S, E]) Change(dry bool, f func(any) error) error {
	c, ok := o.Policy.(describe.Changer)
	if !ok {
		return errors.New("has settings that a process is started with, and none that can be changed")
	}
	return c.Change(dry, f)
}

func (o *oldReader[S, E]) ObserveAny(f func(context.Context, any)) (stop func()) {
	return o.Policy.Observe(func(ctx context.Context, e E) { f(ctx, o.event(e)) })
}

type oldEvent struct {
	what, key string
	level     slog.Level
	err       error
	attrs     []slog.Attr
}

func (e oldEvent) Level() int { return int(e.level) }

func (e oldEvent) Fields(yield func(string, any)) {
	yield("event", e.what)
	if e.key != "" {
		yield("key", e.key)
	}
	for _, a := range e.attrs {
		yield(a.Key, a.Value.Any())
	}
	yield("err", e.err)
}

func happened[K ~string](kind K, key string, err error, attrs ...slog.Attr) oldEvent {
	return oldEvent{what: string(kind), key: key, err: err, level: slog.LevelDebug, attrs: attrs}
}

// An ailment is what is wrong with a policy.
type ailment struct {
	state  string // "open"
	fails  bool   // calls fail because of it
	detail string
	err    error
}

func (e *ailment) Error() string {
	s := e.state
	if e.detail != "" {
		s += ": " + e.detail
	}
	if e.err != nil {
		s += ": " + fmt.Sprint(e.err)
	}
	return s
}

func (e *ailment) Unwrap() error        { return e.err }
func (e *ailment) HealthState() string  { return e.state }
func (e *ailment) HealthDetail() string { return e.detail }
func (e *ailment) Failed() bool         { return e.fails }

// emit takes one figure of a policy.
type emit func(Figure)

func (to emit) emit(name, unit string, counter bool, v float64, attrs []Attr) {
	switch unit {
	case "s":
		name += "_seconds"
	case "1":
		name = strings.TrimSuffix(name, ".ratio") + "_ratio"
	}
	for i, a := range attrs {
		name += [...]string{"{", ","}[min(i, 1)] + a.Key + "=" + a.Value
	}
	if len(attrs) > 0 {
		name += "}"
	}
	to(Figure{Name: name, Counter: counter, Value: v})
}

func (to emit) counter(name, unit, _ string, n int64, attrs ...Attr) {
	to.emit(name, unit, true, float64(n), attrs)
}

func (to emit) gauge(name, unit, _ string, v float64, attrs ...Attr) {
	to.emit(name, unit, false, v, attrs)
}

func (to emit) seconds(counter bool, name, _ string, d time.Duration, attrs ...Attr) {
	to.emit(name, "s", counter, d.Seconds(), attrs)
}
