package saga

import (
	"context"
	"database/sql"
	"fmt"
)

// A program is a definition that is ready to run. It hides the type of the state, which
// it takes and returns as an any that holds a *S.
type program interface {
	planned() *plan
	encode(s any) ([]byte, error)
	decode(data []byte) (any, error)
	merge(into, base, changed any) error
	call(ctx context.Context, unit int, op Op, s any) error
	callTx(ctx context.Context, tx *sql.Tx, unit int, op Op, s any) error
	zero() any

	child(unit int) (program, error) // of a unit with children
	beginChildren(unit int, s any) (states []any, err error)
	endChildren(unit int, s any, states []any) error
}

type typed[S any] struct {
	plan  *plan
	steps []*Step[S] // by unit
	codec Codec[S]
}

// A cachedProgram belongs to one definition. A copy of a definition also copies the cache,
// and may then be changed: of tells the two apart.
type cachedProgram[S any] struct {
	of *Saga[S]
	*typed[S]
}

// program returns the program of the definition, which it checks at the first call.
func (sg *Saga[S]) program() (*typed[S], error) {
	if c, ok := sg.cached.Load().(cachedProgram[S]); ok && c.of == sg {
		return c.typed, nil
	}
	p, err := sg.newPlan()
	if err != nil {
		return nil, err
	}
	t := &typed[S]{plan: p, codec: sg.Codec}
	if t.codec == nil {
		t.codec = jsonCodec[S]{}
	}
	for i := range sg.Steps {
		t.steps = append(t.steps, &sg.Steps[i])
		for j := range sg.Steps[i].Or {
			t.steps = append(t.steps, &sg.Steps[i].Or[j])
		}
	}
	sg.cached.Store(cachedProgram[S]{sg, t})
	return t, nil
}

func (t *typed[S]) planned() *plan { return t.plan }

func (t *typed[S]) encode(s any) ([]byte, error) {
	data, err := func() (data []byte, err error) {
		defer caught(&err)
		return t.codec.Encode(s.(*S))
	}()
	if err != nil {
		return nil, fmt.Errorf("saga: %s: the state does not encode: %w", t.plan.name, err)
	}
	return data, nil
}

func (t *typed[S]) decode(data []byte) (any, error) {
	s := new(S)
	err := func() (err error) {
		defer caught(&err)
		return t.codec.Decode(data, s)
	}()
	if err != nil {
		return nil, fmt.Errorf("saga: %s: the state does not decode: %w", t.plan.name, err)
	}
	return s, nil
}

func (t *typed[S]) merge(into, base, changed any) (err error) {
	defer caught(&err)
	return mergeState(into, base, changed)
}

func (t *typed[S]) call(ctx context.Context, unit int, op Op, s any) error {
	st := t.steps[unit]
	fn, middleware := st.Do, st.Middleware
	if op == OpUndo {
		fn, middleware = st.Undo, st.UndoMiddleware
	}
	if middleware == nil {
		return fn(ctx, s.(*S))
	}
	return middleware(func(ctx context.Context) error { return fn(ctx, s.(*S)) })(ctx)
}

func (t *typed[S]) callTx(ctx context.Context, tx *sql.Tx, unit int, op Op, s any) error {
	if op == OpUndo {
		return t.steps[unit].UndoTx(ctx, tx, s.(*S))
	}
	return t.steps[unit].DoTx(ctx, tx, s.(*S))
}

func (t *typed[S]) zero() any { return new(S) }

func (t *typed[S]) child(unit int) (program, error) { return t.steps[unit].Saga.program() }

func (t *typed[S]) beginChildren(unit int, s any) ([]any, error) {
	return t.steps[unit].Saga.begin(s.(*S))
}

func (t *typed[S]) endChildren(unit int, s any, states []any) error {
	return t.steps[unit].Saga.end(s.(*S), states)
}
