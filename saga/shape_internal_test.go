package saga

import (
	"context"
	"database/sql"
	"time"
)

// A shape describes the functions and fields that a step has. The tables of this package consist of shapes.
type shape struct {
	Name                       string
	Do, Undo, DoTx, UndoTx     bool
	Middleware                 bool
	Child, ChildOf, ChildPivot bool // it has a Child, whose functions are complete, and which has a pivot
	Parallel, ReadOnly, Pivot  bool
	Delay, AwaitFor, Timeout   time.Duration
	Await                      string
	Attempts, UndoAttempts     int
	Backoff                    func(attempt int) time.Duration
}

func (s shape) step() Step[int] {
	st := Step[int]{
		Name: s.Name, Parallel: s.Parallel, ReadOnly: s.ReadOnly, Pivot: s.Pivot, Delay: s.Delay, Await: s.Await,
		AwaitFor: s.AwaitFor,
		Timeout:  s.Timeout, Attempts: s.Attempts, UndoAttempts: s.UndoAttempts, Backoff: s.Backoff,
	}
	does := func(context.Context, *int) error { return nil }
	doesTx := func(context.Context, *sql.Tx, *int) error { return nil }
	if s.Do {
		st.Do = does
	}
	if s.Undo {
		st.Undo = does
	}
	if s.DoTx {
		st.DoTx = doesTx
	}
	if s.UndoTx {
		st.UndoTx = doesTx
	}
	if s.Middleware {
		st.Middleware = func(next func(context.Context) error) func(context.Context) error { return next }
	}
	if s.Child {
		st.Child = &Child[int]{}
	}
	if s.ChildOf {
		leaf := &Saga[int]{Name: "leaf", Steps: []Step[int]{{Name: "a", Do: does, Undo: does, Pivot: s.ChildPivot}}}
		st.Child = ChildOf(leaf, func(*int) (int, error) { return 0, nil }, nil)
	}
	return st
}

// shapes are a definition.
type shapes struct {
	Name    string
	Version int
	Steps   []shape
}

func newPlan(d *shapes) (*program, error) {
	sg := &Saga[int]{Name: d.Name, Version: d.Version}
	for _, s := range d.Steps {
		sg.Steps = append(sg.Steps, s.step())
	}
	return sg.program()
}
