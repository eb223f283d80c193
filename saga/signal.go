package saga

import (
	"context"
	"database/sql"
	"fmt"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/plan"
)

// maxPayload is how many bytes the payload of a signal has at most.
const maxPayload = 64 << 10

// Signal tells a saga that something outside has happened: the payment that a step with
// the Await name waits for has arrived. It may come before the saga gets to that step.
// The step then does not wait, and SignalFrom returns the payload in this step and all
// others.
//
// A saga has one signal of each name: a signal that comes again changes nothing, and its
// payload is dropped. So a webhook can be repeated, and Signal can be repeated after an
// error. The payload has up to 64 KiB.
//
// Signal returns [ErrNotFound] if there is no such saga, and [ErrNotAllowed] if the saga
// has turned back or ended without such a signal, or no step of its definition awaits it.
// If the definition is not registered with this runner, any name is accepted. A name that no
// step awaits then has no effect, and stays until the saga is deleted: in a process that only
// signals, register the definitions all the same.
//
// Consider a payment that arrives while the customer cancels. Either Signal returns
// ErrNotAllowed, and its caller pays back, or each Undo of the saga sees the signal by
// SignalFrom, even if no step has waited for it yet: let the Undo of a step before pay
// back.
func (r *Runner) Signal(ctx context.Context, id, name string, payload []byte) error {
	if err := checkSignal(name, payload); err != nil {
		return err
	}
	rec, err := r.store.Signal(ctx, r.signalRequest(id, name, payload))
	if err != nil {
		return fmt.Errorf("saga: signal %q of %q: %w", name, id, err)
	}
	if !r.tellHeld(id) && rec.Owner == "" {
		r.Wake()
	}
	return nil
}

// SignalTx is Signal within tx, a transaction of the store's own database: the saga has
// the signal if tx commits. The saga may be one that tx has started. If SignalTx returns an
// error that is [ErrNotAllowed] or [ErrNotFound], nothing is kept, and tx can still be used.
// A waiting saga goes on at the next poll of a runner; call [Runner.Wake] after the commit to
// hasten that. Keep the rest of tx short, since the saga cannot be written meanwhile. The
// store must be one of sqlstore.
func (r *Runner) SignalTx(ctx context.Context, tx *sql.Tx, id, name string, payload []byte) error {
	if r.tx == nil {
		return fmt.Errorf("%w: SignalTx of %q", errNoTx, id)
	}
	if err := checkSignal(name, payload); err != nil {
		return err
	}
	if _, err := r.tx.SignalTx(ctx, tx, r.signalRequest(id, name, payload)); err != nil {
		return fmt.Errorf("saga: signal %q of %q: %w", name, id, err)
	}
	return nil
}

// signalRequest returns the request of a signal. A saga that has turned back must not take
// it: Undos may have run without it.
func (r *Runner) signalRequest(id, name string, payload []byte) store.SignalRequest {
	return store.SignalRequest{ID: id, Name: name, Payload: payload, Admit: func(rec *store.Record) error {
		if err := r.awaited(rec, name); err != nil {
			return err
		}
		switch {
		case rec.Status == Stuck && newInstance(*rec, nil).Back:
			return fmt.Errorf("%w: it is stuck on its way back", ErrNotAllowed)
		case rec.Status != Running && rec.Status != Stuck:
			return fmt.Errorf("%w: it is %s", ErrNotAllowed, rec.Status)
		}
		return nil
	}}
}

func checkSignal(name string, payload []byte) error {
	if !plan.ValidName(name) {
		return fmt.Errorf("saga: the name of the signal is %s: must be 1 to %d bytes of UTF-8 without NUL", plan.Quoted(name, plan.MaxName), plan.MaxName)
	}
	if len(payload) > maxPayload {
		return fmt.Errorf("saga: the payload of signal %q has %d bytes: must be at most %d", name, len(payload), maxPayload)
	}
	return nil
}

// awaited returns an error if no step of a registered definition awaits the signal.
func (r *Runner) awaited(rec *store.Record, name string) error {
	p, err := r.program(rec.Saga, rec.Version)
	if err != nil {
		return nil // another process knows
	}
	for i := range p.planned().Units {
		if p.planned().Units[i].Await == name {
			return nil
		}
	}
	return fmt.Errorf("%w: no step of %s version %d awaits it", ErrNotAllowed, rec.Saga, rec.Version)
}
