// Package plan checks the definition of a saga, and lays out its steps.
package plan

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/invalid"
)

const (
	MaxName = 100 // bytes in the name of a definition, a step or a signal

	// Each commit of a Runner writes the progress of all steps.
	maxSteps = 1000

	defaultAttempts     = 3
	defaultUndoAttempts = 20
)

// A Definition is a saga.Saga without the type of its state.
type Definition struct {
	Name     string
	Version  int
	Deadline time.Duration
	Steps    []Step
}

// A Step is a saga.Step without the type of the state: which functions it has.
type Step struct {
	Name string

	Do, Undo, DoTx, UndoTx bool
	Middleware             bool
	Child, ChildOf         bool // it has a Saga, and that is complete
	ChildPivot             bool // which has a pivot

	Parallel, ReadOnly, Pivot bool

	Delay    time.Duration
	Await    string // the name of a signal; "" for none
	AwaitFor time.Duration

	Timeout      time.Duration // 0: the default
	Attempts     int           // negative: no limit
	UndoAttempts int
	Backoff      func(attempt int) time.Duration
}

// A Plan is a definition that was checked, and what follows from it.
type Plan struct {
	Name      string
	Version   int
	Deadline  time.Duration
	Units     []Unit
	Groups    []Group
	Pivot     int // the unit that is the pivot; -1: none
	PivotName string
	Chain     bool // no step runs beside another
	NeedsTx   bool
	Gated     bool // a unit waits before it begins
	Awaits    bool // a unit waits for a signal
	Children  bool // a unit has children
}

// A Unit is a step with the defaults of Attempts and UndoAttempts. One that is ReadOnly is never
// undone.
type Unit struct {
	Step
	Group    int
	HasUndo  bool
	NoDoubt  bool // a Do that failed or was cut short has taken no effect
	GateOnly bool // nothing is to be done once the wait is over
}

// A Group is steps that run beside each other, and are undone together: Units[First:End].
type Group struct{ First, End int }

// IsGated reports whether the step waits before its Do begins.
func (u *Unit) IsGated() bool { return u.Delay > 0 || u.Await != "" }

// New returns the plan of a definition, or an error that lists everything that is wrong.
func New(d *Definition) (*Plan, error) {
	f := invalid.Fields{Type: "saga.Saga"}
	f.Need(ValidName(d.Name), "Name", Quoted(d.Name, MaxName), fmt.Sprintf("1 to %d bytes of UTF-8", MaxName))
	f.Need(d.Version >= 0, "Version", d.Version, "0 or more")
	f.Need(d.Deadline >= 0, "Timeout", d.Deadline, "0 (none) or more")
	f.Need(len(d.Steps) > 0, "Steps", "empty", "at least one step")
	errs := []error{f.Err()}
	p := &Plan{Name: d.Name, Version: d.Version, Deadline: d.Deadline, Pivot: -1, Chain: true}
	taken := make(map[string]bool)
	for i := range d.Steps {
		st := &d.Steps[i]
		errs = append(errs, check(d.Steps, i, taken))
		taken[st.Name] = true
		if st.Pivot {
			if p.Pivot >= 0 {
				errs = append(errs, stepError(st.Name, "Pivot is true: %q is the pivot already", p.PivotName))
			}
			p.Pivot, p.PivotName = i, st.Name
		}
		if st.Parallel && i > 0 {
			p.Chain = false
			p.Groups[len(p.Groups)-1].End++
		} else {
			p.Groups = append(p.Groups, Group{i, i + 1})
		}
		u := newUnit(st, len(p.Groups)-1)
		p.Units = append(p.Units, u)
		p.NeedsTx = p.NeedsTx || u.DoTx || u.UndoTx
		p.Gated, p.Awaits, p.Children = p.Gated || u.IsGated(), p.Awaits || u.Await != "", p.Children || u.Child
	}
	if len(p.Units) > maxSteps {
		errs = append(errs, fmt.Errorf("saga.Saga.Steps has %d steps: must have %d or fewer (see ChildrenOf)", len(p.Units), maxSteps))
	}
	errs = append(errs, checkUndo(p))
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return p, nil
}

func newUnit(st *Step, group int) Unit {
	u := Unit{Step: *st, Group: group, HasUndo: st.Undo || st.UndoTx || st.Child && !st.ChildPivot}
	u.GateOnly = !st.Do && !st.DoTx && !st.Child
	u.ReadOnly = st.ReadOnly || u.GateOnly
	u.NoDoubt = u.ReadOnly || st.DoTx
	u.Attempts, u.UndoAttempts = cmp.Or(u.Attempts, defaultAttempts), cmp.Or(u.UndoAttempts, defaultUndoAttempts)
	return u
}

