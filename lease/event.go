package lease

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventElected     EventKind = "elected"      // a term has started
	EventLost        EventKind = "lost"         // a term has ended without being resigned; its function may still run
	EventResigned    EventKind = "resigned"     // a term has ended because it was resigned
	EventStoreFailed EventKind = "store_failed" // a call to the store has failed; requests and renewals are repeated
)

// An Event is something that happened to a [Candidate].
type Event struct {
	Kind   EventKind     // the kind of the event
	Name   string        // the name of the lease
	Holder string        // the candidate's Config.Holder
	Epoch  int64         // the term's epoch; 0 if the store failed outside of a term
	Waited time.Duration // the time from the start of the campaign to the election; only for EventElected
	Took   time.Duration // the duration of the term; only for EventLost and EventResigned

	// Err is a [*LostError] if Kind is EventLost. If Kind is EventResigned, Err is the error of releasing the lease in
	// the store, or nil. If Kind is EventStoreFailed, Err is the store's error.
	Err error
}

// Observe calls f with each event, in order, until stop is called. A slow f delays the work of a term. There is one
// exception: an event that occurs while f handles an earlier event is queued, and does not delay the work. If f panics
// on a goroutine of the package, for example during a renewal, the panic is logged. Otherwise, the panic propagates to
// the caller of a method. If neither the candidate nor the registry.Registry that contains it has an observer, failures
// of the store are logged as warnings with slog.Default, at most once per second.
func (c *Candidate) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}

// notify delivers an event to the observers.
func (c *Candidate) notify(ctx context.Context, e Event) {
	e.Name, e.Holder = c.cfg.Name, c.cfg.Holder
	c.events.AddUnder(ctx, e)
	c.events.Deliver(ctx, func(ctx context.Context, next any) { c.observers.Tell(ctx, next.(Event)) })
}

// Stats are the metrics of a [Candidate].
type Stats struct {
	Elected     int64 `counter:"terms{event=elected}"`  // the number of terms that have started
	Lost        int64 `counter:"terms{event=lost}"`     // the number of terms that have ended without being resigned
	Resigned    int64 `counter:"terms{event=resigned}"` // the number of terms that were resigned
	Asked       int64 `counter:"requests"`              // the number of requests for the lease
	Renewed     int64 `counter:"renewals"`              // the number of renewals that succeeded
	StoreErrors int64 `counter:"store.errors"`          // the number of calls to the store that failed

	WaitTime time.Duration `counter:"wait.time_seconds"` // the total duration of completed waits for the lease

	Queued  int `gauge:"queued"`  // the number of calls that wait to lead
	Leading int `gauge:"leading"` // the number of terms that hold the lease now
}

// Stats returns the metrics of c.
func (c *Candidate) Stats() (s Stats) {
	c.count(func(now *Stats) { s = *now })
	return s
}

// count calls change with the metrics, under the lock.
func (c *Candidate) count(change func(*Stats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.stats)
}

// Describe implements [policy.Describer]. The candidate's health check queries the store. The check fails with the
// state store_down if the query fails. The check fails with the state vacant if a call waits to lead and c has seen no
// holder of the lease for longer than the TTL. If no call waits to lead, a free lease does not make the check fail.
// For example, the lease may be free because the work of Run is done, or because the lease is used as a lock.
func (c *Candidate) Describe() policy.Description {
	return policy.Description{
		Kind:    "lease",
		Name:    c.cfg.Name,
		Metrics: func() []policy.Metric { return policy.Metrics("lease", c.Stats()) },
		Health:  c.health,
		Config:  func() any { return c.Config() },
		Observe: policy.Events(c.Observe, Event.describe),
	}
}

func (c *Candidate) health(ctx context.Context) policy.Health {
	if _, err := c.Status(ctx); err != nil {
		return policy.Health{Status: policy.Fail, State: "store_down", Err: err}
	}
	c.mu.Lock()
	waiting, since := c.stats.Queued > 0, c.vacant
	c.mu.Unlock()
	if !waiting || since.IsZero() || time.Since(since) <= c.cfg.TTL {
		return policy.Health{}
	}
	detail := fmt.Sprintf("no process has held it for %v", time.Since(since).Round(time.Second))
	return policy.Health{Status: policy.Fail, State: "vacant", Detail: detail}
}

func (e Event) describe() policy.Event {
	d := policy.Event{
		Kind: "lease", Name: e.Name, What: string(e.Kind), Level: slog.LevelDebug, Err: e.Err,
		Attrs: []slog.Attr{slog.String("holder", e.Holder), slog.Int64("epoch", e.Epoch)},
	}
	if e.Kind == EventLost || e.Err != nil {
		d.Level = slog.LevelWarn
	}
	if e.Waited > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("waited", e.Waited))
	}
	if e.Took > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("took", e.Took))
	}
	return d
}
