package saga_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

func doTx(context.Context, *sql.Tx, *trip) error { return nil }

func TestValidateNamesTheField(t *testing.T) {
	with := func(change func(*saga.Step[trip])) []saga.Step[trip] {
		st := step("a")
		change(&st)
		return []saga.Step[trip]{st, step("b")}
	}
	around := func(next func(context.Context) error) func(context.Context) error { return next }
	beginOne := func(*trip) (trip, error) { return trip{}, nil }
	beginMany := func(*trip) ([]trip, error) { return nil, nil }
	leaf, pivoted := sequence(step("leaf")), sequence(step("leaf"))
	pivoted.Steps[0].Pivot = true
	child := saga.ChildOf(leaf, beginOne, nil)
	is := func(child *saga.Child[trip]) func(*saga.Step[trip]) {
		return func(s *saga.Step[trip]) { s.Child, s.Do, s.Undo = child, nil, nil }
	}
	for _, c := range []struct {
		want  string
		steps []saga.Step[trip]
	}{
		{`saga.Saga.Steps is empty`, nil},
		{`saga.Step "".Name is "": must be 1 to 100 bytes`, with(func(s *saga.Step[trip]) { s.Name = "" })},
		{`Name is 101 bytes long`, with(func(s *saga.Step[trip]) { s.Name = strings.Repeat("x", 101) })},
		{`Name is "` + strings.Repeat("/", 100) + `": must be`,
			with(func(s *saga.Step[trip]) { s.Name = strings.Repeat("/", 100) })},
		{`Name is "a/b": must be`, with(func(s *saga.Step[trip]) { s.Name = "a/b" })},
		{`Name is "\xff"`, with(func(s *saga.Step[trip]) { s.Name = "\xff" })},
		{`Name is "b": must be unique`, with(func(s *saga.Step[trip]) { s.Name = "b" })},
		{`saga.Step "a".Do is nil: must be set, or DoTx`, with(func(s *saga.Step[trip]) { s.Do = nil })},
		{`saga.Step "a".Do is set beside DoTx or Child`, with(func(s *saga.Step[trip]) { s.DoTx = doTx })},
		{`saga.Step "a".Do is set beside DoTx or Child`, with(func(s *saga.Step[trip]) { s.DoTx, s.Delay = doTx, 1 })},
		{`saga.Step "a".Undo is set beside its Tx form`, with(func(s *saga.Step[trip]) { s.UndoTx = doTx })},
		{`saga.Step "a".ReadOnly is true: must be false, or Undo and UndoTx nil`,
			with(func(s *saga.Step[trip]) { s.ReadOnly = true })},
		{`saga.Step "a".Undo is nil: must be set, or UndoTx, before the pivot, and there is none`,
			with(func(s *saga.Step[trip]) { s.Undo = nil })},
		{`saga.Step "a".Do is nil beside DoTx and Child`,
			with(func(s *saga.Step[trip]) { s.Do, s.Undo, s.DoTx, s.Child = nil, nil, doTx, new(saga.Child[trip]) })},
		{`saga.Step "a".Middleware is set: must be nil with DoTx and with UndoTx`,
			with(func(s *saga.Step[trip]) { s.Do, s.DoTx, s.Middleware = nil, doTx, around })},
		{`saga.Step "a".Middleware is set: must be nil with DoTx and with UndoTx`,
			with(func(s *saga.Step[trip]) { s.Undo, s.UndoTx, s.Middleware = nil, doTx, around })},
		{`saga.Step "a".Timeout is -1s`, with(func(s *saga.Step[trip]) { s.Timeout = -time.Second })},
		{`saga.Step "a".Attempts is -2: must be 0 (for 3), more, or Unlimited`,
			with(func(s *saga.Step[trip]) { s.Attempts = -2 })},
		{`saga.Step "a".UndoAttempts is -2: must be 0 (for 20), more, or Unlimited`,
			with(func(s *saga.Step[trip]) { s.UndoAttempts = -2 })},
		{`Delay is -1ns`, with(func(s *saga.Step[trip]) { s.Delay = -1 })},
		{`Await is 101 bytes long`, with(func(s *saga.Step[trip]) { s.Await = strings.Repeat("x", 101) })},
		{`AwaitFor is 1ns`, with(func(s *saga.Step[trip]) { s.AwaitFor = 1 })},
		{`AwaitFor is -1ns`, with(func(s *saga.Step[trip]) { s.Await, s.AwaitFor = "paid", -1 })},
		{`Undo is set: must be nil without a Do`, with(func(s *saga.Step[trip]) { s.Do, s.Delay = nil, 1 })},
		{`Undo is set: must be nil without a Do`,
			with(func(s *saga.Step[trip]) { s.Do, s.Undo, s.UndoTx, s.Delay = nil, nil, doTx, 1 })},
		{`ReadOnly is true: must be false, or Undo`,
			with(func(s *saga.Step[trip]) { s.Undo, s.UndoTx, s.ReadOnly = nil, doTx, true })},
		{`Do is set beside DoTx or Child`, with(func(s *saga.Step[trip]) { s.Child = child })},
		{`Child is set: must be nil with`, with(func(s *saga.Step[trip]) { s.Child, s.Do = child, nil })},
		{`Child is set: must be nil with`,
			with(func(s *saga.Step[trip]) { s.Child, s.Do, s.Undo, s.UndoTx = child, nil, nil, doTx })},
		{`Child is set: must be nil with`,
			with(func(s *saga.Step[trip]) { s.Child, s.Do, s.Undo, s.ReadOnly = child, nil, nil, true })},
		{`Child is set: must be nil with`,
			with(func(s *saga.Step[trip]) { s.Child, s.Do, s.Undo, s.Middleware = child, nil, nil, around })},
		{`Child is without a Saga or a begin`, with(is(saga.ChildOf(nil, beginOne, nil)))},
		{`Child is without a Saga or a begin`, with(is(saga.ChildOf[trip](leaf, nil, nil)))},
		{`Child is without a Saga or a begin`, with(is(saga.ChildrenOf(nil, beginMany, nil)))},
		{`Child is without a Saga or a begin`, with(is(saga.ChildrenOf[trip](leaf, nil, nil)))},
		{`saga.Step "a".Child is one with a pivot: must be one without before the pivot`,
			with(is(saga.ChildOf(pivoted, beginOne, nil)))},
		{`saga.Step "b".Pivot is true: must be false, as "a" is the pivot`, func() []saga.Step[trip] {
			a, b := step("a"), step("b")
			a.Pivot, b.Pivot = true, true
			return []saga.Step[trip]{a, b}
		}()},
		{`saga.Step "b".Undo is nil: must be set, or UndoTx, before the pivot`, func() []saga.Step[trip] {
			a, b, c := step("a"), step("b"), step("c")
			c.Pivot, b.Undo = true, nil
			return []saga.Step[trip]{a, b, c}
		}()},
		{`saga.Step "a".Parallel is true: must be false in the first step`,
			with(func(s *saga.Step[trip]) { s.Parallel = true })},
		{`saga.Step "b".Pivot is true: must be false in a step that runs beside another`, func() []saga.Step[trip] {
			a, b := step("a"), step("b")
			b.Pivot, b.Parallel = true, true
			return []saga.Step[trip]{a, b}
		}()},
		{`saga.Step "a".Pivot is true: must be false in a step that runs beside another`, func() []saga.Step[trip] {
			a, b := step("a"), step("b")
			a.Pivot, b.Parallel = true, true
			return []saga.Step[trip]{a, b}
		}()},
		{`saga.Step "a".Await is "paid": must be "" in a step that runs beside another`, func() []saga.Step[trip] {
			a, b := step("a"), step("b")
			a.Await, b.Parallel = "paid", true
			return []saga.Step[trip]{a, b}
		}()},
	} {
		sg := sequence(c.steps...)
		err := sg.Validate()
		require.ErrorContains(t, err, c.want)
		require.Equal(t, err, saga.Run(t.Context(), sg, &trip{}))
		require.PanicsWithError(t, err.Error(), func() {
			saga.Register(saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{}), sg)
		})
	}
	for want, sg := range map[string]*saga.Saga[trip]{
		`saga.Saga.Name is ""`:                {Steps: []saga.Step[trip]{step("a")}},
		`saga.Saga.Version is -1`:             {Name: "x", Version: -1, Steps: []saga.Step[trip]{step("a")}},
		`saga.Saga.Timeout is -1s: must be 0`: {Name: "x", Timeout: -time.Second, Steps: []saga.Step[trip]{step("a")}},
	} {
		require.ErrorContains(t, sg.Validate(), want)
	}
}