// check returns what is wrong with a step by itself, and with where it stands.
func check(steps []Step, i int, taken map[string]bool) error {
	st := &steps[i]
	f := invalid.Fields{Type: fmt.Sprintf("saga.Step %q", st.Name)}
	f.Need(ValidName(st.Name) && !strings.Contains(st.Name, "/"), "Name", Quoted(st.Name, MaxName),
		fmt.Sprintf(`1 to %d bytes of UTF-8 without "/"`, MaxName))
	f.Need(!taken[st.Name], "Name", Quoted(st.Name, MaxName), "unique in the saga")
	work, gate := count(st.Do, st.DoTx, st.Child), st.Delay > 0 || st.Await != ""
	f.Need(work == 1 || work == 0 && gate, "Do", oneOrNone(st.Do, work),
		"set, or DoTx, or Saga, but not several; nil in all with Delay or Await alone")
	f.Need(!st.Child || st.ChildOf, "Saga", "without a Saga or a begin", "nil, or a ChildOf or ChildrenOf with both")
	f.Need(!st.Child || !st.Undo && !st.UndoTx && !st.ReadOnly && !st.Middleware, "Saga", "set",
		"nil with Undo, UndoTx, ReadOnly or Middleware")
	f.Need(work > 0 || !st.Undo && !st.UndoTx, "Undo", "set", "nil without a Do")
	f.Need(st.Delay >= 0, "Delay", st.Delay, "0 (none) or more")
	f.Need(st.Await == "" || ValidName(st.Await), "Await", Quoted(st.Await, MaxName),
		fmt.Sprintf(`"" (nothing), or 1 to %d bytes of UTF-8`, MaxName))
	f.Need(st.AwaitFor >= 0 && (st.AwaitFor == 0 || st.Await != ""), "AwaitFor", st.AwaitFor, "0 (no limit), or more with Await")
	f.Need(!st.Undo || !st.UndoTx, "Undo", "set beside its Tx form", "set, or UndoTx, but not both")
	f.Need(!st.ReadOnly || !st.Undo && !st.UndoTx, "ReadOnly", true, "false, or Undo and UndoTx nil")
	f.Need(!st.DoTx && !st.UndoTx || !st.Middleware, "Middleware", "set", "nil with DoTx and with UndoTx")
	f.Need(st.Timeout >= 0, "Timeout", st.Timeout, "0 (for 1m) or more")
	f.Need(!st.Parallel || i > 0, "Parallel", true, "false in the first step, which has none before it")
	beside := st.Parallel || i+1 < len(steps) && steps[i+1].Parallel
	f.Need(!beside || !st.Pivot, "Pivot", true, "false in a step that runs beside another")
	f.Need(!beside || st.Await == "", "Await", Quoted(st.Await, MaxName), `"" in a step that runs beside another`)
	return f.Err()
}

// checkUndo returns the steps without Undo that may have to be undone, which are all before the
// pivot.
func checkUndo(p *Plan) error {
	before, none := p.Pivot, ""
	if before < 0 {
		before, none = len(p.Units), ", and there is none"
	}
	var errs []error
	for i := range before {
		switch u := &p.Units[i]; {
		case u.HasUndo || u.ReadOnly:
		case u.Child:
			errs = append(errs, stepError(u.Name, "Saga has a pivot: must have none before the pivot of this saga%s", none))
		default:
			errs = append(errs, stepError(u.Name, "Undo is nil: must be set, or UndoTx, before the pivot%s", none))
		}
	}
	return errors.Join(errs...)
}

func ValidName(s string) bool {
	return s != "" && len(s) <= MaxName && utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

// Quoted returns s for an error, or its length if it is longer than most.
func Quoted(s string, most int) string {
	if len(s) > most {
		return fmt.Sprintf("%d bytes long", len(s))
	}
	return fmt.Sprintf("%q", s)
}

func count(conditions ...bool) int {
	n := 0
	for _, is := range conditions {
		if is {
			n++
		}
	}
	return n
}

func oneOrNone(do bool, work int) string {
	switch {
	case do:
		return "set beside DoTx or Saga"
	case work > 1:
		return "nil beside DoTx and Saga"
	}
	return "nil"
}

func stepError(step, format string, args ...any) error {
	return fmt.Errorf("saga.Step %q: "+format, append([]any{step}, args...)...)
}
