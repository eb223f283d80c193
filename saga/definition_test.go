package saga

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGroups lays out which steps run beside each other.
func TestGroups(t *testing.T) {
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 0))
		d := shapes{Name: "trip"}
		var want []group
		chain := true
		for i := range 1 + rng.IntN(6) {
			st := shape{Name: string(rune('a' + i)), Do: true, Undo: true, Parallel: i > 0 && rng.IntN(2) == 0}
			if st.Parallel {
				chain = false
				want[len(want)-1].end++
			} else {
				want = append(want, group{i, i + 1})
			}
			d.Steps = append(d.Steps, st)
		}
		p, err := newPlan(&d)
		require.NoError(t, err)
		require.Equal(t, want, p.groups)
		require.Equal(t, chain, p.chain)
		for i := range p.steps {
			g := p.groups[p.steps[i].group]
			require.True(t, g.first <= i && i < g.end)
		}
	}
}

// TestUndos says which steps need an Undo: all before the pivot that change something.
func TestUndos(t *testing.T) {
	for pivot := -1; pivot < 3; pivot++ {
		for without := range 3 {
			d := shapes{Name: "trip"}
			for i := range 3 {
				d.Steps = append(d.Steps, shape{Name: string(rune('a' + i)), Do: true, Undo: i != without, Pivot: i == pivot})
			}
			_, err := newPlan(&d)
			if pivot < 0 || without < pivot {
				require.ErrorContains(t, err, fmt.Sprintf("saga.Step %q: Undo is nil", string(rune('a'+without))))
			} else {
				require.NoError(t, err)
			}
			d.Steps[without].ReadOnly = true
			_, err = newPlan(&d)
			require.NoError(t, err)
		}
	}
	_, err := newPlan(&shapes{Name: "trip", Steps: []shape{
		{Name: "a", Child: true, ChildOf: true, ChildPivot: true}, {Name: "b", Do: true, Pivot: true},
	}})
	require.ErrorContains(t, err, `saga.Step "a": Saga has a pivot: must have none before the pivot of this saga`)
}

// TestUnits says what follows from a step for its unit.
func TestUnits(t *testing.T) {
	one := func(change func(*shape)) *program {
		st := shape{Name: "a", Do: true, Undo: true}
		change(&st)
		p, err := newPlan(&shapes{Name: "trip", Steps: []shape{st}})
		require.NoError(t, err)
		return p
	}
	type is struct{ hasUndo, readOnly, failsClean, onlyWaits, gated, awaits, tx, children bool }
	for name, c := range map[string]struct {
		change func(*shape)
		want   is
	}{
		"a step":     {func(*shape) {}, is{hasUndo: true}},
		"read only":  {func(s *shape) { s.ReadOnly, s.Undo = true, false }, is{readOnly: true, failsClean: true}},
		"a tx":       {func(s *shape) { s.Do, s.DoTx = false, true }, is{hasUndo: true, failsClean: true, tx: true}},
		"an undo tx": {func(s *shape) { s.Undo, s.UndoTx = false, true }, is{hasUndo: true, tx: true}},
		"a tx reads": {func(s *shape) { s.Do, s.Undo, s.DoTx, s.ReadOnly = false, false, true, true }, is{readOnly: true, failsClean: true, tx: true}},
		"a delay":    {func(s *shape) { s.Do, s.Undo, s.Delay = false, false, 1 }, is{readOnly: true, failsClean: true, onlyWaits: true, gated: true}},
		"a signal":   {func(s *shape) { s.Await = "paid" }, is{hasUndo: true, gated: true, awaits: true}},
		"a child":    {func(s *shape) { s.Do, s.Undo, s.Child, s.ChildOf = false, false, true, true }, is{hasUndo: true, children: true}},
		"its pivot": {func(s *shape) {
			s.Do, s.Undo, s.Child, s.ChildOf, s.ChildPivot, s.Pivot = false, false, true, true, true, true
		}, is{children: true}},
		"a lit pivot": {func(s *shape) { s.ReadOnly, s.Undo, s.Pivot = true, false, true }, is{readOnly: true, failsClean: true}},
	} {
		p := one(c.change)
		u := p.steps[0]
		require.Equal(t, c.want, is{u.hasUndo, u.readOnly, u.failsClean, u.onlyWaits, p.gated, p.awaits, p.needsTx, p.children}, name)
		require.Equal(t, []int{3, 20}, []int{u.attempts, u.undoAttempts}, name)
	}
	p := one(func(s *shape) { s.Attempts, s.UndoAttempts = -1, 7 })
	require.Equal(t, []int{-1, 7}, []int{p.steps[0].attempts, p.steps[0].undoAttempts})
}

