package saga

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// An Action is an operator's way to change the course of a saga.
type Action string

// The actions, each of which is a method of [Runner].
const (
	ActionCancel     Action = "cancel"     // Runner.Cancel
	ActionRetry      Action = "retry"      // Runner.Retry
	ActionSkip       Action = "skip"       // Runner.SkipStep
	ActionCompensate Action = "compensate" // Runner.Compensate
	ActionAbandon    Action = "abandon"    // Runner.Abandon
)

// Get returns a saga of any definition, or [ErrNotFound].
func (r *Runner) Get(ctx context.Context, id string) (*Instance, error) {
	rec, err := r.store.Load(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("saga: get %q: %w", id, err)
	}
	return r.instance(rec), nil
}

// A Page is a part of a list.
type Page struct {
	Sagas []*Instance
	Next  string // the Filter.After of the following page; "" if this is the last
}

// List returns a page of the sagas that the filter admits, of all definitions and runners.
// For the following page, set Filter.After to the Next of this one.
//
// The time that List takes does not grow with the number of sagas in the store. A store
// in a database reads a bounded number of sagas for each page. Where few of them meet the
// conditions, a page has fewer sagas than Filter.Limit, or none, and there is a Next.
func (r *Runner) List(ctx context.Context, f Filter) (Page, error) {
	recs, next, err := r.store.List(ctx, f)
	if err != nil {
		return Page{}, fmt.Errorf("saga: list: %w", err)
	}
	list := make([]*Instance, len(recs))
	for i := range recs {
		list[i] = r.instance(recs[i])
	}
	return Page{list, next}, nil
}

// Counts counts the sagas of all definitions and runners.
func (r *Runner) Counts(ctx context.Context) (Counts, error) {
	counts, err := r.store.Counts(ctx)
	if err != nil {
		return Counts{}, fmt.Errorf("saga: counts: %w", err)
	}
	return counts, nil
}

func (r *Runner) instance(rec Record) *Instance {
	if p, err := r.program(Definition{rec.Saga, rec.Version}); err == nil {
		return newInstance(rec, p.planned())
	}
	return newInstance(rec, nil)
}

// History returns the log of a saga, the oldest entry first, or [ErrNotFound].
func (r *Runner) History(ctx context.Context, id string) ([]Entry, error) {
	log, err := r.HistoryPage(ctx, id, 0, 0)
	if err == nil && len(log) == 0 {
		err = fmt.Errorf("saga: history of %q: %w", id, ErrNotFound)
	}
	return log, err
}

// HistoryPage returns up to limit entries of the log of a saga, from the first whose Seq
// is greater than after. It returns none after the last entry, or if there is no such
// saga. A limit of zero means no limit.
func (r *Runner) HistoryPage(ctx context.Context, id string, after int64, limit int) ([]Entry, error) {
	log, err := r.store.History(ctx, id, after, limit)
	if err != nil {
		return nil, fmt.Errorf("saga: history of %q: %w", id, err)
	}
	return log, nil
}

