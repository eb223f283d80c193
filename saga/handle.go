package saga

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/go-resilience/resilience/internal/ended"
)

// A Handle starts sagas of one definition and gives access to them. [Register] returns a Handle. A Handle is safe for
// concurrent use.
type Handle[S any] struct {
	engine   Engine
	current  *Definition
	versions map[int]*program // the programs of current and of the older definitions, by version
}

// Register registers a definition (current) with an engine, usually a [*Runner], and returns a Handle for the
// definition. Register also registers the older versions of the definition, and the definitions of child sagas. New
// sagas use the current definition. Sagas of an older version continue with the definition of that version. Register
// may be called again with the same definitions.
//
// Register panics in these cases:
//
//   - A definition is invalid. Call [Saga.Validate] first if the definition is built at run time.
//   - A definition needs transactions and the engine has none.
//   - A different definition with the same name and version is registered already.
//   - A definition has no Codec, and JSON does not keep all fields of S.
//   - An older definition has a different Name from the current definition.
func Register[S any](e Engine, current *Saga[S], older ...*Saga[S]) *Handle[S] {
	h := &Handle[S]{engine: e, versions: make(map[int]*program, 1+len(older))}
	for _, sg := range append([]*Saga[S]{current}, older...) {
		d, err := Define(sg)
		if err == nil && sg.Name != current.Name {
			err = fmt.Errorf("saga: older definition is one of %q, not of %q", sg.Name, current.Name)
		}
		if err == nil {
			err = d.p.kept()
		}
		if err == nil {
			err = e.Register(d)
		}
		if err != nil {
			panic(err)
		}
		if h.current == nil {
			h.current = d
		}
		h.versions[sg.Version] = d.p
	}
	return h
}

// Start starts a saga with the state s. Once Start has returned nil, the saga is recorded. Runners then continue it
// until it ends or is stuck, in this process or another.
//
// The id has 1 to 200 bytes of UTF-8 without NUL. If a saga with the id exists already, Start changes nothing and
// returns that saga. So Start can be repeated after an error. If the existing saga is of another definition, the error
// matches [ErrExists]. Start also returns an error if the encoded state cannot be decoded or, without a Codec, if
// decoding does not restore s.
func (h *Handle[S]) Start(ctx context.Context, id string, s S) (*Instance, error) {
	data, err := h.encode(ctx, &s)
	if err != nil {
		return nil, err
	}
	return h.engine.Start(ctx, h.current, id, data)
}

// StartTx is like [Handle.Start], but it starts the saga in tx, a transaction of the store's database. The saga exists
// if tx commits. A runner finds the saga at the runner's next poll, or after a call to [Runner.Wake]. Observers are
// notified of [EventCreated] only when a runner has found the saga. The error matches [ErrNoTx] if the engine has no
// transactions.
func (h *Handle[S]) StartTx(ctx context.Context, tx *sql.Tx, id string, s S) error {
	engine, ok := h.engine.(TxEngine)
	if !ok {
		return fmt.Errorf("%w: StartTx of %q", ErrNoTx, id)
	}
	data, err := h.encode(ctx, &s)
	if err != nil {
		return err
	}
	return engine.StartTx(ctx, tx, h.current, id, data)
}

// encode returns the encoded state of a saga that will be started.
func (h *Handle[S]) encode(ctx context.Context, s *S) ([]byte, error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	return h.current.p.encodeNew(s)
}

// Result waits until the saga has ended or is stuck, and returns its state. Any process may run the saga. If the saga
// has not completed, Result returns an [*Error] together with the state.
//
// If ctx is done first, Result returns a zero state, and an error that matches ctx.Err() and includes the store's
// latest error. If there is no such saga, the error matches [ErrNotFound]. If the saga's version was not passed to
// [Register], the error matches [ErrNotRegistered].
//
// Do not call Result in a step. While a step waits in Result, the step's saga would occupy a place in its runner; see
// RunnerConfig.Concurrency. If a step has to wait for another saga, make that saga a child; see [ChildOf].
func (h *Handle[S]) Result(ctx context.Context, id string) (S, error) {
	in, err := h.engine.Wait(ctx, id)
	if err != nil {
		var none S
		return none, err
	}
	s, err := h.decode(in)
	if err != nil || in.Status == Completed {
		return s, err
	}
	return s, in.failure()
}

