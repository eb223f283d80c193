package resilienceotel

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/go-resilience/resilience/registry"
)

// Observe shows the policies of reg as metrics, those added later included, until stop is
// called. Each collection reads the figures of every policy once. Events of the policies
// feed the histograms and become attributes of the span that is current.
//
// A counter appears with its first count, as other counters of OpenTelemetry do. If a policy
// is replaced by another with its name, its counters begin anew.
//
// A registry is observed once for a MeterProvider: a second time, its numbers would be
// added up. A figure that no policy had at the time of Observe appears from the second
// collection on that finds it.
func Observe(reg *registry.Registry, cfg Config) (stop func(), err error) {
	o := &observation{reg: reg, keys: cfg.Keys, meter: cfg.meter(), known: map[string]bool{}}
	var figures []registry.Figure
	for e := range reg.All() {
		figures = append(figures, e.Figures()...)
	}
	if err := o.announce(figures); err != nil {
		o.stop()
		return nil, err
	}
	unobserve := reg.Observe(newRecorder(o.meter, cfg.Keys).event)
	return sync.OnceFunc(func() {
		unobserve()
		o.stop()
	}), nil
}

// An observation is what one Observe has made.
type observation struct {
	reg   *registry.Registry
	keys  func(kind, name, key string) bool
	meter metric.Meter

	// changing is held while instruments are made, which waits for a collection to end.
	changing   sync.Mutex
	collectors []metric.Registration
	stopped    bool

	mu    sync.Mutex
	known map[string]bool // names of figures that have an instrument
}

// add reports whether a figure had no instrument, and notes that it has one.
func (o *observation) add(figure string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	had := o.known[figure]
	o.known[figure] = true
	return !had
}

func (o *observation) has(figure string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.known[figure]
}

// Instruments are named by the figure, with one of these in front.
const (
	ofPolicy = namespace
	ofMember = namespace + "member."
)

// announce makes the instruments of figures that have none, and a collector that reads
// them. The API has no way to add an instrument to a collector that is registered.
func (o *observation) announce(figures []registry.Figure) error {
	o.changing.Lock()
	defer o.changing.Unlock()
	if o.stopped {
		return nil
	}
	c := &collector{observation: o, first: len(o.collectors) == 0, instruments: map[string]metric.Float64Observable{}, policies: map[policy]*series{}}
	var all []metric.Observable
	var errs []error
	if c.first { // a meter calls nobody back without an instrument, and this one looks for new figures
		i, err := instrument(o.meter, ofPolicy+"policies", "", false)
		errs = append(errs, err)
		all = append(all, i)
	}
	for _, f := range figures {
		what, unit, _ := registry.Parse(f.Name)
		if !o.add(what) {
			continue
		}
		prefixes := []string{ofPolicy, ofMember}
		if o.keys == nil {
			prefixes = prefixes[:1]
		}
		for _, prefix := range prefixes {
			i, err := instrument(o.meter, prefix+what, unit, f.Counter)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			c.instruments[prefix+what] = i
			all = append(all, i)
		}
	}
	if len(all) > 0 {
		r, err := o.meter.RegisterCallback(c.collect, all...)
		if err == nil {
			o.collectors = append(o.collectors, r)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// instrument returns the instrument of a figure.
func instrument(m metric.Meter, name, unit string, counter bool) (metric.Float64Observable, error) {
	if counter {
		return m.Float64ObservableCounter(name, metric.WithUnit(unit))
	}
	return m.Float64ObservableGauge(name, metric.WithUnit(unit))
}

func (o *observation) stop() {
	o.changing.Lock()
	defer o.changing.Unlock()
	o.stopped = true
	for _, r := range o.collectors {
		if err := r.Unregister(); err != nil {
			otel.Handle(err)
		}
	}
}

// A collector reads the figures for some instruments, once in each collection of each
// reader.
type collector struct {
	*observation
	first       bool // it looks for figures that have no instrument yet
	instruments map[string]metric.Float64Observable

	reading  sync.Mutex
	policies map[policy]*series
	round    int
}

type policy struct{ prefix, kind, name, key string }

// A series is what a policy showed in the collection before, in that order. It saves making
// the attributes again.
type series struct {
	shown []shown
	round int // of the collector, when it was read last
}

// shown is one figure of a policy, with its instrument, if that is the collector's.
type shown struct {
	figure     string // its Name
	what       string // without unit and attributes
	instrument metric.Float64Observable
	options    []metric.ObserveOption
}

// find returns what was shown of a figure, and moves it to the place n.
func (s *series) find(n int, f *registry.Figure) *shown {
	for i := n; i < len(s.shown); i++ {
		if as := &s.shown[i]; as.figure == f.Name {
			s.shown[n], s.shown[i] = s.shown[i], s.shown[n]
			return &s.shown[n]
		}
	}
	s.shown = slices.Insert(s.shown, n, shown{figure: f.Name})
	return &s.shown[n]
}

func (c *collector) collect(_ context.Context, to metric.Observer) error {
	c.reading.Lock()
	defer c.reading.Unlock()
	c.round++
	var unknown []registry.Figure
	for e := range c.reg.All() {
		unknown = c.read(to, policy{prefix: ofPolicy, kind: e.Kind, name: e.Name}, e.Figures(), unknown)
		if c.keys == nil {
			continue
		}
		for _, m := range e.Members(math.MaxInt) {
			if m.Policy != nil && c.keys(e.Kind, e.Name, m.Key) {
				unknown = c.read(to, policy{ofMember, e.Kind, e.Name, m.Key}, m.Figures(), unknown)
			}
		}
	}
	maps.DeleteFunc(c.policies, func(_ policy, s *series) bool { return s.round != c.round })
	if len(unknown) > 0 && c.first {
		// The provider holds its lock meanwhile.
		go func() {
			if err := c.announce(unknown); err != nil {
				otel.Handle(err)
			}
		}()
	}
	return nil
}

// read observes the figures of a policy, and appends those without an instrument to
// unknown.
func (c *collector) read(to metric.Observer, p policy, figures []registry.Figure, unknown []registry.Figure) []registry.Figure {
	s := c.policies[p]
	if s == nil {
		s = &series{}
		c.policies[p] = s
	}
	s.round = c.round
	n := 0
	for _, f := range figures {
		as := s.find(n, &f)
		n++
		if f.Counter && f.Value == 0 {
			continue
		}
		if as.options == nil {
			var attrs []registry.Attr
			as.what, _, attrs = registry.Parse(f.Name)
			as.instrument, as.options = c.instruments[p.prefix+as.what], attributes(p, attrs)
		}
		if as.instrument != nil {
			to.ObserveFloat64(as.instrument, f.Value, as.options...)
		} else if c.first && !c.has(as.what) {
			unknown = append(unknown, f)
		}
	}
	clear(s.shown[n:])
	s.shown = s.shown[:n]
	return unknown
}

func attributes(p policy, attrs []registry.Attr) []metric.ObserveOption {
	var kv []attribute.KeyValue
	for _, a := range attrs {
		kv = append(kv, attribute.String(namespace+a.Key, a.Value))
	}
	kv = append(kv, nameKey.String(p.name)) // the last of a key wins
	if p.key != "" {
		kv = append(kv, keyKey.String(p.key))
	}
	return []metric.ObserveOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}
