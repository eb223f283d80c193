package saga

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/go-resilience/resilience/saga/internal/machine"
	"github.com/go-resilience/resilience/saga/store"
)

// Observe calls f for each event of this runner, until stop is called. There may be any
// number of observers, added at any time. Each call of f has a goroutine of its own, for
// which the runner, or the caller of its method or of Start, waits. There may be several at
// the same time. The events of a saga that the runner holds come in order, and the saga
// waits for f. A panic and a runtime.Goexit in f go to RunnerConfig.OnPanic.
//
// An event of the log is told after its entry is recorded. No runner tells the EventCreated
// of a StartTx. An EventStuck may be told again: a runner that reports a stuck saga of
// another runner tells it.
func (r *Runner) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(func(ctx context.Context, e Event) { hook(ctx, r, "an observer", f, e) })
}

// tell tells the observers of an event.
func (r *Runner) tell(ctx context.Context, e Event) {
	if r.observers.Any() {
		e.Runner = r.Name()
		r.observers.Tell(ctx, e)
	}
}

// tellOf tells the observers of an event of a saga.
func (r *Runner) tellOf(ctx context.Context, rec *store.Record, e Event) {
	if r.observers.Any() {
		r.tell(ctx, e.of(rec))
	}
}

// tellHook calls OnEvent for an event of a saga.
func (r *Runner) tellHook(ctx context.Context, rec *store.Record, e Event) {
	if onEvent := r.config().OnEvent; onEvent != nil {
		e.Runner = r.Name()
		hook(ctx, r, "OnEvent", onEvent, e.of(rec))
	}
}

// happened counts an entry of a log, and calls OnEvent and the observers. rec is the saga
// after the entry.
func (r *Runner) happened(ctx context.Context, rec *store.Record, entry store.Entry) {
	life := entry.At.Sub(rec.CreatedAt)
	r.figures.entry(rec.Saga, entry.Kind, life)
	e := Event{
		Kind: entry.Kind, Seq: entry.Seq, Step: entry.Step, Op: entry.Op, Attempt: entry.Attempt,
		Err: machine.Reason(entry.Error), At: entry.At,
	}
	r.tellHook(ctx, rec, e)
	r.tellOf(ctx, rec, e)
	switch entry.Kind {
	case EventCompleted, EventCompensated, EventAbandoned:
		r.tellOf(ctx, rec, Event{Kind: EventEnded, Took: life, At: entry.At})
	}
}

var errGoexit = errors.New("saga: it called runtime.Goexit")

// hook calls a hook of the user, and returns when it has. A panic and a runtime.Goexit, as of
// a failed test, go to OnPanic instead of passing on: either would end the process or the
// goroutine of the saga, and then that of the next one that takes it over.
func hook[T any](ctx context.Context, r *Runner, name string, fn func(context.Context, T), arg T) {
	if fn == nil {
		return
	}
	done := make(chan struct{})
	err := errExited
	go func() {
		defer close(done)
		defer caught(&err)
		fn(ctx, arg)
		err = nil
	}()
	<-done
	if p, ok := err.(*PanicError); ok {
		r.panics.Tell(ctx, "saga: "+name, r.config().OnPanic, p.Value, p.Stack)
	} else if err != nil {
		r.panics.Tell(ctx, "saga: "+name, r.config().OnPanic, errGoexit, nil)
	}
}

// Stats returns the runner's figures. It waits for nothing: at most every five seconds it
// has the numbers in the store looked up in the background, for the next call.
func (r *Runner) Stats() Stats {
	r.look()
	s := r.figures.stats()
	s.HookPanics = r.panics.Count()
	if stored := r.stored.Load(); stored != nil {
		s.Stored = store.Counts{Sagas: slices.Clone(stored.Sagas), Now: stored.Now}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Held = int64(len(r.held))
	return s
}

const (
	lookEvery = 5 * time.Second // at the numbers of the sagas in the store, for Stats
	lookKept  = 5 * time.Minute // if nobody has asked meanwhile
)

// look asks the store for the numbers of its sagas, in the background, unless it was asked a
// moment ago. It forgets the last answer if that is so old that it would mislead.
func (r *Runner) look() {
	r.mu.Lock()
	defer r.mu.Unlock()
	age := time.Since(r.looked)
	if r.looking || age < lookEvery {
		return
	}
	if age > lookKept {
		r.stored.Store(nil)
	}
	r.looking, r.looked = true, time.Now()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), r.config().LeaseTTL)
		defer cancel()
		counts, err := r.countsOf(ctx)
		r.mu.Lock()
		r.looking = false
		r.mu.Unlock()
		if err != nil {
			r.storeFailed(ctx, err)
			return
		}
		r.stored.Store(&counts)
	}()
}

// countsOf is Counts, for a caller whose goroutine a panic of the store must not end.
func (r *Runner) countsOf(ctx context.Context) (counts store.Counts, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("saga: counts: the store panicked: %v", v)
		}
	}()
	return r.Counts(ctx)
}

// isStuck reports a stuck saga, and then records that it did.
func (r *Runner) isStuck(ctx context.Context, in *Instance) {
	if onStuck := r.config().OnStuck; onStuck != nil {
		hook(ctx, r, "OnStuck", onStuck, StuckSaga{r.Name(), *in})
	} else {
		slog.WarnContext(ctx, "saga: stuck", "runner", r.Name(), "saga", in.Saga, "version", in.Version, "id", in.ID, "step", in.Step, "cause", in.Cause, "actions", in.Actions)
	}
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.config().LeaseTTL/2)
	defer cancel()
	if err := r.store.Reported(call, in.ID, in.Seq); err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: report of %q: %w", in.ID, err)) // it is reported again
	}
}

func (r *Runner) storeFailed(ctx context.Context, err error) {
	r.figures.count(func(s *Stats) { s.StoreErrors++ })
	r.tell(ctx, Event{Kind: EventStoreFailed, Err: err, At: time.Now()})
	if onStoreError := r.config().OnStoreError; onStoreError != nil {
		hook(ctx, r, "OnStoreError", onStoreError, err)
		return
	}
	now := time.Now().UnixNano()
	if last := r.warned.Load(); (last == 0 || now-last >= int64(time.Second)) && r.warned.CompareAndSwap(last, now) {
		slog.WarnContext(ctx, "saga: the store has failed", "runner", r.Name(), "err", err)
	}
}

// Counts counts the sagas of all definitions and runners.
func (r *Runner) Counts(ctx context.Context) (store.Counts, error) {
	counts, err := r.store.Counts(ctx)
	if err != nil {
		return store.Counts{}, fmt.Errorf("saga: counts: %w", err)
	}
	return counts, nil
}
