package registry

import (
	"strings"

	"github.com/go-resilience/resilience/internal/describe"
)

// A Figure is one number that a policy shows; a Counter only grows. The Name begins with the kind of
// the policy, has attributes in braces, and ends with the unit, "_seconds" or "_ratio", if it is not a
// number of things: "breaker.calls{outcome=failure}", "bulkhead.wait.time_seconds".
type Figure = describe.Figure

// An Attr is one attribute of a [Figure].
type Attr struct{ Key, Value string }

// Parse returns the parts of the Name of a [Figure]: what is counted, the unit ("s", "1" for a share,
// "" for a number of things), and the attributes.
func Parse(name string) (what, unit string, attrs []Attr) {
	what, braces, _ := strings.Cut(name, "{")
	for part := range strings.SplitSeq(strings.TrimSuffix(braces, "}"), ",") {
		key, value, ok := strings.Cut(part, "=")
		switch {
		case ok:
			attrs = append(attrs, Attr{key, value})
		case len(attrs) > 0: // a value with a comma
			attrs[len(attrs)-1].Value += "," + part
		}
	}
	if s, ok := strings.CutSuffix(what, "_seconds"); ok {
		return s, "s", attrs
	}
	if s, ok := strings.CutSuffix(what, "_ratio"); ok {
		return s, "1", attrs
	}
	return what, "", attrs
}
