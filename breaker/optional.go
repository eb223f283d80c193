package breaker

import (
	"context"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/policy"
)

// The optional methods below say what Describe says, for readers that do not use it yet.

// Name returns the Name of the breaker's Config.
func (b *Breaker) Name() string { return b.setting.Load().Name }

// Kind returns "breaker".
func (b *Breaker) Kind() string { return "breaker" }

// Settings returns the Config without Classify.
func (b *Breaker) Settings() any {
	cfg := b.Config()
	cfg.Classify = nil
	return cfg
}

// Change is the Update of Describe.
func (b *Breaker) Change(dryRun bool, change func(cfg any) error) error {
	return b.Describe().Update(dryRun, change)
}

// Figures returns the metrics.
func (b *Breaker) Figures() (all []describe.Figure) {
	for _, m := range b.Describe().Metrics() {
		all = append(all, describe.Figure(m))
	}
	return all
}

// Health returns nil if the breaker is closed.
func (b *Breaker) Health() error {
	h := b.health(context.Background())
	if h.State == "" {
		return nil
	}
	return &describe.Ailment{State: h.State, Fails: h.Status == policy.Fail, Err: h.Err}
}

// Needed reports whether a Group must keep the breaker.
func (b *Breaker) Needed() bool { return b.inUse() }

// ObserveAny is Observe for a caller that does not know Event.
func (b *Breaker) ObserveAny(f func(context.Context, any)) (stop func()) {
	return b.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// Level returns the event's slog level.
func (e Event) Level() int { return int(describeEvent(e).Level) }

// Fields calls yield with each detail of the event.
func (e Event) Fields(yield func(name string, value any)) {
	d := describeEvent(e)
	yield("event", d.What)
	yield("name", d.Name)
	for _, a := range d.Attrs {
		yield(a.Key, a.Value.Any())
	}
	if d.Err != nil {
		yield("err", d.Err)
	}
}
