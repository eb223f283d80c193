package registry

import (
	"fmt"
	"strings"
	"time"
)

// An Attr is one attribute of a [Figure].
type Attr struct {
	Key, Value string
}

// A Figure is one number that a policy shows, at one moment. Figures of the same Name
// have the same Unit, Help, Counter, Additive and keys of attributes.
type Figure struct {
	// Name is what the figure is called everywhere: "breaker.calls". It is in the plural if
	// the figure counts things, with a Unit such as "{call}".
	Name string
	// Unit is as in UCUM: "s" for seconds, "{call}" for calls, "1" for a share.
	Unit string
	// Help says what the figure counts, and whether it is not to be added up.
	Help string
	// Counter says that the value only grows. Otherwise it rises and falls.
	Counter bool
	// Attrs tell figures of the same policy and Name apart. Values that are constants are
	// in snake_case: "half_open". Figures may share Attrs: do not change them. The keys
	// "name" and "key" are taken: resilienceotel shows the policy and its member by them.
	Attrs []Attr
	Value float64
	// Additive says that figures of several policies, or of several instances of a
	// service, may be added up. All counters are additive; a share or an age is not.
	Additive bool
}

// String returns the figure as a line: `breaker.calls{outcome=failure} 17`.
func (f Figure) String() string {
	return fmt.Sprintf("%s %v", f.path(), f.Value)
}

// path returns the name with the attributes.
func (f Figure) path() string {
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

// counter, gauge, alone and seconds emit one figure.
func (to emit) counter(name, unit, help string, n int64, attrs ...Attr) {
	to(Figure{Name: name, Unit: unit, Help: help, Counter: true, Attrs: attrs, Value: float64(n), Additive: true})
}

func (to emit) gauge(name, unit, help string, v float64, attrs ...Attr) {
	to(Figure{Name: name, Unit: unit, Help: help, Attrs: attrs, Value: v, Additive: unit != "1"})
}

// alone emits a gauge that is not additive.
func (to emit) alone(name, unit, help string, v float64, attrs ...Attr) {
	to(Figure{Name: name, Unit: unit, Help: help, Attrs: attrs, Value: v})
}

func (to emit) seconds(counter bool, name, help string, d time.Duration, attrs ...Attr) {
	to(Figure{Name: name, Unit: "s", Help: help, Counter: counter, Attrs: attrs, Value: d.Seconds(), Additive: counter})
}

// label returns the text of a constant as the value of an attribute, in snake_case:
// "half_open".
func label[T ~string](text T) string { return snakeCase.Replace(string(text)) }

var snakeCase = strings.NewReplacer(" ", "_", "-", "_")

var admitted = []Attr{{"outcome", "admitted"}, {"reason", ""}}

// A refusal is a reason for refusals, and the attributes of the calls that were refused for it.
type refusal[R ~string] struct {
	reason R
	attrs  []Attr
}

// refusals returns a refusal for each reason. They are made once, since a collection of metrics
// reads the figures of every policy.
func refusals[R ~string](reasons ...R) (all []refusal[R]) {
	for _, reason := range reasons {
		all = append(all, refusal[R]{reason, []Attr{{"outcome", "refused"}, {"reason", label(reason)}}})
	}
	return all
}
