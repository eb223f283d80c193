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

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
)

// Observe exports the metrics of the policies in reg until stop is called. Each time the SDK collects metrics, Observe
// reads the metrics of every policy once. Observe also records events of the policies, in histograms and as attributes
// of the current span.
//
// Observe counts as an observer, so leases and sagas no longer log warnings by themselves. Also add an observer that
// logs:
//
//	defer reg.Observe(registry.Log(slog.Default()))()
//
// Before Observe is called, add all policies to reg, and register all sagas of a Runner. Observe creates an instrument
// for each metric that the policies have when Observe is called. If a policy is added later, Observe exports only those
// of the policy's metrics that already have an instrument. A metric without an instrument is reported once to otel's
// error handler. Observe returns an error if the policies have no metrics, or if an instrument cannot be created.
//
// A counter is exported even while it is zero, because otherwise a rate in Prometheus would not include the counter's
// first increase. But a counter of a Group's member is exported only when it is no longer zero. If a policy is
// replaced by another policy with the same name, its counters start at zero again. Call Observe only once for each
// registry and MeterProvider: a second Observe would double the values.
func Observe(reg *registry.Registry, cfg Config) (stop func(), err error) {
	m := cfg.meter()
	o := &observation{reg: reg, keys: cfg.Keys, instruments: map[string]metric.Float64Observable{}}
	var all []metric.Observable
	for e := range reg.All() {
		for _, f := range e.Metrics() {
			made, err := o.create(m, f)
			if err != nil {
				return nil, err
			}
			all = append(all, made...)
		}
	}
	if len(all) == 0 {
		return nil, errors.New(
			"resilienceotel: registry has no policy with metrics: add the policies before Observe")
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

// Prefixes of the names of instruments. After the prefix, an instrument's name contains the name of the metric.
const (
	policyPrefix = namespace
	memberPrefix = namespace + "member."
)

// An observation is the state of one call to Observe.
type observation struct {
	reg         *registry.Registry
	keys        func(kind, name, key string) bool
	instruments map[string]metric.Float64Observable // instruments by name; nil for a metric that did not exist in Observe

	collecting sync.Mutex
	sources    map[source]map[string]exported // caches the attributes of each metric by its name
}

// A source is a policy or a member of a group.
type source struct{ prefix, kind, name, key string }

// exported has the instrument and the attributes with which a metric of a source is exported.
type exported struct {
	instrument metric.Float64Observable
	options    []metric.ObserveOption
}

// create creates the instruments for f that do not exist yet, and returns them.
func (o *observation) create(m metric.Meter, f policy.Metric) (made []metric.Observable, err error) {
	what, unit, _ := f.Parse()
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

// collect reports the values of all metrics to the SDK, which calls it for each collection.
func (o *observation) collect(_ context.Context, to metric.Observer) error {
	o.collecting.Lock()
	defer o.collecting.Unlock()
	sources := make(map[source]map[string]exported, len(o.sources)) // a new map, without removed policies
	export := func(s source, metrics []policy.Metric) {
		all := o.sources[s]
		if all == nil || len(all) > 2*len(metrics) { // limits the cache of a policy whose metrics change each time
			all = make(map[string]exported, len(metrics))
		}
		sources[s] = all
		for _, m := range metrics {
			if m.Counter && m.Value == 0 && s.key != "" {
				continue // a group may have many members
			}
			as, ok := all[m.Name]
			if !ok {
				as = o.export(s, m)
				all[m.Name] = as
			}
			if as.instrument != nil {
				to.ObserveFloat64(as.instrument, m.Value, as.options...)
			}
		}
	}
	for e := range o.reg.All() {
		export(source{prefix: policyPrefix, kind: e.Kind, name: e.Name}, e.Metrics())
		if o.keys == nil {
			continue
		}
		for _, m := range e.Worst(math.MaxInt) {
			if o.keys(e.Kind, e.Name, m.Key) {
				export(source{prefix: memberPrefix, kind: e.Kind, name: e.Name, key: m.Key}, m.Metrics())
			}
		}
	}
	o.sources = sources
	return nil
}

// export returns the instrument and the attributes with which the metric m of s is exported.
func (o *observation) export(s source, m policy.Metric) exported {
	what, _, attrs := m.Parse()
	i, known := o.instruments[s.prefix+what]
	if !known {
		o.instruments[s.prefix+what] = nil
		otel.Handle(fmt.Errorf(
			"resilienceotel: %s of %s/%s is not exported: no policy had this metric when Observe was called",
			s.prefix+what, s.kind, s.name))
	}
	kv := make([]attribute.KeyValue, 0, len(attrs)+2)
	for _, a := range attrs {
		kv = append(kv, attribute.String(namespace+a.Key, a.Value))
	}
	kv = append(kv, nameKey.String(s.name)) // last, because NewSet uses the last value of a key
	if s.key != "" {
		kv = append(kv, keyKey.String(s.key))
	}
	return exported{i, []metric.ObserveOption{metric.WithAttributeSet(attribute.NewSet(kv...))}}
}
