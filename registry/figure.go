package registry

import (
	"fmt"
	"time"
)

// A FigureKind says how a [Figure] develops.
type FigureKind string

const (
	Counter FigureKind = "counter" // it only grows
	Gauge   FigureKind = "gauge"   // it rises and falls
)

// An Attr is one attribute of a [Figure].
type Attr struct {
	Key, Value string
}

// A Figure is one number that a policy shows, at one moment. Figures of the same Name
// have the same Unit, Help, Kind and keys of attributes, and may be added up over the
// policies of a program and the instances of a service, unless Help says otherwise.
type Figure struct {
	// Name is what the figure is called everywhere: "breaker.call.count".
	Name string
	// Unit is as in UCUM: "s" for seconds, "{call}" for calls, "1" for a share.
	Unit string
	// Help is one sentence on what the figure counts.
	Help string
	Kind FigureKind
	// Attrs tell figures of the same policy and Name apart.
	Attrs []Attr
	Value float64
}

// String returns the figure as a line: `breaker.call.count{outcome=failure} 17`.
func (f Figure) String() string {
	return fmt.Sprintf("%s %v", f.label(), f.Value)
}

// label returns the name with the attributes.
func (f Figure) label() string {
	s := f.Name
	for i, a := range f.Attrs {
		if i == 0 {
			s += "{"
		} else {
			s += ","
		}
		s += a.Key + "=" + a.Value
	}
	if len(f.Attrs) > 0 {
		s += "}"
	}
	return s
}

// emit takes one figure of a policy.
type emit func(Figure)

// counter, gauge and seconds emit one figure. Their attrs are keys and values in turn.
func (to emit) counter(name, unit, help string, n int64, attrs ...string) {
	to(Figure{Name: name, Unit: unit, Help: help, Kind: Counter, Attrs: pairs(attrs), Value: float64(n)})
}

func (to emit) gauge(name, unit, help string, v float64, attrs ...string) {
	to(Figure{Name: name, Unit: unit, Help: help, Kind: Gauge, Attrs: pairs(attrs), Value: v})
}

func (to emit) seconds(kind FigureKind, name, help string, d time.Duration, attrs ...string) {
	to(Figure{Name: name, Unit: "s", Help: help, Kind: kind, Attrs: pairs(attrs), Value: d.Seconds()})
}

func pairs(attrs []string) []Attr {
	var all []Attr
	for i := 0; i < len(attrs); i += 2 {
		all = append(all, Attr{attrs[i], attrs[i+1]})
	}
	return all
}
