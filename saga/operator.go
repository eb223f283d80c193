package saga

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// Get returns a saga, of any definition, or [ErrNotFound].
func (r *Runner) Get(ctx context.Context, id string) (*Instance, error) {
	rec, err := r.store.Load(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("saga: get %q: %w", id, err)
	}
	return r.instance(rec), nil
}

// List returns the sagas that the filter admits, of all runners and all
// definitions, by ascending id. The next page is After the last id of this one.
func (r *Runner) List(ctx context.Context, f Filter) ([]*Instance, error) {
	recs, err := r.store.List(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("saga: list: %w", err)
	}
	list := make([]*Instance, len(recs))
	for i := range recs {
		list[i] = r.instance(recs[i])
	}
	return list, nil
}

func (r *Runner) instance(rec Record) *Instance {
	if p, err := r.program(Definition{rec.Saga, rec.Version}); err == nil {
		return newInstance(rec, p.planned())
	}
	return newInstance(rec, nil)
}

// History returns the log of a saga, the oldest entry first.
func (r *Runner) History(ctx context.Context, id string) ([]Entry, error) {
	log, err := r.store.History(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("saga: history of %q: %w", id, err)
	}
	if len(log) == 0 {
		return nil, fmt.Errorf("saga: history of %q: %w", id, ErrNotFound)
	}
	return log, nil
}

// Cancel asks a running saga to turn back. It returns as soon as the request is
// recorded; whoever holds the saga ends the attempts that are running, and
// compensates. It is [ErrNotAllowed] if the saga does not run or its pivot is
// done; a request that comes too late for a pivot that is under way has no
// effect. A saga without a pivot turns back until it has completed, also when its
// last step succeeds after the request. To cancel again is no error.
func (r *Runner) Cancel(ctx context.Context, id, note string) error {
	rec, err := r.store.Load(ctx, id)
	if err != nil {
		return fmt.Errorf("saga: cancel of %q: %w", id, err)
	}
	if rec.Status != Running {
		return notAllowed("cancel", &rec)
	}
	if p, err := r.program(Definition{rec.Saga, rec.Version}); err == nil {
		if m, err := loadMachine(p.planned(), &rec); err == nil && m.past() {
			return fmt.Errorf("%w: cancel of %q: its pivot is done", ErrNotAllowed, id)
		}
	}
	rec, err = r.store.Cancel(ctx, id, text(note))
	if err != nil {
		return fmt.Errorf("saga: cancel of %q: %w", id, err)
	}
	if !rec.CancelRequested {
		return notAllowed("cancel", &rec)
	}
	r.mu.Lock()
	e := r.held[id]
	r.mu.Unlock()
	if e != nil {
		e.cancel(rec.CancelNote)
	} else if rec.Owner == "" {
		r.Wake()
	}
	return nil
}

// Retry lets a stuck saga go on in the direction in which it went, with all
// attempts of what has failed, and a saga that waits for its next attempt make
// it now.
func (r *Runner) Retry(ctx context.Context, id, note string) error {
	return r.operate(ctx, "retry", id, func(m *machine) error {
		m.retry(note)
		return nil
	})
}

// SkipStep takes a step, or one of its alternatives, as settled: a person has
// done it, or undone it, or decided that there is no need. In a saga that goes
// forward what comes after the step goes on, and the step is not undone if the
// saga turns back later. The step must have been started and be neither done
// nor undone.
func (r *Runner) SkipStep(ctx context.Context, id, step, note string) error {
	return r.operate(ctx, "skip", id, func(m *machine) error {
		for i := range m.units {
			if m.units[i].Name != step {
				continue
			}
			if !skippable(m.units[i].Status) {
				return fmt.Errorf("%w: skip of step %s of %q: it is %s", ErrNotAllowed, step, id, m.units[i].Status)
			}
			m.skip(i, note)
			return nil
		}
		return fmt.Errorf("%w: skip of %q: no step %q", ErrNotAllowed, id, step)
	})
}

// Compensate turns a saga back that nobody holds and whose pivot is not done, most
// of all a stuck one. A pivot that is in doubt and has no Undo is taken as not done:
// the person knows.
func (r *Runner) Compensate(ctx context.Context, id, note string) error {
	return r.operate(ctx, "compensate", id, func(m *machine) error {
		if m.back || m.past() {
			return fmt.Errorf("%w: compensate of %q: only on its way forward, and if its pivot is not done", ErrNotAllowed, id)
		}
		m.compensate(note)
		return nil
	})
}

// Abandon ends a saga as it is, most of all a stuck one, also of a definition that is
// no longer registered. Nothing more of it is done or undone. If a runner holds it,
// the ctx of its attempts ends, at the latest with the next heartbeat, and their
// results are dropped: it is the way out of an attempt that never ends.
func (r *Runner) Abandon(ctx context.Context, id, note string) error {
	return r.write(ctx, "abandon", id, func(rec *Record) (CommitRequest, error) {
		return CommitRequest{
			Status: Abandoned, Data: rec.Data, Steps: rec.Steps, LastError: rec.LastError,
			Failures: rec.Failures, Takeovers: rec.Takeovers,
			Log: []Entry{{Event: EventAbandoned, Error: text(note)}},
		}, nil
	})
}

