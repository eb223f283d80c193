package saga

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"reflect"

	"github.com/go-resilience/resilience/saga/internal/plan"
)

type typed[S any] struct {
	plan  *plan.Plan
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
	cached := sg.cached.Load()
	if c, _ := cached.(cachedProgram[S]); c.of == sg {
		return c.typed, nil
	}
	p, err := plan.New(sg.definition())
	if err != nil {
		return nil, err
	}
	t := &typed[S]{plan: p, codec: sg.Codec}
	if t.codec == nil {
		t.codec = jsonCodec[S]{}
	}
	for i := range sg.Steps {
		t.steps = append(t.steps, &sg.Steps[i])
	}
	if !sg.cached.CompareAndSwap(cached, cachedProgram[S]{sg, t}) {
		return sg.program() // another first call, which Register must not take for another definition
	}
	return t, nil
}

func (t *typed[S]) planned() *plan.Plan { return t.plan }

// encode returns bytes of its own, and decode passes a copy on: a Codec may share its bytes with
// the state, which a step changes.
func (t *typed[S]) encode(s any) ([]byte, error) {
	data, err := t.codec.Encode(s.(*S))
	if err != nil {
		return nil, fmt.Errorf("saga: %s: the state does not encode: %w", t.plan.Name, err)
	}
	return append([]byte{}, data...), nil
}

func (t *typed[S]) decode(data []byte) (any, error) {
	s := new(S)
	if err := t.codec.Decode(bytes.Clone(data), s); err != nil {
		return nil, fmt.Errorf("saga: %s: the state does not decode: %w", t.plan.Name, err)
	}
	return s, nil
}

// encodeFirst is encode for the state of a new saga. It returns an error if the state does not come
// back from its Codec: the saga would be stuck, or go on with another state, when another process
// takes it over. A Codec may write the same state in different ways.
func (t *typed[S]) encodeFirst(s any) ([]byte, error) {
	data, err := t.encode(s)
	if err != nil {
		return nil, err
	}
	back, err := t.decode(data)
	if err != nil {
		return nil, err
	}
	again, err := t.encode(back)
	if err != nil || bytes.Equal(data, again) || reflect.DeepEqual(s, back) {
		return data, err
	}
	if _, ok := t.codec.(jsonCodec[S]); !ok {
		if twice, err := t.decode(again); err != nil || reflect.DeepEqual(back, twice) {
			return data, err
		}
	}
	return nil, fmt.Errorf("saga: %s: the state does not come back as it was: %.200q and then %.200q", t.plan.Name, data, again)
}

func (t *typed[S]) call(ctx context.Context, unit int, op Op, s any) error {
	st := t.steps[unit]
	fn := st.Do
	if op == OpUndo {
		fn = st.Undo
	}
	if st.Middleware == nil {
		return fn(ctx, s.(*S))
	}
	return st.Middleware(func(ctx context.Context) error { return fn(ctx, s.(*S)) })(ctx)
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

// definition returns the definition without the type of its state.
func (sg *Saga[S]) definition() *plan.Definition {
	d := &plan.Definition{Name: sg.Name, Version: sg.Version, Deadline: sg.Timeout, Steps: make([]plan.Step, len(sg.Steps))}
	for i := range sg.Steps {
		st := &sg.Steps[i]
		d.Steps[i] = plan.Step{
			Name: st.Name, Parallel: st.Parallel, ReadOnly: st.ReadOnly, Pivot: st.Pivot,
			Do: st.Do != nil, Undo: st.Undo != nil, DoTx: st.DoTx != nil, UndoTx: st.UndoTx != nil,
			Middleware: st.Middleware != nil,
			Child:      st.Saga != nil, ChildOf: st.Saga != nil && st.Saga.begin != nil,
			ChildPivot: st.Saga != nil && st.Saga.pivot != nil && st.Saga.pivot(),
			Delay:      st.Delay, Await: st.Await, AwaitFor: st.AwaitFor,
			Timeout: st.Timeout, Attempts: st.Attempts, UndoAttempts: st.UndoAttempts, Backoff: st.Backoff,
		}
		if st.Backoff == nil {
			d.Steps[i].Backoff = defaultBackoff
		}
	}
	return d
}

// checkState returns an error if the default Codec does not keep the whole state.
func (t *typed[S]) checkState() error {
	if _, ok := t.codec.(jsonCodec[S]); !ok {
		return nil
	}
	if field := unkept(reflect.TypeFor[S]()); field != "" {
		return fmt.Errorf("saga: %s: s%s is not kept by JSON and would be lost when a saga is taken over: export it without the tag \"-\", or set Codec",
			t.plan.Name, field)
	}
	return nil
}

// Validate returns an error that lists everything that is wrong with the definition,
// or nil.
func (sg *Saga[S]) Validate() error {
	_, err := plan.New(sg.definition())
	return err
}
