package saga

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/go-resilience/resilience/internal/ended"
)

// A Handle starts sagas of one definition and gives access to them. [Register] returns one. A Handle is safe for
// concurrent use.
type Handle[S any] struct {
	engine   Engine
	current  *Definition
	versions map[int]*program // current and the older ones
}

// Register registers a definition, and those of its children, with an engine, usually a [*Runner], and returns the
// handle for it. Sagas of older versions continue to run; new ones are of the version of current. Register may be
// called again with the same definitions.
//
// Register panics if a definition is invalid, needs transactions that the engine lacks, has a name and version that
// another definition is registered with, or if JSON does not keep all fields of S and there is no Codec. It also panics
// if an older definition has another Name than current. Call Validate first on a definition that is built at run time.
func Register[S any](e Engine, current *Saga[S], older ...*Saga[S]) *Handle[S] {
	h := &Handle[S]{engine: e, versions: make(map[int]*program, 1+len(older))}
	for _, sg := range append([]*Saga[S]{current}, older...) {
		d, err := Define(sg)
		if err == nil && sg.Name != current.Name {
			err = fmt.Errorf("saga: the older definition is one of %q, not of %q", sg.Name, current.Name)
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

// Start starts a saga with the state s. When it returns nil, the saga is recorded and will end, in this process or
// another.
//
// If the id, of 1 to 200 bytes, exists already, Start changes nothing and returns that saga, so that Start can be
// repeated after an error. If that saga is of another definition, the error matches [ErrExists]. It is also an error
// if decoding the encoded state does not return s.
func (h *Handle[S]) Start(ctx context.Context, id string, s S) (*Instance, error) {
	data, err := h.encode(ctx, &s)
	if err != nil {
		return nil, err
	}
	return h.engine.Start(ctx, h.current, id, data)
}

// StartTx is Start within tx, a transaction of the store's database: the saga exists if tx commits. A runner finds it
// at its next poll, or after [Runner.Wake], and then reports [EventCreated]. The error matches [ErrNoTx] if the
// engine has no transactions.
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

// encode returns the encoded state of a saga that is to be started.
func (h *Handle[S]) encode(ctx context.Context, s *S) ([]byte, error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	return h.current.p.encodeNew(s)
}

// Result waits until the saga has ended, in whichever process, or is stuck, and returns its state. If the saga has not
// completed, the error is an [*Error], and the state is returned with it.
//
// If ctx ends first, the error matches ctx.Err(), names the latest error of the store, and the state is zero. If
// there is no such saga, the error matches [ErrNotFound]. If the saga is of a version that the handle lacks, it
// matches [ErrNotRegistered].
//
// A step that waits for the Result of another saga keeps its place in the runner: make that saga a child.
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

// Get returns the saga and its state as they are now. The error matches [ErrNotFound] if there is no such saga, and
// [ErrNotRegistered] if the saga is of a version that the handle lacks. Then the Instance is returned with the error.
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

// Signal records an event outside the saga, for which a step with the Await name waits, or will wait. [SignalFrom]
// returns the payload, of up to 64 KiB. The first signal of a name is kept, so Signal can be repeated.
//
// The error matches [ErrNotFound] if there is no such saga, and [ErrNotAllowed] if the saga has turned back or ended
// without such a signal, or has no step that awaits it. It does not matter of which definition the saga is.
//
// If Signal returned nil, SignalFrom returns the payload in each later Do and Undo, even if the saga turns back. So a
// payment that arrives while the customer cancels can be paid back: by the caller of Signal if there is an error, and
// otherwise by the Undo of a step before the wait. Take no payment before that step is done: a step that never
// started, or took no effect, is not undone.
func (h *Handle[S]) Signal(ctx context.Context, id, name string, payload []byte) error {
	return h.engine.Signal(ctx, id, name, payload)
}

// SignalTx is Signal within tx, a transaction of the store's database, which may also have started the saga. After
// [ErrNotAllowed] and [ErrNotFound], tx can still be used. The error matches [ErrNoTx] if the engine has no
// transactions.
func (h *Handle[S]) SignalTx(ctx context.Context, tx *sql.Tx, id, name string, payload []byte) error {
	engine, ok := h.engine.(TxEngine)
	if !ok {
		return fmt.Errorf("%w: SignalTx of %q", ErrNoTx, id)
	}
	return engine.SignalTx(ctx, tx, id, name, payload)
}

// Cancel asks a running saga to turn back, and returns once that is recorded. A step in progress may succeed first, and
// a pivot without Undo whose outcome is unknown is still retried: Result returns how the saga has ended. If the saga is
// not running, or its pivot is done, the error matches [ErrNotAllowed]. If the saga is of another definition, it
// matches [ErrNotRegistered]. The note is logged with the saga.
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
