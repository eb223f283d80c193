package plan_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga/internal/plan"
)

// TestGraphs compares the plans of random graphs with what follows from who waits for whom.
func TestGraphs(t *testing.T) {
	admitted, chains := 0, 0
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 0))
		d := random(rng)
		n, pivot := len(d.Steps), -1
		waits := make([][]bool, n) // by pairs of steps, directly or not
		for i, st := range d.Steps {
			waits[i] = make([]bool, n)
			if st.Pivot {
				pivot = i
			}
			for j := range d.Steps {
				waits[i][j] = slices.Contains(st.After, d.Steps[j].Name) || st.After == nil && j == i-1
			}
		}
		direct := make([][]bool, n)
		for i := range waits {
			direct[i] = slices.Clone(waits[i])
		}
		for k := range n {
			for i := range n {
				for j := range n {
					waits[i][j] = waits[i][j] || waits[i][k] && waits[k][j]
				}
			}
		}
		p, err := plan.New(&d)
		if slices.ContainsFunc(d.Steps, func(st plan.Step) bool { i := int(st.Name[0] - 'a'); return waits[i][i] }) {
			require.ErrorContains(t, err, "After makes it wait for itself", seed)
			name := strings.Split(err.Error(), `"`)[1]
			require.True(t, waits[name[0]-'a'][name[0]-'a'], "%d: %v", seed, err)
			continue
		}
		var wrong []string
		for i, st := range d.Steps {
			beyond := pivot >= 0 && (i == pivot || waits[i][pivot])
			if !beyond && !st.Undo && !st.ReadOnly && !st.ChildOf {
				wrong = append(wrong, fmt.Sprintf("%q: Undo", st.Name))
			}
			if !beyond && st.ChildPivot {
				wrong = append(wrong, fmt.Sprintf("%q: Saga", st.Name))
			}
			if st.BestEffort && (!beyond || i == pivot) {
				wrong = append(wrong, fmt.Sprintf("%q: BestEffort", st.Name))
			}
		}
		if wrong != nil {
			require.Error(t, err, seed)
			lines := strings.Split(err.Error(), "\n")
			require.Len(t, lines, len(wrong), "%d: %v", seed, err)
			for i, line := range lines {
				require.Contains(t, line, wrong[i], seed)
			}
			continue
		}
		require.NoError(t, err, seed)
		admitted++
		chain := true
		for i := range n {
			for j := range n {
				require.Equal(t, direct[i][j], slices.Contains(p.Nodes[i].After, j), "%d: after", seed)
				require.Equal(t, direct[i][j], slices.Contains(p.Nodes[j].UndoAfter, i), "%d: undone after", seed)
				chain = chain && direct[i][j] == (j == i-1)
			}
		}
		require.Equal(t, chain, p.Chain, "%d: chain", seed)
		require.Equal(t, pivot, p.Pivot, seed)
		if chain && n > 2 {
			chains++
		}
	}
	require.Greater(t, admitted, 100)
	require.Greater(t, chains, 10)
}

func random(rng *rand.Rand) plan.Definition {
	d := plan.Definition{Name: "trip"}
	n, pivot, wild := 1+rng.IntN(5), rng.IntN(10), rng.IntN(3) == 0
	for i := range n {
		st := plan.Step{Name: string(rune('a' + i)), Pivot: i == pivot, Do: true, Undo: rng.IntN(5) > 0}
		switch rng.IntN(8) {
		case 0:
			st.ReadOnly, st.Undo = true, false
		case 1:
			st.Child, st.ChildOf, st.Do, st.Undo, st.ChildPivot = true, true, false, false, rng.IntN(2) == 0
		case 2:
			st.BestEffort = true
		}
		if rng.IntN(3) == 0 {
			st.After = []string{}
			for j := range n {
				if (j < i || wild) && rng.IntN(3) == 0 {
					st.After = append(st.After, string(rune('a'+j)))
				}
			}
		}
		d.Steps = append(d.Steps, st)
	}
	return d
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
	type is struct{ hasUndo, readOnly, light, noDoubt, gateOnly, gated, awaits, tx, children bool }
	for name, c := range map[string]struct {
		change func(*plan.Step)
		want   is
	}{
		"a step":     {func(*plan.Step) {}, is{hasUndo: true}},
		"read only":  {func(s *plan.Step) { s.ReadOnly, s.Undo = true, false }, is{readOnly: true, light: true, noDoubt: true}},
		"idempotent": {func(s *plan.Step) { s.Idempotent, s.Undo = true, false }, is{readOnly: true, light: true, noDoubt: true}},
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
		require.Equal(t, c.want, is{u.HasUndo, u.ReadOnly, u.Light, u.NoDoubt, u.GateOnly, p.Gated, p.Awaits, p.NeedsTx, p.Children}, name)
		require.Equal(t, []int{3, 20}, []int{u.Attempts, u.UndoAttempts}, name)
	}
	p := one(func(s *plan.Step) {
		s.Attempts, s.UndoAttempts, s.Or = -1, 7, []plan.Step{{Name: "a2", Do: true, Undo: true, Delay: time.Hour}}
	})
	require.Equal(t, []int{-1, 7}, []int{p.Units[0].Attempts, p.Units[0].UndoAttempts})
	require.Equal(t, []bool{false, true}, []bool{p.Units[0].Last, p.Units[1].Last})
	require.Equal(t, plan.Node{Name: "a", N: 2}, p.Nodes[0])
	require.True(t, p.Gated)
}