func TestADefinitionHasAThousandStepsAtMost(t *testing.T) {
	d := shapes{Name: "trip", Steps: make([]shape, 1000)}
	for i := range d.Steps {
		d.Steps[i] = shape{Name: fmt.Sprint(i), Do: true, Undo: true}
	}
	_, err := newPlan(&d)
	require.NoError(t, err)
	d.Steps = append(d.Steps, shape{Name: "more", Do: true, Undo: true})
	_, err = newPlan(&d)
	require.EqualError(t, err, "saga.Saga.Steps has 1001 steps: must have 1000 or fewer (see ChildrenOf)")
}

// TestSteps says what one step may not be, for itself or among others.
func TestSteps(t *testing.T) {
	none := func(*shape) {}
	gate := func(s *shape) { s.Do, s.Undo, s.Delay = false, false, 1 }
	child := func(s *shape) { s.Do, s.Undo, s.Child, s.ChildOf = false, false, true, true }
	reads := func(s *shape) { s.Undo, s.ReadOnly = false, true }
	long := strings.Repeat("x", maxName)
	for _, c := range []struct {
		is, also func(*shape)
		want     string // "" for nothing
	}{
		{none, none, ""},
		{none, func(s *shape) { s.Name = "" }, "Name is"},
		{none, func(s *shape) { s.Name = "a/b" }, "Name is"},
		{none, func(s *shape) { s.Name = long }, ""},
		{none, func(s *shape) { s.Name = "/" + long[1:] }, `Name is "/x`},
		{none, func(s *shape) { s.Name = long + "x" }, fmt.Sprintf("Name is %d bytes long", maxName+1)},
		{none, func(s *shape) { s.Await = long }, ""},
		{none, func(s *shape) { s.Await = long + "x" }, fmt.Sprintf("Await is %d bytes long", maxName+1)},
		{none, func(s *shape) { s.Do = false }, "Do is nil"},
		{none, func(s *shape) { s.DoTx = true }, "Do is set beside DoTx or Saga"},
		{none, func(s *shape) { s.DoTx, s.Delay = true, 1 }, "Do is set beside DoTx or Saga"},
		{child, func(s *shape) { s.DoTx = true }, "Do is nil beside DoTx and Saga"},
		{gate, none, ""},
		{gate, func(s *shape) { s.Undo = true }, "Undo is set: must be nil without a Do"},
		{gate, func(s *shape) { s.UndoTx = true }, "Undo is set: must be nil without a Do"},
		{child, none, ""},
		{child, func(s *shape) { s.ChildOf = false }, "Saga is without"},
		{child, func(s *shape) { s.Undo = true }, "Saga is set"},
		{child, func(s *shape) { s.UndoTx = true }, "Saga is set"},
		{child, func(s *shape) { s.ReadOnly = true }, "Saga is set"},
		{child, func(s *shape) { s.Middleware = true }, "Saga is set"},
		{none, func(s *shape) { s.Delay = -1 }, "Delay is -1ns"},
		{none, func(s *shape) { s.AwaitFor = 1 }, "AwaitFor is 1ns"},
		{none, func(s *shape) { s.Await, s.AwaitFor = "paid", -1 }, "AwaitFor is -1ns"},
		{none, func(s *shape) { s.Await, s.AwaitFor = "paid", 1 }, ""},
		{none, func(s *shape) { s.UndoTx = true }, "Undo is set beside its Tx form"},
		{reads, none, ""},
		{reads, func(s *shape) { s.Undo = true }, "ReadOnly is true"},
		{reads, func(s *shape) { s.UndoTx = true }, "ReadOnly is true"},
		{none, func(s *shape) { s.Middleware = true }, ""},
		{none, func(s *shape) { s.Middleware, s.Undo, s.UndoTx = true, false, true }, "Middleware is set"},
		{none, func(s *shape) { s.Timeout = -1 }, "Timeout is -1ns"},
	} {
		st := shape{Name: "a", Do: true, Undo: true}
		c.is(&st)
		c.also(&st)
		_, err := newPlan(&shapes{Name: "trip", Steps: []shape{st}})
		if c.want == "" {
			require.NoError(t, err, "%+v", st)
		} else {
			require.ErrorContains(t, err, c.want, "%+v", st)
		}
	}
}

// TestOneStepIsEnough for what a plan says of all.
func TestOneStepIsEnough(t *testing.T) {
	first := shape{Name: "a", DoTx: true, Undo: true, Await: "paid"}
	p, err := newPlan(&shapes{Name: "trip", Steps: []shape{first, {Name: "b", Child: true, ChildOf: true}, {Name: "c", Do: true, Undo: true}}})
	require.NoError(t, err)
	require.True(t, p.needsTx)
	require.True(t, p.gated)
	require.True(t, p.awaits)
	require.True(t, p.children)
}
