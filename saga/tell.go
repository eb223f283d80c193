package saga

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"runtime/debug"
	"slices"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
)

// Observe calls f for each event from now on, until stop is called: after
// [RunnerConfig].OnEvent, and in the same way. There may be any number of observers, added at
// any time. The events of a saga that the runner holds come in order, and the saga waits for f.
//
// An event of the log is told after its entry is recorded, and not at all if the process dies in
// between: the numbers of stuck sagas are in [Runner.Counts]. No runner tells the EventCreated of a
// StartTx.
func (r *Runner) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(func(ctx context.Context, e Event) { hook(ctx, "an observer", f, e) })
}

// tell calls OnEvent for an event, or logs what needs attention, and then calls the observers.
func (r *Runner) tell(ctx context.Context, e Event) {
	if onEvent := r.config().OnEvent; onEvent != nil {
		hook(ctx, "OnEvent", onEvent, e)
	} else {
		r.warn(ctx, e)
	}
	r.observers.Tell(ctx, e)
}

// tellOf tells of an event of a saga.
func (r *Runner) tellOf(ctx context.Context, rec *store.Record, e Event) {
	e.Saga, e.Version, e.ID, e.Status = rec.Saga, rec.Version, rec.ID, rec.Status
	r.tell(ctx, e)
}

// warn logs an event that needs attention; of a store that fails, one a second.
func (r *Runner) warn(ctx context.Context, e Event) {
	var text string
	switch e.Kind {
	case EventStuck:
		text = "saga: stuck"
	case EventStalled:
		text = "saga: a step fails again and again"
	case EventStoreFailed:
		text = "saga: the store has failed"
		now := time.Now().UnixNano()
		if last := r.warned.Load(); last != 0 && now-last < int64(time.Second) || !r.warned.CompareAndSwap(last, now) {
			return
		}
	default:
		return
	}
	attrs := []slog.Attr{slog.String("runner", r.Name())}
	if e.Saga != "" {
		attrs = append(attrs, slog.String("saga", e.Saga), slog.Int("version", e.Version))
	}
	if e.ID != "" {
		attrs = append(attrs, slog.String("id", e.ID), slog.String("step", e.Step))
	}
	if e.Kind == EventStalled {
		attrs = append(attrs, slog.Int("attempt", e.Attempt))
	}
	if e.Err != nil {
		attrs = append(attrs, slog.Any("err", e.Err))
	}
	slog.LogAttrs(ctx, slog.LevelWarn, text, attrs...)
}

// happened counts an entry of a log, and tells of it. rec is the saga after the entry.
func (r *Runner) happened(ctx context.Context, rec *store.Record, entry store.Entry) {
	life := entry.At.Sub(rec.CreatedAt)
	r.figures.entry(rec.Saga, entry.Kind, life)
	e := Event{
		Kind: entry.Kind, Seq: entry.Seq, Step: entry.Step, Op: entry.Op, Attempt: entry.Attempt,
		Err: machine.Reason(entry.Error), At: entry.At,
	}
	switch e.Kind {
	case EventCompleted, EventCompensated, EventAbandoned:
		e.Took = life
	}
	r.tellOf(ctx, rec, e)
}

// hook calls a hook of the user on a goroutine of the runner, or of a caller. Its panic does not pass
// on: it would end the goroutine of the saga, and then that of the next one that takes it over.
func hook[T any](ctx context.Context, name string, fn func(context.Context, T), arg T) {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("saga: %s panicked: %v\n%s", name, v, debug.Stack())
		}
	}()
	fn(ctx, arg)
}

// Stats returns the runner's figures. It waits for nothing: at most every five seconds it
// has the numbers in the store looked up in the background, for the next call.
func (r *Runner) Stats() Stats {
	stored := r.look()
	s := r.figures.stats()
	s.Stored = Counts{Sagas: slices.Clone(stored.Sagas), Now: stored.Now}
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
// moment ago, and returns the last answer. It forgets that if it is so old that it would mislead.
func (r *Runner) look() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	age := time.Since(r.looked)
	if r.looking || age < lookEvery {
		return r.latest
	}
	if age > lookKept {
		r.latest = Counts{}
	}
	r.looking, r.looked = true, time.Now()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), r.config().LeaseTTL)
		defer cancel()
		counts, err := r.Counts(ctx)
		r.mu.Lock()
		r.looking = false
		if err == nil {
			r.latest = counts
		}
		r.mu.Unlock()
		if err != nil {
			r.storeFailed(ctx, err)
		}
	}()
	return r.latest
}

func (r *Runner) storeFailed(ctx context.Context, err error) {
	r.figures.count(func(s *Stats) { s.StoreErrors++ })
	r.tell(ctx, Event{Kind: EventStoreFailed, Err: err, At: time.Now()})
}

// Counts counts the sagas of all definitions and runners that have not ended.
func (r *Runner) Counts(ctx context.Context) (Counts, error) {
	found, err := r.store.Counts(ctx)
	if err != nil {
		return Counts{}, fmt.Errorf("saga: counts: %w", err)
	}
	counts := Counts{Now: found.Now}
	for _, c := range found.Sagas {
		counts.Sagas = append(counts.Sagas, Count(c))
	}
	return counts, nil
}