func TestValidateReportsAllErrors(t *testing.T) {
	a, b, c := step("a"), step("b"), step("c")
	a.Undo, b.Timeout, c.Undo = nil, -2, nil
	require.EqualError(t, sequence(a, b, c).Validate(),
		`saga.Step "a".Undo is nil: must be set, or UndoTx, before the pivot, and there is none
saga.Step "b".Timeout is -2ns: must be 0 (for 1m), more, or Unlimited
saga.Step "c".Undo is nil: must be set, or UndoTx, before the pivot, and there is none`)
	b.Timeout, b.Pivot, c.Undo = 0, true, b.Undo
	require.EqualError(t, sequence(a, b, c).Validate(),
		`saga.Step "a".Undo is nil: must be set, or UndoTx, before the pivot`)
}

func TestValidateAdmits(t *testing.T) {
	a, b, c := step("a"), step("b"), step("c")
	b.Pivot, b.Undo, c.Undo = true, nil, nil
	require.NoError(t, sequence(a, b, c).Validate())
	reads, gate := step("a3"), saga.Step[trip]{Name: strings.Repeat("a", 100), Delay: 1}
	reads.Undo, reads.ReadOnly, gate.Parallel = nil, true, true
	require.NoError(t, sequence(reads, gate, a, b, c).Validate())
	parcel := saga.Step[trip]{Name: "parcel",
		Child: saga.ChildOf(sequence(b), func(*trip) (trip, error) { return trip{}, nil }, nil)}
	require.NoError(t, sequence(b, parcel).Validate(), "a child with a pivot, behind one")
	require.EqualError(t, sequence(parcel).Validate(),
		`saga.Step "parcel".Child is one with a pivot: must be one without before the pivot, and there is none`)
	require.ErrorContains(t, saga.Run(t.Context(), sequence(b, parcel, c), &trip{}), "it needs a Runner")

	for _, tx := range []saga.Step[trip]{{Name: "tx", DoTx: doTx, Undo: a.Undo}, {Name: "tx", Do: a.Do, UndoTx: doTx}} {
		sg := sequence(tx, a)
		require.NoError(t, sg.Validate())
		require.ErrorContains(t, saga.Run(t.Context(), sg, &trip{}), "saga: no transactions")
		require.Panics(t, func() { saga.Register(saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{}), sg) })
	}
}

