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

// word returns the outermost node that says w, or else the join that the chain ends in.
func (n *node) word(w byte) (said, join *node) {
	for {
		switch {
		case n.joins:
			return nil, n
		case n.says == w:
			return n, nil
		case len(n.parts) == 0:
			return nil, nil
		}
		n = n.parts[0]
	}
}

func (n *node) refused() bool {
	said, join := n.word(sayRefused)
	if said != nil {
		return said.value%2 == 1
	}
	return join != nil && !slices.ContainsFunc(join.parts, func(p *node) bool { return !p.refused() })
}

func (n *node) answered() bool {
	said, join := n.word(sayAnswered)
	if said != nil {
		return said.value%2 == 1
	}
	return join != nil && slices.ContainsFunc(join.parts, func(p *node) bool { return p.kind() == behavior.Answered }) &&
		!slices.ContainsFunc(join.parts, func(p *node) bool { return p.kind() == behavior.Failed })
}

func (n *node) kind() behavior.Kind {
	switch {
	case n.refused():
		return behavior.Refused
	case n.answered():
		return behavior.Answered
	}
	return behavior.Failed
}

func (n *node) saysRetryable() (is, said bool) {
	word, join := n.word(sayRetryable)
	if word != nil {
		return word.value%2 == 1, true
	}
	if join == nil {
		return false, false
	}
	// All that were refused speak of coming back; otherwise only those that were made do.
	var yes, no int
	all := !slices.ContainsFunc(join.parts, func(p *node) bool { return !p.refused() })
	for _, part := range join.parts {
		is, said := part.saysRetryable()
		switch {
		case part.refused() && !all:
		case said && is || all && !said:
			yes++
		case said:
			no++
		}
	}
	if all {
		return yes > 0, true
	}
	return no == 0 && yes > 0, yes+no > 0
}

// longest returns the greatest RetryAfter, of all parts or of those that failed.
func (n *node) longest(failed bool) time.Duration {
	var d time.Duration
	switch said, join := n.word(sayAfter); {
	case failed && n.kind() != behavior.Failed:
	case said != nil:
		d = max(0, time.Duration(said.value-1))
	case join != nil:
		for _, part := range join.parts {
			d = max(d, part.longest(failed))
		}
	}
	return d
}

func (n *node) throttled() bool {
	said, join := n.word(sayThrottled)
	return said != nil || join != nil && slices.ContainsFunc(join.parts, (*node).throttled)
}

func FuzzRead(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{67, 55, 48})  // marked as an answer, of a join of what was not refused
	f.Add([]byte{12, 67, 66})  // not refused, after all, of an answer that was refused
	f.Add([]byte{37, 159, 67}) // no answer, after all, with a time
	f.Fuzz(func(t *testing.T, data []byte) {
		tree := grow(&data, 12)
		is, said := tree.saysRetryable()
		want := behavior.End{
			Kind:        tree.kind(),
			Retryable:   is || !said && tree.kind() != behavior.Answered,
			RetryAfter:  tree.longest(false),
			FailedAfter: tree.longest(true),
			Throttled:   tree.throttled(),
		}
		require.Equal(t, want, behavior.Read(tree.err()))
	})
}