func TestAPlanHasAThousandStepsAtMost(t *testing.T) {
	d := plan.Definition{Name: "trip", Steps: make([]plan.Step, 1000)}
	for i := range d.Steps {
		d.Steps[i] = plan.Step{Name: fmt.Sprint(i), Do: true, Undo: true}
	}
	_, err := plan.New(&d)
	require.NoError(t, err)
	d.Steps[0].Or = []plan.Step{{Name: "more", Do: true, Undo: true}}
	_, err = plan.New(&d)
	require.EqualError(t, err, "saga.Saga.Steps has 1001 steps and alternatives: must have 1000 or fewer (see ChildrenOf)")
}

// TestSteps says what one step may not be, for itself or among others.
func TestSteps(t *testing.T) {
	none := func(*plan.Step) {}
	or := func(change func(*plan.Step)) func(*plan.Step) {
		return func(s *plan.Step) {
			b := plan.Step{Name: "b", Do: true, Undo: true}
			change(&b)
			s.Or = []plan.Step{b}
		}
	}
	gate := func(s *plan.Step) { s.Do, s.Undo, s.Delay = false, false, 1 }
	child := func(s *plan.Step) { s.Do, s.Undo, s.Child, s.ChildOf = false, false, true, true }
	reads := func(s *plan.Step) { s.Undo, s.ReadOnly = false, true }
	repeats := func(s *plan.Step) { s.Undo, s.Idempotent = false, true }
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
		{repeats, none, ""},
		{repeats, func(s *plan.Step) { s.Do, s.DoTx = false, true }, "Idempotent is true: must be false without Do"},
		{repeats, func(s *plan.Step) { s.Undo = true }, "Idempotent is true: must be false with an Undo"},
		{repeats, func(s *plan.Step) { s.UndoTx = true }, "Idempotent is true: must be false with an Undo"},
		{repeats, func(s *plan.Step) { s.Pivot = true }, "Idempotent is true: must be false in the pivot"},
		{none, func(s *plan.Step) { s.Middleware = true }, ""},
		{none, func(s *plan.Step) { s.Middleware, s.Undo, s.UndoTx = true, false, true }, "Middleware is set"},
		{none, func(s *plan.Step) { s.Timeout = -1 }, "Timeout is -1ns"},
		{none, func(s *plan.Step) { s.Settle = -1 }, "Settle is -1ns"},
		{or(none), none, ""},
		{or(none), func(s *plan.Step) { s.Undo, s.UndoTx = false, true }, ""},
		{or(none), func(s *plan.Step) { s.Undo = false }, "Undo is nil: must be set, or UndoTx, in a step with alternatives"},
		{or(none), func(s *plan.Step) { s.Undo, s.Do, s.DoTx = false, false, true }, "Undo is nil: must be set, or UndoTx, in a step with alternatives"},
		{or(none), reads, ""},
		{or(none), repeats, ""},
		{or(none), gate, ""},
		{or(none), child, ""},
		{or(none), func(s *plan.Step) { child(s); s.ChildPivot = true }, "Saga has a pivot"},
		{or(none), func(s *plan.Step) { s.BestEffort = true }, "BestEffort is true: must be false in a step with alternatives"},
		{or(func(s *plan.Step) { s.Name = "a" }), none, "Name is \"a\": must be unique"},
		{or(func(s *plan.Step) { s.Pivot = true }), none, "Pivot is true"},
		{or(func(s *plan.Step) { s.After = []string{} }), none, "After is"},
		{or(func(s *plan.Step) { s.Or = []plan.Step{{Name: "c"}} }), none, "Or is 1 steps"},
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

// TestAPivotThatIsFirst is one: a step beside it that has no Undo is told of it.
func TestAPivotThatIsFirst(t *testing.T) {
	_, err := plan.New(&plan.Definition{Name: "trip", Steps: []plan.Step{
		{Name: "a", Do: true, Pivot: true}, {Name: "b", Do: true, After: []string{}},
	}})
	require.EqualError(t, err, `saga.Step "b": Undo is nil: must be set, or UndoTx, before the pivot`)
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
