package saga

import "slices"

// A Child makes a step consist of sagas. See Step.Child.
//
// The step is done when all children are completed. It fails when one was compensated or abandoned, and waits while one
// is stuck. It is undone when all have turned back, including completed ones; an abandoned child counts as undone.
//
// Children with a pivot can start only at the parent's pivot or after it. Such a step fails when all children have
// ended, without effect if all were compensated.
//
// [Register] registers the definition of the children with that of the parent. They run in any runner, and are
// deleted with their parent.
type Child[S any] struct{ child }

// A child is a Child without the type of the parent's state.
type child struct {
	program func() (*program, error)
	pivots  func() bool                     // reports whether the definition has a pivot
	begin   func(s any) ([]any, error)      // returns the states, each a *C; nil if the Child is incomplete
	end     func(s any, states []any) error // receives the states of the completed children
}

// ChildOf returns one saga as the work of a step. begin returns its first state, the same whenever it is called, and
// must not change s. end, which may be nil, merges the final state of the completed child into s. Their errors are
// those of a Do, except that a [Declined] error is about one attempt only.
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

// ChildrenOf is [ChildOf] for any number of sagas, which run in parallel and keep their order. An attempt starts all
// of them one by one, or reads all their states: for 10,000 children, give the step a Timeout of more than 1 minute.
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

// notDeclined limits a Declined error to one attempt: begin and end know nothing about other attempts.
func notDeclined(err error) error {
	if IsDeclined(err) {
		return withoutEffect(err)
	}
	return err
}
