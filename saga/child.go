package saga

import "slices"

// A Child is the work of a step that consists of sagas of their own: Step.Saga. It is
// made by [ChildOf] and [ChildrenOf].
//
// The step is done when all of its children are completed. It fails when one of them was
// compensated or abandoned, and the others are then undone with it. A child that is stuck keeps the
// step waiting, until an operator has mended it. To undo the step is to turn its children back, also
// those that are completed; an abandoned one counts as undone.
//
// A definition with a pivot can only be a child in the pivot or after it. Such a step fails only when
// all of its children have ended, and has taken no effect if all were compensated.
//
// The children have ids of [ChildID], and are run by any runner that knows their definition, which
// [Register] registers with that of the parent. They stay in the store until their parent is deleted.
type Child[S any] struct{ child }

// A child is a Child without the type of the parent's state.
type child struct {
	program func() (*program, error)
	pivots  func() bool                     // it has a pivot
	begin   func(s any) ([]any, error)      // the states, each a *C; nil if it is not complete
	end     func(s any, states []any) error // of the completed children
}

// ChildOf returns one saga as the work of a step. begin returns its state when it is
// started. end takes in its state when it is completed; nil means that nothing is taken
// in.
//
// begin must not change s, and must return the same state when it is called again, as far
// as it matters: it may depend on what the steps before this one have written. The errors
// of begin and end are those of a Do, except that a [Void] is only about that attempt: children
// that were started are turned back whatever it says.
func ChildOf[S, C any](sg *Saga[C], begin func(s *S) (C, error), end func(s *S, c C) error) *Child[S] {
	if begin == nil {
		return &Child[S]{}
	}
	many := func(s *S) ([]C, error) {
		c, err := begin(s)
		return []C{c}, err
	}
	if end == nil {
		return ChildrenOf(sg, many, nil)
	}
	return ChildrenOf(sg, many, func(s *S, c []C) error { return end(s, c[0]) })
}

// ChildrenOf returns any number of sagas, which run in parallel, as the work of a step.
// begin returns their states when they are started, and end takes in their states, in the
// same order, when all are completed. The rest is as in [ChildOf].
func ChildrenOf[S, C any](sg *Saga[C], begin func(s *S) ([]C, error), end func(s *S, c []C) error) *Child[S] {
	if sg == nil || begin == nil {
		return &Child[S]{}
	}
	c := child{program: sg.program}
	c.pivots = func() bool { return slices.ContainsFunc(sg.Steps, func(st Step[C]) bool { return st.Pivot }) }
	c.begin = func(s any) ([]any, error) {
		list, err := begin(s.(*S))
		states := make([]any, len(list))
		for i := range list {
			states[i] = &list[i]
		}
		return states, notVoid(err)
	}
	c.end = func(s any, states []any) error {
		if end == nil {
			return nil
		}
		list := make([]C, len(states))
		for i := range states {
			list[i] = *states[i].(*C)
		}
		return notVoid(end(s.(*S), list))
	}
	return &Child[S]{c}
}

// notVoid takes from a Void what it says of other attempts: only the children know of all.
func notVoid(err error) error {
	if Voided(err) {
		return withoutEffect(err)
	}
	return err
}
