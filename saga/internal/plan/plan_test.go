package plan_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga/internal/plan"
)

// TestGroups lays out which steps run beside each other.
func TestGroups(t *testing.T) {
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 0))
		d := plan.Definition{Name: "trip"}
		var want []plan.Group
		chain := true
		for i := range 1 + rng.IntN(6) {
			st := plan.Step{Name: string(rune('a' + i)), Do: true, Undo: true, Parallel: i > 0 && rng.IntN(2) == 0}
			if st.Parallel {
				chain = false
				want[len(want)-1].End++
			} else {
				want = append(want, plan.Group{First: i, End: i + 1})
			}
			d.Steps = append(d.Steps, st)
		}
		p, err := plan.New(&d)
		require.NoError(t, err)
		require.Equal(t, want, p.Groups)
		require.Equal(t, chain, p.Chain)
		for i := range p.Units {
			g := p.Groups[p.Units[i].Group]
			require.True(t, g.First <= i && i < g.End)
		}
	}
}

// TestUndos says which steps need an Undo: all before the pivot that change something.
func TestUndos(t *testing.T) {
	for pivot := -1; pivot < 3; pivot++ {
		for without := range 3 {
			d := plan.Definition{Name: "trip"}
			for i := range 3 {
				d.Steps = append(d.Steps, plan.Step{Name: string(rune('a' + i)), Do: true, Undo: i != without, Pivot: i == pivot})
			}
			_, err := plan.New(&d)
			if pivot < 0 || without < pivot {
				require.ErrorContains(t, err, fmt.Sprintf("saga.Step %q: Undo is nil", string(rune('a'+without))))
			} else {
				require.NoError(t, err)
			}
			d.Steps[without].ReadOnly = true
			_, err = plan.New(&d)
			require.NoError(t, err)
		}
	}
	_, err := plan.New(&plan.Definition{Name: "trip", Steps: []plan.Step{
		{Name: "a", Child: true, ChildOf: true, ChildPivot: true}, {Name: "b", Do: true, Pivot: true},
	}})
	require.ErrorContains(t, err, `saga.Step "a": Saga has a pivot: must have none before the pivot of this saga`)
}

// TestUnits says what follows from a step for its unit.
func TestUnits(t *testing.T) {
	one := func(change func(*plan.Step)) *plan.Plan {
		st := plan.Step{Name: "a", Do: true, Undo: true}
		change(&st)
		p, err := plan.New(&plan.Definition{Name: "trip", Steps: []plan.Step{st}})
		require.NoError(t, err)
		return p
	}
	type is struct{ hasUndo, readOnly, noDoubt, gateOnly, gated, awaits, tx, children bool }
	for name, c := range map[string]struct {
		change func(*plan.Step)
		want   is
	}{
		"a step":     {func(*plan.Step) {}, is{hasUndo: true}},
		"read only":  {func(s *plan.Step) { s.ReadOnly, s.Undo = true, false }, is{readOnly: true, noDoubt: true}},
		"a tx":       {func(s *plan.Step) { s.Do, s.DoTx = false, true }, is{hasUndo: true, noDoubt: true, tx: true}},
		"an undo tx": {func(s *plan.Step) { s.Undo, s.UndoTx = false, true }, is{hasUndo: true, tx: true}},
		"a tx reads": {func(s *plan.Step) { s.Do, s.Undo, s.DoTx, s.ReadOnly = false, false, true, true }, is{readOnly: true, noDoubt: true, tx: true}},
		"a delay":    {func(s *plan.Step) { s.Do, s.Undo, s.Delay = false, false, 1 }, is{readOnly: true, noDoubt: true, gateOnly: true, gated: true}},
		"a signal":   {func(s *plan.Step) { s.Await = "paid" }, is{hasUndo: true, gated: true, awaits: true}},
		"a child":    {func(s *plan.Step) { s.Do, s.Undo, s.Child, s.ChildOf = false, false, true, true }, is{hasUndo: true, children: true}},
		"its pivot": {func(s *plan.Step) {
			s.Do, s.Undo, s.Child, s.ChildOf, s.ChildPivot, s.Pivot = false, false, true, true, true, true
		}, is{children: true}},
		"a lit pivot": {func(s *plan.Step) { s.ReadOnly, s.Undo, s.Pivot = true, false, true }, is{readOnly: true, noDoubt: true}},
	} {
		p := one(c.change)
		u := p.Units[0]
		require.Equal(t, c.want, is{u.HasUndo, u.ReadOnly, u.NoDoubt, u.GateOnly, p.Gated, p.Awaits, p.NeedsTx, p.Children}, name)
		require.Equal(t, []int{3, 20}, []int{u.Attempts, u.UndoAttempts}, name)
	}
	p := one(func(s *plan.Step) { s.Attempts, s.UndoAttempts = -1, 7 })
	require.Equal(t, []int{-1, 7}, []int{p.Units[0].Attempts, p.Units[0].UndoAttempts})
}

