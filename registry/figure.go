package registry

import "fmt"

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