// Get returns the saga and its current state. If there is no such saga, the error matches [ErrNotFound]. If the saga's
// version was not passed to [Register], the error matches [ErrNotRegistered], and the Instance is returned with the
// error.
func (h *Handle[S]) Get(ctx context.Context, id string) (*Instance, S, error) {
	in, err := h.engine.Get(ctx, id)
	if err != nil {
		var none S
		return nil, none, err
	}
	s, err := h.decode(in)
	return in, s, err
}

// decode returns the state of a saga of one of the handle's definitions.
func (h *Handle[S]) decode(in *Instance) (s S, err error) {
	p := h.versions[in.Version]
	if in.Saga != h.current.p.name || p == nil {
		return s, h.notRegistered(in)
	}
	decoded, err := p.decode(in.State)
	if err != nil {
		return s, err
	}
	return *decoded.(*S), nil
}

// notRegistered is the error for a saga of a definition or version that h lacks.
func (h *Handle[S]) notRegistered(in *Instance) error {
	return fmt.Errorf("%w: %q is of %s version %d, which the handle of %s lacks",
		ErrNotRegistered, in.ID, in.Saga, in.Version, h.current.p.name)
}

// Signal records an external event for the saga. The name is the Await of the step that waits, or will wait, for the
// signal. In that step, [SignalFrom] returns the payload. The payload has up to 64 KiB. The saga keeps only the first
// signal of each name, so Signal can be repeated. The saga may be of any definition.
//
// The error matches [ErrNotFound] if there is no such saga. The error matches [ErrNotAllowed] if no step awaits the
// signal, or if the saga turned back or ended before a signal of that name arrived. If the saga's definition is not
// registered in this process, Signal cannot find out whether a step awaits the signal, and records it.
//
// If Signal returned nil, SignalFrom returns the payload in the Do of the step that awaits the signal, and in the Do of
// each later step. If the saga turns back, SignalFrom also returns the payload in each Undo. So if a signal reports a
// payment, and the customer cancels at the same time, the payment can always be refunded. If Signal returns an error,
// the caller of Signal must refund the payment. If Signal returns nil and the saga turns back, the Undo of a step
// before the wait must refund the payment. Do not accept a payment until the step with this Undo is done. Otherwise the
// payment might not be refunded, because a step that never started or took no effect is not undone.
func (h *Handle[S]) Signal(ctx context.Context, id, name string, payload []byte) error {
	return h.engine.Signal(ctx, id, name, payload)
}

// SignalTx is like [Handle.Signal], but it records the signal in tx, a transaction of the store's database. The same
// transaction may have started the saga. If the error matches [ErrNotAllowed] or [ErrNotFound], tx can still be used.
// The error matches [ErrNoTx] if the engine has no transactions.
func (h *Handle[S]) SignalTx(ctx context.Context, tx *sql.Tx, id, name string, payload []byte) error {
	engine, ok := h.engine.(TxEngine)
	if !ok {
		return fmt.Errorf("%w: SignalTx of %q", ErrNoTx, id)
	}
	return engine.SignalTx(ctx, tx, id, name, payload)
}

// Cancel records a request to turn a running saga back; it does not wait until the saga has turned back. A step in
// progress may still succeed. A pivot without Undo is still retried while the pivot's outcome is unknown.
// [Handle.Result] returns how the saga has ended. If there is no such saga, the error matches [ErrNotFound]. If the
// saga is not running, or its pivot is done, the error matches [ErrNotAllowed]. If the saga is of another definition,
// the error matches [ErrNotRegistered]. About the first 4,000 bytes of the note are written to the saga's log.
func (h *Handle[S]) Cancel(ctx context.Context, id, note string) error {
	in, err := h.engine.Get(ctx, id)
	if err != nil {
		return err
	}
	if in.Saga != h.current.p.name {
		return h.notRegistered(in)
	}
	return h.engine.Operate(ctx, id, Operation{Action: ActionCancel, Note: note})
}