func TestRunnerConfigErrorNamesField(t *testing.T) {
	for want, cfg := range map[string]saga.RunnerConfig{
		"saga.RunnerConfig.LeaseTTL is 1ms: must be 0 (for 15s), or 10ms or more":               {LeaseTTL: time.Millisecond},
		`saga.RunnerConfig.Name is "a\x00": must be`:                                            {Name: "a\x00"},
		"saga.RunnerConfig.Poll is -1s":                                                         {Poll: -time.Second},
		"saga.RunnerConfig.Concurrency is -1":                                                   {Concurrency: -1},
		"saga.RunnerConfig.Drain is -1ns: must be 0 (for 10s), more, or None":                   {Drain: saga.Unlimited},
		"saga.RunnerConfig.MaxTakeovers is -2147483648: must be 0 (for 10), more, or Unlimited": {MaxTakeovers: saga.None},
		"saga.RunnerConfig.Concurrency is 10001: must be 0 (for 64) to 10000":                   {Concurrency: 10001},
		"saga.RunnerConfig.Retention.Completed is -1s": {
			Retention: saga.Retention{Completed: -time.Second},
		},
		"saga.RunnerConfig.Retention.Compensated is -1s": {
			Retention: saga.Retention{Compensated: -time.Second},
		},
		"saga.RunnerConfig.Retention.Abandoned is -1s: must be 0 (for 30 days), more, or Unlimited": {
			Retention: saga.Retention{Abandoned: -time.Second},
		},
	} {
		err := cfg.Validate()
		require.ErrorContains(t, err, want)
		require.PanicsWithError(t, err.Error(), func() { saga.NewRunner(saga.NewMemory(), cfg) })
	}
	require.NoError(t, saga.RunnerConfig{LeaseTTL: 10 * time.Millisecond, Concurrency: 10000}.Validate())
	require.PanicsWithError(t, "saga: Store is nil: must be set",
		func() { saga.NewRunner(nil, saga.RunnerConfig{}) })
}

