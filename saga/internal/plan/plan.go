// Package plan checks the definition of a saga, and lays out its steps.
package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

const (
	MaxName = 100 // bytes in the name of a definition, a step or a signal

	// Each step looks at all the others, and each commit of a Runner writes them all.
	maxSteps = 1000

	defaultAttempts     = 3
	defaultUndoAttempts = 20
)

// A Definition is a saga.Saga without the type of its state.
type Definition struct {
	Name        string
	Version     int
	Deadline    time.Duration
	Concurrency int
	Steps       []Step
}

// A Step is a saga.Step without the type of the state: which functions it has.
type Step struct {
	Name  string
	After []string
	Or    []Step

	Do, Undo, DoTx, UndoTx bool
	Middleware             bool
	Child, ChildOf         bool // it has a Saga, and that is complete
	ChildPivot             bool // which has a pivot

	ReadOnly, Idempotent, BestEffort, Pivot bool

	Delay    time.Duration
	Await    string // the name of a signal; "" for none
	AwaitFor time.Duration

	Timeout      time.Duration // 0: the default
	Attempts     int           // negative: no limit
	UndoAttempts int
	Backoff      func(attempt int) (time.Duration, error) // an error if the user's has panicked
	Settle       time.Duration
}

// A Plan is a definition that was checked, and what follows from it.
type Plan struct {
	Name      string
	Version   int
	Deadline  time.Duration
	Most      int    // sagas that a runner holds; 0: no bound
	Units     []Unit // every step and alternative, in the order of the definition
	Nodes     []Node // every step
	Pivot     int    // the node that is the pivot; -1: none
	PivotName string
	Chain     bool // at most one unit is at work at a time
	NeedsTx   bool
	Gated     bool // a unit waits before it begins
	Awaits    bool // a unit waits for a signal
	Children  bool // a unit has children
}

// A Unit is one alternative of a step; the first is the step itself. It has the defaults of
// Attempts and UndoAttempts. A unit that is ReadOnly is never undone.
type Unit struct {
	Step
	Node     int
	Last     bool // no alternative follows
	HasUndo  bool
	Light    bool // it may be done again after a crash, and is recorded with a later step
	NoDoubt  bool // a Do that failed or was cut short has taken no effect
	GateOnly bool // nothing is to be done once the wait is over
}

// IsGated reports whether the step waits before its Do begins.
func (u *Unit) IsGated() bool { return u.Delay > 0 || u.Await != "" }

// A Node is one step: Units[First:First+N] are its alternatives.
type Node struct {
	Name      string
	First, N  int
	After     []int // nodes that must be done before
	UndoAfter []int // nodes that must be undone before

	BestEffort bool
}

// New returns the plan of a definition, or an error that lists everything that is wrong.
func New(d *Definition) (*Plan, error) {
	f := invalid.Fields{Type: "saga.Saga"}
	f.Need(ValidName(d.Name), "Name", Quoted(d.Name, MaxName), fmt.Sprintf("1 to %d bytes of UTF-8", MaxName))
	f.Need(d.Version >= 0, "Version", d.Version, "0 or more")
	f.Need(d.Deadline >= 0, "Timeout", d.Deadline, "0 (none) or more")
	f.Need(d.Concurrency >= 0, "Concurrency", d.Concurrency, "0 (no bound) or more")
	f.Need(len(d.Steps) > 0, "Steps", "empty", "at least one step")
	p := &Plan{Name: d.Name, Version: d.Version, Deadline: d.Deadline, Most: d.Concurrency, Pivot: -1}
	errs := []error{f.Err()}
	names := make(map[string]int) // of nodes
	taken := make(map[string]bool)
	for i := range d.Steps {
		st := &d.Steps[i]
		n := Node{Name: st.Name, First: len(p.Units), N: 1 + len(st.Or), BestEffort: st.BestEffort}
		for j := range n.N {
			alt := st
			if j > 0 {
				alt = &st.Or[j-1]
			}
			errs = append(errs, checkStep(alt, j > 0, n.N > 1, taken))
			taken[alt.Name] = true
			p.Units = append(p.Units, newUnit(alt, i, j == n.N-1))
		}
		if st.Pivot {
			if p.Pivot >= 0 {
				errs = append(errs, stepError(st.Name, "Pivot is true: %q is the pivot already", d.Steps[p.Pivot].Name))
			}
			p.Pivot, p.PivotName = i, st.Name
		}
		names[st.Name] = i
		p.Nodes = append(p.Nodes, n)
	}
	if len(p.Units) > maxSteps {
		errs = append(errs, fmt.Errorf("saga.Saga.Steps has %d steps and alternatives: must have %d or fewer (see ChildrenOf)", len(p.Units), maxSteps))
	}
	linked := d.link(p, names)
	if linked == nil {
		linked = checkUndo(p) // it depends on the order of the steps
	}
	if err := errors.Join(append(errs, linked)...); err != nil {
		return nil, err
	}
	p.shape()
	return p, nil
}

func newUnit(st *Step, n int, last bool) Unit {
	u := Unit{Step: *st, Node: n, Last: last, HasUndo: st.Undo || st.UndoTx, GateOnly: !st.Do && !st.DoTx && !st.Child}
	u.Light = st.Do && (st.ReadOnly || st.Idempotent)
	u.ReadOnly = st.ReadOnly || st.Idempotent || u.GateOnly
	u.NoDoubt = u.ReadOnly || st.DoTx
	if u.Child {
		u.HasUndo = !st.ChildPivot && !st.BestEffort // nothing after the pivot is undone
	}
	u.Attempts, u.UndoAttempts = cmp.Or(u.Attempts, defaultAttempts), cmp.Or(u.UndoAttempts, defaultUndoAttempts)
	return u
}

// link resolves After and finds cycles.
func (d *Definition) link(p *Plan, names map[string]int) error {
	var errs []error
	for i := range d.Steps {
		st, n := &d.Steps[i], &p.Nodes[i]
		if st.After == nil && i > 0 {
			n.After = []int{i - 1}
		}
		for _, name := range st.After {
			if before, ok := names[name]; ok {
				n.After = append(n.After, before)
			} else {
				errs = append(errs, stepError(st.Name, "After names %q: no such step", name))
			}
		}
		for _, before := range n.After {
			p.Nodes[before].UndoAfter = append(p.Nodes[before].UndoAfter, i)
		}
	}
	if at := p.cycle(); at >= 0 {
		errs = append(errs, stepError(p.Nodes[at].Name, "After makes it wait for itself"))
	}
	return errors.Join(errs...)
}

// shape computes the fields that depend on the whole graph.
func (p *Plan) shape() {
	p.Chain = true
	for i := range len(p.Nodes) - 1 {
		p.Chain = p.Chain && slices.Equal(p.Nodes[i].UndoAfter, []int{i + 1})
	}
	for i := range p.Units {
		u := &p.Units[i]
		u.Light = u.Light && u.Node != p.Pivot // also an alternative of the pivot
		p.NeedsTx = p.NeedsTx || u.DoTx || u.UndoTx
		p.Gated, p.Awaits, p.Children = p.Gated || u.IsGated(), p.Awaits || u.Await != "", p.Children || u.Child
	}
}
