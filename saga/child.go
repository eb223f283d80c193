package saga

import "slices"

// A Child makes a step start one or more sagas and wait for them. The sagas are the step's children. [ChildOf] and
// [ChildrenOf] return a Child for Step.Child.
//
// The step is done when all children are completed. The step fails when a child was compensated or abandoned, and waits
// while a child is stuck. If the parent turns back, the children turn back too, including completed children. The step
// is undone when all its children are compensated. An abandoned child counts as compensated.
//
// Children whose definition has a pivot can be started only by the parent's pivot or a later step. If the children's
// definition has a pivot, the step that started them does not fail before all of its children have ended. If all these
// children were compensated, the step took no effect.
//
// [Register] registers the definition of the children together with the parent's. Children can run in any runner that
// knows their definition. Children are deleted with their parent.
//
// Child and the functions for children are unstable until version 1.0.0: a minor version may change them.
type Child[S any] struct{ child }

// A child is a Child without the type of the parent's state.
type child struct {
	program func() (*program, error)
	pivots  func() bool                     // reports whether the definition has a pivot
	begin   func(s any) ([]any, error)      // returns the states, each a *C; nil if the Child is incomplete
	end     func(s any, states []any) error // merges the states of the completed children into s
}

// ChildOf returns a Child with one saga of the definition sg. The function begin returns the child's initial state.
// Each call to begin must return the same state, and begin must not change s. The function end merges the final state
// of the completed child into s; end may be nil. An error of begin or end is treated like an error of a Do, with one
// exception. A [Declined] error reports only that the current attempt took no effect. Earlier attempts may have taken
// effect.
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

// ChildrenOf is like [ChildOf], for any number of children, which run in parallel. The function end receives the
// children's final states in the order in which begin returned their initial states. One attempt of the step starts all
// children one by one, and a later attempt reads the states of all children. So for 10,000 children, give the step a
// Timeout of more than 1 minute. If the store is too slow for the Timeout, the attempt does not count, and is repeated.
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
		return states, notDeclined(err)
	}
	c.end = func(s any, states []any) error {
		if end == nil {
			return nil
		}
		list := make([]C, len(states))
		for i := range states {
			list[i] = *states[i].(*C)
		}
		return notDeclined(end(s.(*S), list))
	}
	return &Child[S]{c}
}

// notDeclined limits a Declined error of begin or end to one attempt, because these functions know nothing about other
// attempts.
func notDeclined(err error) error {
	if IsDeclined(err) {
		return withoutEffect(err)
	}
	return err
}