func TestAPlanHasAThousandStepsAtMost(t *testing.T) {
	d := plan.Definition{Name: "trip", Steps: make([]plan.Step, 1000)}
	for i := range d.Steps {
		d.Steps[i] = plan.Step{Name: fmt.Sprint(i), Do: true, Undo: true}
	}
	_, err := plan.New(&d)
	require.NoError(t, err)
	d.Steps = append(d.Steps, plan.Step{Name: "more", Do: true, Undo: true})
	_, err = plan.New(&d)
	require.EqualError(t, err, "saga.Saga.Steps has 1001 steps: must have 1000 or fewer (see ChildrenOf)")
}

// TestSteps says what one step may not be, for itself or among others.
func TestSteps(t *testing.T) {
	none := func(*plan.Step) {}
	gate := func(s *plan.Step) { s.Do, s.Undo, s.Delay = false, false, 1 }
	child := func(s *plan.Step) { s.Do, s.Undo, s.Child, s.ChildOf = false, false, true, true }
	reads := func(s *plan.Step) { s.Undo, s.ReadOnly = false, true }
	long := strings.Repeat("x", plan.MaxName)
	for _, c := range []struct {
		is, also func(*plan.Step)
		want     string // "" for nothing
	}{
		{none, none, ""},
		{none, func(s *plan.Step) { s.Name = "" }, "Name is"},
		{none, func(s *plan.Step) { s.Name = "a/b" }, "Name is"},
		{none, func(s *plan.Step) { s.Name = long }, ""},
		{none, func(s *plan.Step) { s.Name = "/" + long[1:] }, `Name is "/x`},
		{none, func(s *plan.Step) { s.Name = long + "x" }, fmt.Sprintf("Name is %d bytes long", plan.MaxName+1)},
		{none, func(s *plan.Step) { s.Await = long }, ""},
		{none, func(s *plan.Step) { s.Await = long + "x" }, fmt.Sprintf("Await is %d bytes long", plan.MaxName+1)},
		{none, func(s *plan.Step) { s.Do = false }, "Do is nil"},
		{none, func(s *plan.Step) { s.DoTx = true }, "Do is set beside DoTx or Saga"},
		{none, func(s *plan.Step) { s.DoTx, s.Delay = true, 1 }, "Do is set beside DoTx or Saga"},
		{child, func(s *plan.Step) { s.DoTx = true }, "Do is nil beside DoTx and Saga"},
		{gate, none, ""},
		{gate, func(s *plan.Step) { s.Undo = true }, "Undo is set: must be nil without a Do"},
		{gate, func(s *plan.Step) { s.UndoTx = true }, "Undo is set: must be nil without a Do"},
		{child, none, ""},
		{child, func(s *plan.Step) { s.ChildOf = false }, "Saga is without"},
		{child, func(s *plan.Step) { s.Undo = true }, "Saga is set"},
		{child, func(s *plan.Step) { s.UndoTx = true }, "Saga is set"},
		{child, func(s *plan.Step) { s.ReadOnly = true }, "Saga is set"},
		{child, func(s *plan.Step) { s.Middleware = true }, "Saga is set"},
		{none, func(s *plan.Step) { s.Delay = -1 }, "Delay is -1ns"},
		{none, func(s *plan.Step) { s.AwaitFor = 1 }, "AwaitFor is 1ns"},
		{none, func(s *plan.Step) { s.Await, s.AwaitFor = "paid", -1 }, "AwaitFor is -1ns"},
		{none, func(s *plan.Step) { s.Await, s.AwaitFor = "paid", 1 }, ""},
		{none, func(s *plan.Step) { s.UndoTx = true }, "Undo is set beside its Tx form"},
		{reads, none, ""},
		{reads, func(s *plan.Step) { s.Undo = true }, "ReadOnly is true"},
		{reads, func(s *plan.Step) { s.UndoTx = true }, "ReadOnly is true"},
		{none, func(s *plan.Step) { s.Middleware = true }, ""},
		{none, func(s *plan.Step) { s.Middleware, s.Undo, s.UndoTx = true, false, true }, "Middleware is set"},
		{none, func(s *plan.Step) { s.Timeout = -1 }, "Timeout is -1ns"},
	} {
		st := plan.Step{Name: "a", Do: true, Undo: true}
		c.is(&st)
		c.also(&st)
		_, err := plan.New(&plan.Definition{Name: "trip", Steps: []plan.Step{st}})
		if c.want == "" {
			require.NoError(t, err, "%+v", st)
		} else {
			require.ErrorContains(t, err, c.want, "%+v", st)
		}
	}
}

// TestOneStepIsEnough for what a plan says of all.
func TestOneStepIsEnough(t *testing.T) {
	first := plan.Step{Name: "a", DoTx: true, Undo: true, Await: "paid"}
	p, err := plan.New(&plan.Definition{Name: "trip", Steps: []plan.Step{first, {Name: "b", Child: true, ChildOf: true}, {Name: "c", Do: true, Undo: true}}})
	require.NoError(t, err)
	require.True(t, p.NeedsTx)
	require.True(t, p.Gated)
	require.True(t, p.Awaits)
	require.True(t, p.Children)
}