// recall makes a saga due whose cancellation was asked for while its owner wrote
// it back to be due later. Should it fail, the saga turns back then.
func (r *Runner) recall(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Lease/2)
	defer cancel()
	err := r.write(ctx, "cancel", id, func(rec *Record) (CommitRequest, error) {
		return CommitRequest{
			Status: rec.Status, Data: rec.Data, Steps: rec.Steps, LastError: rec.LastError,
			Failures: rec.Failures, Takeovers: rec.Takeovers, Log: []Entry{{Event: EventResumed}},
		}, nil
	})
	if err != nil && !errors.Is(err, ErrNotAllowed) {
		r.storeFailed(ctx, err)
	}
}

// operate changes a saga that nobody holds by a person's hand.
func (r *Runner) operate(ctx context.Context, action, id string, change func(*machine) error) error {
	return r.write(ctx, action, id, func(rec *Record) (CommitRequest, error) {
		p, err := r.program(Definition{rec.Saga, rec.Version})
		if err != nil {
			return CommitRequest{}, err
		}
		m, err := loadMachine(p.planned(), rec)
		if err != nil {
			return CommitRequest{}, err
		}
		if err := change(m); err != nil {
			return CommitRequest{}, err
		}
		m.advance(rec.Now)
		var wakeIn time.Duration
		if at, ok := m.wake(rec.Now); ok && at.After(rec.Now) {
			wakeIn = at.Sub(rec.Now)
		}
		return CommitRequest{
			Status: m.status, Data: rec.Data, Steps: m.encode(), LastError: m.lastError,
			Failures: m.failures, Takeovers: m.takeovers, Log: m.log, WakeIn: wakeIn,
		}, nil
	})
}

// write commits what next makes of a record that nobody holds.
func (r *Runner) write(ctx context.Context, action, id string, next func(*Record) (CommitRequest, error)) error {
	for {
		rec, err := r.store.Load(ctx, id)
		if err != nil {
			return fmt.Errorf("saga: %s of %q: %w", action, id, err)
		}
		if rec.Status.Ended() || rec.Owner != "" && action != "abandon" {
			return notAllowed(action, &rec)
		}
		req, err := next(&rec)
		if err != nil {
			return err
		}
		req.ID, req.Epoch, req.Seq, req.Nonce, req.Release = rec.ID, rec.Epoch, rec.Seq, rand.Int64(), true
		_, err = r.store.Commit(ctx, req)
		if errors.Is(err, ErrFenced) {
			continue // somebody was faster: look again
		}
		if err != nil {
			return fmt.Errorf("saga: %s of %q: %w", action, id, err)
		}
		rec.Epoch = req.Epoch
		for i, entry := range req.Log {
			entry.Seq, entry.Epoch, entry.At = req.Seq+1+int64(i), req.Epoch, rec.Now
			r.happened(ctx, &rec, entry)
		}
		r.mu.Lock()
		r.tell(id)
		if e := r.held[id]; e != nil && action == "abandon" {
			e.lose()
		}
		r.mu.Unlock()
		r.Wake()
		return nil
	}
}

func notAllowed(action string, rec *Record) error {
	if rec.Owner != "" {
		return fmt.Errorf("%w: %s of %q: it is %s, held by %s", ErrNotAllowed, action, rec.ID, rec.Status, rec.Owner)
	}
	return fmt.Errorf("%w: %s of %q: it is %s", ErrNotAllowed, action, rec.ID, rec.Status)
}

// What a person can do to a machine.

func skippable(s StepStatus) bool {
	switch s {
	case StepStarted, StepFailed, StepNoEffect, StepUndoing, StepUndoFailed:
		return true
	}
	return false
}

func (m *machine) skip(i int, note string) {
	m.set(i, StepSkipped)
	m.units[i].NotBefore, m.units[i].Refusals = time.Time{}, 0
	m.note(Entry{Step: m.units[i].Name, Event: EventSkipped, Error: note})
	m.unstick()
}

func (m *machine) retry(note string) {
	m.note(Entry{Event: EventRetried, Error: note})
	m.unstick()
	for i := range m.units {
		u := &m.units[i]
		u.NotBefore, u.Refusals = time.Time{}, 0
		switch {
		case u.Status == StepUndoFailed:
			u.Undos = 0
			m.set(i, StepUndoing)
		case !m.back && m.p.units[i].last && (u.Status == StepFailed || u.Status == StepNoEffect):
			u.Attempts = 0
			m.set(i, StepStarted)
		}
	}
}

func (m *machine) compensate(note string) {
	step, cause := m.step, m.cause
	for i := range m.units {
		if m.decides(i) && (m.units[i].Status == StepFailed || m.mustKnow(i)) {
			m.skip(i, note)
		}
	}
	m.unstick()
	m.step, m.cause = step, cause
	if cause == nil && note != "" {
		m.cause = recordedError(note)
	}
	m.turnBack("", note)
}

// unstick takes a stuck saga up again where it was.
func (m *machine) unstick() {
	m.takeovers, m.moved = 0, true
	if m.status != Stuck {
		return
	}
	if m.back {
		m.status = Compensating
		return
	}
	m.status, m.step, m.cause = Running, "", nil
}
