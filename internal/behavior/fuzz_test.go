package behavior_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A node is an error that says one thing, and what it wraps or joins.
type node struct {
	says  byte // one of the words below, or nothing
	value int
	joins bool
	parts []*node
}

const (
	sayRefused = iota
	sayAnswered
	sayRetryable
	sayAfter
	sayThrottled
	sayNothing
)

// grow reads a tree of errors from data.
func grow(data *[]byte, depth int) *node {
	if len(*data) == 0 || depth == 0 {
		return &node{says: sayNothing}
	}
	b := (*data)[0]
	*data = (*data)[1:]
	n := &node{says: b % 6, value: int(b >> 6)}
	switch b / 6 % 4 {
	case 0: // wraps nothing
	case 1:
		n.joins = true
		n.says = sayNothing
		for range 1 + b>>6 {
			n.parts = append(n.parts, grow(data, depth-1))
		}
	default:
		n.parts = []*node{grow(data, depth-1)}
	}
	return n
}

func (n *node) err() error {
	if n.joins {
		var errs []error
		for _, part := range n.parts {
			errs = append(errs, part.err(), nil)
		}
		return &several{errs}
	}
	inner := of(nil)
	if len(n.parts) == 1 {
		inner = of(n.parts[0].err())
	}
	switch n.says {
	case sayRefused:
		return refused{inner, n.value%2 == 1}
	case sayAnswered:
		return answered{inner, n.value%2 == 1}
	case sayRetryable:
		return retryable{inner, n.value%2 == 1}
	case sayAfter:
		return after{inner, time.Duration(n.value - 1)}
	case sayThrottled:
		return throttled{inner}
	}
	return inner
}

// decides returns the node that answers for w: the outermost that says it. Of a join it is
// asked of the first part that says anything, without those refused beside one that was not.
func (n *node) decides(w byte) *node {
	for n != nil {
		switch {
		case n.joins:
			n = n.first()
			continue
		case n.says == w:
			return n
		case len(n.parts) == 0:
			return nil
		}
		n = n.parts[0]
	}
	return nil
}

func (n *node) first() *node {
	all := !slices.ContainsFunc(n.parts, func(p *node) bool { return !p.refused() })
	for _, p := range n.parts {
		if p.saysAnything() && (all || !p.refused()) {
			return p
		}
	}
	return nil
}

// after returns the RetryAfter of n: of an error and what it wraps, the outermost one's; of a join, the longest,
// without the parts that were refused beside one that was not.
func (n *node) after() (longest time.Duration) {
	switch {
	case n.joins:
		all := !slices.ContainsFunc(n.parts, func(p *node) bool { return !p.refused() })
		for _, p := range n.parts {
			if all || !p.refused() {
				longest = max(longest, p.after())
			}
		}
	case n.says == sayAfter:
		longest = max(0, time.Duration(n.value-1))
	case len(n.parts) > 0:
		longest = n.parts[0].after()
	}
	return longest
}

func (n *node) saysAnything() bool {
	if n.joins {
		return n.first() != nil
	}
	return n.says != sayNothing || slices.ContainsFunc(n.parts, (*node).saysAnything)
}

func (n *node) refused() bool {
	said := n.decides(sayRefused)
	return said != nil && said.value%2 == 1
}

func (n *node) kind() behavior.Kind {
	answered := n.decides(sayAnswered)
	switch {
	case n.refused():
		return behavior.Refused
	case answered != nil && answered.value%2 == 1:
		return behavior.Answered
	}
	return behavior.Failed
}

func FuzzRead(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{67, 55, 48})  // marked as an answer, of a join of what was not refused
	f.Add([]byte{12, 67, 66})  // not refused, after all, of an answer that was refused
	f.Add([]byte{37, 159, 67}) // no answer, after all, with a time
	f.Fuzz(func(t *testing.T, data []byte) {
		tree := grow(&data, 12)
		want := behavior.End{Kind: tree.kind()}
		want.Retryable = want.Kind != behavior.Answered
		if said := tree.decides(sayRetryable); said != nil {
			want.Retryable = said.value%2 == 1
		}
		want.RetryAfter = tree.after()
		want.Throttled = tree.decides(sayThrottled) != nil
		require.Equal(t, want, behavior.Read(tree.err()))
	})
}
