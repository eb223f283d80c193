package bulkhead

import "github.com/go-resilience/resilience/internal/invalid"

// Adaptive says how a [Bulkhead] finds its limit by itself.
type Adaptive struct {
	Initial   int     // the first limit; zero means 20, within Min and Max
	Min, Max  int     // what the limit may be; zero means 1 and 1000
	Tolerance float64 // latency above that of an idle server which is no overload, as a part of it; zero means 0.25
}

func (a Adaptive) withDefaults() Adaptive {
	if a.Min == 0 {
		a.Min = 1
	}
	if a.Max == 0 {
		a.Max = max(1000, a.Min)
	}
	if a.Initial == 0 {
		a.Initial = min(max(20, a.Min), a.Max)
	}
	if a.Tolerance == 0 {
		a.Tolerance = 0.25
	}
	return a
}

func (a Adaptive) validate(f *invalid.Fields) {}
