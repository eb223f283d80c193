package saga

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"time"
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
// the signal if tx commits. Nothing is kept if SignalTx returns an error that is
// [ErrNotAllowed] or [ErrNotFound]; tx can still be used. The saga may be one that tx has started. A waiting saga goes
// on at the next poll of a runner; call [Runner.Wake] after the commit to hasten that. Keep
// the rest of tx short, since the saga cannot be written meanwhile. The store must be a
// [TxStore].
func (r *Runner) SignalTx(ctx context.Context, tx *sql.Tx, id, name string, payload []byte) error {
	if r.tx == nil {
		return fmt.Errorf("%w: SignalTx of %q", ErrNoTx, id)
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
func (r *Runner) signalRequest(id, name string, payload []byte) SignalRequest {
	return SignalRequest{ID: id, Name: name, Payload: payload, Admit: func(rec *Record) error {
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
	if !validName(name) {
		return fmt.Errorf("saga: the name of the signal is %s: must be 1 to %d bytes of UTF-8 without NUL", quoted(name), maxName)
	}
	if len(payload) > maxPayload {
		return fmt.Errorf("saga: the payload of signal %q has %d bytes: must be at most %d", name, len(payload), maxPayload)
	}
	return nil
}

// awaited returns an error if no step of a registered definition awaits the signal.
func (r *Runner) awaited(rec *Record, name string) error {
	p, err := r.program(Definition{rec.Saga, rec.Version})
	if err != nil {
		return nil // another process knows
	}
	for i := range p.planned().units {
		if p.planned().units[i].await == name {
			return nil
		}
	}
	return fmt.Errorf("%w: no step of %s version %d awaits it", ErrNotAllowed, rec.Saga, rec.Version)
}

// tellHeld tells the execution of a saga that this runner holds to look around, and
// reports whether there is one. One that is lost, and only waits for its attempts, is none.
func (r *Runner) tellHeld(id string) bool {
	r.mu.Lock()
	e := r.held[id]
	r.mu.Unlock()
	if e == nil || e.lost() {
		return false
	}
	e.mu.Lock()
	e.news = true
	e.mu.Unlock()
	e.nudge()
	return true
}

type signalsKey struct{}

// SignalFrom returns the payload of a signal in the ctx of a Do, Undo, DoTx or UndoTx. ok
// is false if the saga had no signal of that name when its steps last began. The payload is
// the caller's own.
func SignalFrom(ctx context.Context, name string) (payload []byte, ok bool) {
	c, _ := ctx.Value(signalsKey{}).(*attemptContext)
	if c == nil {
		return nil, false
	}
	signals := c.saga.signals.Load()
	if signals == nil {
		return nil, false
	}
	payload, ok = (*signals)[name]
	return bytes.Clone(payload), ok
}

// takeNews reports whether something outside may have happened since it was last asked.
func (e *execution) takeNews() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	news := e.news
	e.news = false
	return news
}

// hear reads the signals, if there may be new ones. It reports false if it could not.
func (e *execution) hear(now time.Time) bool {
	if e.txUnit < 0 && e.m.timeUp(now) {
		e.heard = time.Time{} // the last look before the step goes on without its signal
	}
	if e.takeNews() {
		e.m.lookAgain()
		e.heard = time.Time{}
	}
	if !e.plan.awaits {
		return true
	}
	last := e.rec.Status != Running // no signal is kept any more
	due := e.heard.IsZero() || e.m.awaiting(now) && time.Since(e.heard) >= e.r.config().Poll
	if !due && (!last || e.heardLast) {
		return true
	}
	began := time.Now()
	signals, err := e.readSignals()
	if err != nil {
		if e.deaf.IsZero() {
			e.deaf = began
		}
		e.pause(e.deaf)
		return false
	}
	e.heard, e.heardLast, e.deaf = began, last, time.Time{}
	e.m.signals = signals
	e.id.signals.Store(&signals)
	return true
}

func (e *execution) readSignals() (map[string][]byte, error) {
	ctx, cancel := e.storeCtx()
	defer cancel()
	list, err := e.r.store.Signals(ctx, e.rec.ID)
	if err != nil {
		e.r.storeFailed(e.ctx, fmt.Errorf("saga: signals of %q: %w", e.rec.ID, err))
		return nil, err
	}
	signals := make(map[string][]byte, len(list))
	for _, sig := range list {
		signals[sig.Name] = sig.Payload
	}
	return signals, nil
}

// lookBack makes a saga due again that was written back to wait for something outside,
// if that has happened before the record was written: a signal or the end of a child makes
// only those sagas due that nobody holds. If the process dies in between, the saga is
// looked at again when wakeOutside says.
func (e *execution) lookBack() {
	if !e.over || e.m == nil || e.m.status != Running && e.m.status != Compensating || !e.m.outside(e.now()) {
		return
	}
	if !e.takeNews() && !e.signaled() && !e.childrenSettled() {
		return
	}
	ctx, cancel := e.storeCtx()
	defer cancel()
	if err := e.r.store.Hasten(ctx, e.rec.ID); err != nil {
		e.r.storeFailed(e.ctx, fmt.Errorf("saga: hasten %q: %w", e.rec.ID, err))
	}
	e.r.Wake()
}

// signaled reports whether there is a signal that a step waits for.
func (e *execution) signaled() bool {
	if !e.plan.awaits {
		return false
	}
	signals, err := e.readSignals()
	if err != nil {
		return false
	}
	for i := range e.m.units {
		name := e.plan.units[i].await
		_, is := signals[name]
		if _, known := e.m.signals[name]; is && !known && e.m.units[i].Status == StepWaiting {
			return true
		}
	}
	return false
}
