package resilienceotel

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/go-resilience/resilience/registry"
)

// Observe shows the policies of reg as metrics until stop is called. Each collection reads the
// figures of every policy once. Events of the policies feed the histograms and become attributes of
// the span that is current.
//
// Add the policies first, and register the sagas of a Runner: an instrument is made for each figure
// that there is at the time of Observe. A policy that is added later is shown as far as its figures
// are those of a policy that was there; otel's error handler is told of any other figure, once. It is
// an error if there is no figure.
//
// A counter appears with its first count, as other counters of OpenTelemetry do. If a policy
// is replaced by another with its name, its counters begin anew. A registry is observed once for a
// MeterProvider: a second time, its numbers would be added up.
func Observe(reg *registry.Registry, cfg Config) (stop func(), err error) {
	m := cfg.meter()
	o := &observation{reg: reg, keys: cfg.Keys, instruments: map[string]metric.Float64Observable{}}
	var all []metric.Observable
	for e := range reg.All() {
		for _, f := range e.Figures() {
			made, err := o.announce(m, f)
			if err != nil {
				return nil, err
			}
			all = append(all, made...)
		}
	}
	if len(all) == 0 {
		return nil, errors.New(
			"resilienceotel: the registry has no policy with figures: add the policies before Observe")
	}
	callback, err := m.RegisterCallback(o.collect, all...)
	if err != nil {
		return nil, err
	}
	unobserve := reg.Observe(newRecorder(m, cfg.Keys).event)
	return sync.OnceFunc(func() {
		unobserve()
		if err := callback.Unregister(); err != nil {
			otel.Handle(err)
		}
	}), nil
}

// Instruments are named by the figure, with one of these in front.
const (
	policyPrefix = namespace
	memberPrefix = namespace + "member."
)

// An observation is what one Observe has made.
type observation struct {
	reg         *registry.Registry
	keys        func(kind, name, key string) bool
	instruments map[string]metric.Float64Observable // by name; nil for a figure that came too late

	collecting sync.Mutex
	sources    map[source]map[string]shown // by name of the figure; it saves making the attributes again
}

// A source is a policy, or a member of a Group.
type source struct{ prefix, kind, name, key string }

// shown is how a figure of a source is shown.
type shown struct {
	instrument metric.Float64Observable
	options    []metric.ObserveOption
}

// announce makes the instruments of a figure that has none.
func (o *observation) announce(m metric.Meter, f registry.Figure) (made []metric.Observable, err error) {
	what, unit, _ := registry.Parse(f.Name)
	prefixes := []string{policyPrefix, memberPrefix}
	if o.keys == nil {
		prefixes = prefixes[:1]
	}
	for _, prefix := range prefixes {
		name := prefix + what
		if o.instruments[name] != nil {
			continue
		}
		var i metric.Float64Observable
		if f.Counter {
			i, err = m.Float64ObservableCounter(name, metric.WithUnit(unit))
		} else {
			i, err = m.Float64ObservableGauge(name, metric.WithUnit(unit))
		}
		if err != nil {
			return nil, err
		}
		o.instruments[name] = i
		made = append(made, i)
	}
	return made, nil
}

func (o *observation) collect(_ context.Context, to metric.Observer) error {
	o.collecting.Lock()
	defer o.collecting.Unlock()
	sources := make(map[source]map[string]shown, len(o.sources)) // without those that have gone
	show := func(s source, figures []registry.Figure) {
		all := o.sources[s]
		if all == nil || len(all) > 2*len(figures) { // it may show others each time
			all = make(map[string]shown, len(figures))
		}
		sources[s] = all
		for _, f := range figures {
			if f.Counter && f.Value == 0 {
				continue
			}
			as, ok := all[f.Name]
			if !ok {
				as = o.show(s, f.Name)
				all[f.Name] = as
			}
			if as.instrument != nil {
				to.ObserveFloat64(as.instrument, f.Value, as.options...)
			}
		}
	}
	for e := range o.reg.All() {
		show(source{prefix: policyPrefix, kind: e.Kind, name: e.Name}, e.Figures())
		if o.keys == nil {
			continue
		}
		for _, m := range e.Members(math.MaxInt) {
			if m.Policy != nil && o.keys(e.Kind, e.Name, m.Key) {
				show(source{prefix: memberPrefix, kind: e.Kind, name: e.Name, key: m.Key}, m.Figures())
			}
		}
	}
	o.sources = sources
	return nil
}

// show returns how a figure is shown.
func (o *observation) show(s source, figure string) shown {
	what, _, attrs := registry.Parse(figure)
	i, known := o.instruments[s.prefix+what]
	if !known {
		o.instruments[s.prefix+what] = nil
		otel.Handle(fmt.Errorf(
			"resilienceotel: %s of %s/%s is not shown: no policy had this figure when Observe was called",
			s.prefix+what, s.kind, s.name))
	}
	kv := make([]attribute.KeyValue, 0, len(attrs)+2)
	for _, a := range attrs {
		kv = append(kv, attribute.String(namespace+a.Key, a.Value))
	}
	kv = append(kv, nameKey.String(s.name)) // the last of a key wins
	if s.key != "" {
		kv = append(kv, keyKey.String(s.key))
	}
	return shown{i, []metric.ObserveOption{metric.WithAttributeSet(attribute.NewSet(kv...))}}
}