// FuzzValidate builds a definition from bytes. A definition that Validate accepts runs, with every step that may
// fail failing once, and undoes its steps. Validate rejects others with an error that names a step or a field.
func FuzzValidate(f *testing.F) {
	f.Add([]byte{3, 0, 0, 0})
	f.Add([]byte{4, 1, 2, 4, 8, 16, 32})
	f.Add([]byte{5, 255, 7, 129, 64, 33})
	f.Fuzz(func(t *testing.T, data []byte) {
		next := func() byte {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return b
		}
		n := int(next() % 9)
		sg := &saga.Saga[counts]{Name: "fuzz"}
		for i := range n {
			bits := next()
			st := counting(string(rune('a'+i)), bits&1 != 0)
			st.Parallel = bits&2 != 0
			st.Pivot = bits&16 != 0
			if bits&32 != 0 {
				st.Undo = nil
			}
			sg.Steps = append(sg.Steps, st)
		}
		err := sg.Validate()
		c := &counts{n: make(map[string]int)}
		if err != nil {
			require.Contains(t, err.Error(), "saga.S")
			require.Equal(t, err, saga.Run(t.Context(), sg, c))
			return
		}
		err = saga.Run(t.Context(), sg, c)
		for _, st := range sg.Steps {
			net := c.n[st.Name]
			switch {
			case err == nil:
				require.Equal(t, 1, net, "step %s of a saga that has completed", st.Name)
			case !isStuck(err):
				require.Zero(t, net, "step %s of a saga that was compensated", st.Name)
			}
		}
	})
}

// counts is the number of times that each step is in effect.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counts) add(name string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[name] += n
}

func counting(name string, refuses bool) saga.Step[counts] {
	return saga.Step[counts]{
		Name: name,
		Do: func(_ context.Context, c *counts) error {
			if refuses {
				return saga.Declined(errDeclined)
			}
			c.add(name, 1)
			return nil
		},
		Undo: func(_ context.Context, c *counts) error { c.add(name, -1); return nil },
	}
}

func isStuck(err error) bool { return errors.Is(err, saga.ErrStuck) }

// TestStepCountIsLimited: the cost of each step grows with their number.
func TestStepCountIsLimited(t *testing.T) {
	sg := &saga.Saga[trip]{Name: "trip"}
	for i := range 1000 {
		sg.Steps = append(sg.Steps,
			saga.Step[trip]{Name: fmt.Sprint("step-", i), ReadOnly: true, Do: func(context.Context, *trip) error { return nil }})
	}
	require.NoError(t, saga.Run(t.Context(), sg, &trip{}))
	sg = &saga.Saga[trip]{Name: "trip", Steps: append(sg.Steps, step("other"))}
	sg.Steps[1000].ReadOnly, sg.Steps[1000].Undo = true, nil
	require.EqualError(t, sg.Validate(), "saga.Saga.Steps has 1001 steps: must have 1000 or fewer (see ChildrenOf)")
}

func TestDefinitionIsRegisteredConcurrently(t *testing.T) {
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	for i := range 500 {
		sg := sequence(step("flight"))
		sg.Version = i
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { saga.Register(r, sg) })
		}
		wg.Wait()
	}
}
