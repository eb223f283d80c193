// Package figures has what the policies of package throttle and its rooms show alike.
package figures

import (
	"strings"

	"github.com/go-resilience/resilience/internal/describe"
)

// Counter returns a figure that only grows.
func Counter[N int64 | float64](name string, n N) describe.Figure {
	return describe.Figure{Name: "throttle." + name, Counter: true, Value: float64(n)}
}

// Calls returns the figures of calls, by outcome and the reasons of a policy.
func Calls[Reason ~string](admitted int64, refusals map[Reason]int64, reasons ...Reason) []describe.Figure {
	all := []describe.Figure{Counter("calls{outcome=admitted}", admitted)}
	for _, r := range reasons {
		all = append(all, Counter("calls{outcome=refused,reason="+strings.ReplaceAll(string(r), " ", "_")+"}", refusals[r]))
	}
	return all
}