// Cancel asks a running saga to turn back. It returns as soon as the request is recorded.
// The owner of the saga then ends the running attempts, and compensates.
//
// Cancel returns [ErrNotAllowed] if the saga is not running or its pivot is done. A
// request that comes while the pivot is under way has no effect if the pivot succeeds. A
// saga without a pivot turns back if the request reaches its owner before the last result
// is recorded: immediately in the owner's own process, and from another process with the
// owner's next commit or heartbeat. A request that is too late has no effect, so Result
// tells how the saga has ended. To cancel again a saga that still runs is no error.
func (r *Runner) Cancel(ctx context.Context, id, note string) error {
	rec, err := r.store.Load(ctx, id)
	if err != nil {
		return fmt.Errorf("saga: cancel of %q: %w", id, err)
	}
	if rec.Status != Running {
		return notAllowed(ActionCancel, &rec)
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
		return notAllowed(ActionCancel, &rec)
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

// Retry lets a stuck saga continue in its direction: the steps that have failed get all
// their attempts again, except for BestEffort steps, without which the saga has gone on. A
// saga whose steps wait for their next attempt makes it now; Delay, AwaitFor and Settle
// stay as they are. Of a step with children that has failed, those that were compensated or
// abandoned are started again, under new ids (see [ChildID]): mend first what they failed
// for. Retry returns [ErrNotAllowed] while a runner holds the saga.
func (r *Runner) Retry(ctx context.Context, id, note string) error {
	return r.retry(ctx, id, Operation{Note: note})
}

func (r *Runner) retry(ctx context.Context, id string, op Operation) error {
	return r.operate(ctx, ActionRetry, id, op.Seq, func(m *machine) error {
		m.retry(op.Note)
		return nil
	})
}

// SkipStep declares a step, or one of its alternatives, settled: an operator has done it,
// or undone it, or decided that there is no need to. A saga that goes forward continues
// after the step, and does not undo it if it turns back later. The step must be waiting or
// have been started, and be neither done nor undone, and a saga that goes forward must have
// no other alternative of it under way. SkipStep returns [ErrNotAllowed] while a runner
// holds the saga.
func (r *Runner) SkipStep(ctx context.Context, id, step, note string) error {
	return r.skip(ctx, id, Operation{Step: step, Note: note})
}

func (r *Runner) skip(ctx context.Context, id string, op Operation) error {
	step := op.Step
	return r.operate(ctx, ActionSkip, id, op.Seq, func(m *machine) error {
		for i := range m.units {
			if m.units[i].Name != step {
				continue
			}
			if !skippable(m.units[i].Status) {
				return fmt.Errorf("%w: skip of step %s of %q: it is %s", ErrNotAllowed, step, id, m.units[i].Status)
			}
			if at, other := m.node(m.p.units[i].node); !m.back && at == nodeAtWork && other != i {
				return fmt.Errorf("%w: skip of step %s of %q: its alternative %s is %s", ErrNotAllowed, step, id, m.units[other].Name, m.units[other].Status)
			}
			m.skip(i, op.Note)
			return nil
		}
		return fmt.Errorf("%w: skip of %q: no step %q", ErrNotAllowed, id, step)
	})
}

// Compensate turns back a saga that no runner holds and whose pivot is not done, such as
// a stuck one. A pivot in doubt that has no Undo counts as not done: the operator is
// assumed to know.
func (r *Runner) Compensate(ctx context.Context, id, note string) error {
	return r.compensate(ctx, id, Operation{Note: note})
}

func (r *Runner) compensate(ctx context.Context, id string, op Operation) error {
	return r.operate(ctx, ActionCompensate, id, op.Seq, func(m *machine) error {
		if m.back || m.past() {
			return fmt.Errorf("%w: compensate of %q: only on its way forward, and if its pivot is not done", ErrNotAllowed, id)
		}
		m.compensate(op.Note)
		return nil
	})
}

// Abandon ends a saga as it is. Nothing more is done or undone. The definition need not be
// registered.
//
// If a runner holds the saga, the ctx of its attempts ends, at the latest at the next
// heartbeat, and their results are dropped. Consider an attempt that never returns:
// Abandon is the way to give up its saga.
func (r *Runner) Abandon(ctx context.Context, id, note string) error {
	return r.abandon(ctx, id, Operation{Note: note})
}

func (r *Runner) abandon(ctx context.Context, id string, op Operation) error {
	return r.write(ctx, ActionAbandon, id, op.Seq, func(rec *Record) (CommitRequest, error) {
		return CommitRequest{
			Status: Abandoned, Steps: rec.Steps, LastError: rec.LastError,
			Failures: rec.Failures, Takeovers: rec.Takeovers,
			Log: []Entry{{Kind: EventAbandoned, Error: text(op.Note)}},
		}, nil
	})
}

// recall makes a saga due now whose cancellation was requested before it was written back
// to be due later. If recall fails, the saga turns back when it is due.
func (r *Runner) recall(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.config().LeaseTTL/2)
	defer cancel()
	err := r.write(ctx, ActionCancel, id, 0, func(rec *Record) (CommitRequest, error) {
		return CommitRequest{
			Status: rec.Status, Steps: rec.Steps, LastError: rec.LastError,
			Failures: rec.Failures, Takeovers: rec.Takeovers, Log: []Entry{{Kind: EventResumed}},
		}, nil
	})
	if err != nil && !errors.Is(err, ErrNotAllowed) {
		r.storeFailed(ctx, err)
	}
}

// operate applies an operator's change to a saga that no runner holds.
func (r *Runner) operate(ctx context.Context, action Action, id string, seq int64, change func(*machine) error) error {
	return r.write(ctx, action, id, seq, func(rec *Record) (CommitRequest, error) {
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
		// What has come from outside is not known here: the next owner looks.
		if at, ok := m.wake(rec.Now); ok && at.After(rec.Now) && !m.outside(rec.Now) {
			wakeIn = at.Sub(rec.Now)
		}
		return CommitRequest{
			Status: m.status, Steps: m.encode(), LastError: m.lastError,
			Failures: m.failures, Takeovers: m.takeovers, Log: m.log, WakeIn: wakeIn,
		}, nil
	})
}

// write loads a saga, and commits the request that next makes of the record, whose Seq must be
// seq unless that is zero.
func (r *Runner) write(ctx context.Context, action Action, id string, seq int64, next func(*Record) (CommitRequest, error)) error {
	for {
		rec, err := r.store.Load(ctx, id)
		if err != nil {
			return fmt.Errorf("saga: %s of %q: %w", action, id, err)
		}
		if rec.Status.Ended() || rec.Owner != "" && action != ActionAbandon {
			return notAllowed(action, &rec)
		}
		if seq != 0 && rec.Seq != seq {
			return fmt.Errorf("%w: %s of %q: its log has grown from %d entries to %d", ErrNotAllowed, action, id, seq, rec.Seq)
		}
		req, err := next(&rec)
		if err != nil {
			return err
		}
		req.ID, req.Epoch, req.Seq, req.Nonce, req.Release = rec.ID, rec.Epoch, rec.Seq, rand.Int64(), true
		receipt, err := r.store.Commit(ctx, req)
		if errors.Is(err, ErrFenced) {
			continue // another write came first
		}
		if err != nil {
			return fmt.Errorf("saga: %s of %q: %w", action, id, err)
		}
		rec.Status = req.Status
		r.tellLog(ctx, &rec, req)
		r.mu.Lock()
		r.wakeResults(id)
		if e := r.held[id]; e != nil && action == ActionAbandon {
			e.lose()
		}
		r.mu.Unlock()
		if req.Status.Ended() {
			r.tellParent(ctx, &rec)
		}
		if receipt.CancelRequested && req.Status == Running && req.WakeIn > 0 {
			r.recall(ctx, id)
		}
		r.Wake()
		return nil
	}
}

// tellLog tells of the log of a commit to a saga that this runner does not hold.
func (r *Runner) tellLog(ctx context.Context, rec *Record, req CommitRequest) {
	for i, entry := range req.Log {
		entry.Seq, entry.Epoch, entry.At = req.Seq+1+int64(i), req.Epoch, rec.Now
		r.happened(ctx, rec, entry)
	}
}

func notAllowed(action Action, rec *Record) error {
	if rec.Owner != "" {
		return fmt.Errorf("%w: %s of %q: it is %s, held by %s", ErrNotAllowed, action, rec.ID, rec.Status, rec.Owner)
	}
	return fmt.Errorf("%w: %s of %q: it is %s", ErrNotAllowed, action, rec.ID, rec.Status)
}

func skippable(s StepStatus) bool {
	switch s {
	case StepWaiting, StepStarted, StepFailed, StepNoEffect, StepUndoing, StepUndoFailed:
		return true
	}
	return false
}

func (m *machine) skip(i int, note string) {
	m.set(i, StepSkipped)
	m.units[i].NotBefore, m.units[i].WaitingSince, m.units[i].Refusals = time.Time{}, time.Time{}, 0
	m.note(Entry{Step: m.units[i].Name, Kind: EventSkipped, Error: note})
	m.unstick()
}

func (m *machine) retry(note string) {
	m.note(Entry{Kind: EventRetried, Error: note})
	m.unstick()
	for i := range m.units {
		u := &m.units[i]
		switch {
		case m.p.nodes[m.p.units[i].node].bestEffort && (u.Status == StepFailed || u.Status == StepNoEffect):
			continue // the saga has gone on without it
		case u.Status == StepWaiting, u.Status == StepDone, u.Status == StepUndoing && u.Undos+u.Refusals == 0:
			continue // NotBefore is the end of its wait, or of its Settle
		}
		u.NotBefore, u.Refusals = time.Time{}, 0
		switch {
		case u.Status == StepUndoFailed:
			u.Undos = 0
			m.set(i, StepUndoing)
		case !m.back && m.p.units[i].last && (u.Status == StepFailed || u.Status == StepNoEffect):
			u.Attempts = 0
			if m.p.units[i].isGated() && !u.InDoubt {
				m.set(i, StepIdle) // it waits again
			} else {
				m.set(i, StepStarted)
			}
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
	if cause == nil {
		m.cause = recordedReason(note)
	}
	m.turnBack("", note)
}

// unstick lets a stuck saga continue in its direction.
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
