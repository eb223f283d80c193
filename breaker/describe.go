package breaker

import (
	"context"
	"log/slog"

	"github.com/go-resilience/resilience/policy"
)

// Describe implements [policy.Describer].
func (b *Breaker) Describe() policy.Description {
	return policy.Description{
		Kind: "breaker",
		Name: b.setting.Load().Name,
		// Metrics calls stats instead of Stats, because Stats notifies observers. A Group reads metrics while it holds its
		// lock, and an observer might need this lock.
		Metrics: func() []policy.Metric { return policy.Metrics("breaker", b.stats()) },
		Health:  b.health,
		Config:  func() any { return b.Config() },
		Update: func(dryRun bool, change func(cfg any) error) error {
			defer b.notify(context.Background())
			return b.setting.Change(dryRun, change, sameName, b.applyConfig)
		},
		Observe: policy.Events(b.Observe, describeEvent),
		InUse:   b.inUse,
	}
}

// inUse reports whether a resilience.Group must not evict the breaker. A Group does not evict a breaker that is
// forced open, disabled, or open with time left. A Group may evict a half-open breaker, because without traffic the
// breaker would stay half-open forever.
func (b *Breaker) inUse() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.forced() || b.state == Open && b.openLeft(b.now()) > 0
}

func (b *Breaker) health(context.Context) policy.Health {
	s := b.Stats()
	switch s.State {
	case Closed:
		return policy.Health{}
	case Open, ForcedOpen:
		return policy.Health{Status: policy.Fail, State: string(s.State), Err: s.LastErr}
	}
	return policy.Health{Status: policy.Warn, State: string(s.State), Err: s.LastErr}
}

func describeEvent(e Event) policy.Event {
	d := policy.Event{Kind: "breaker", Name: e.Name, What: string(e.Kind), Level: slog.LevelDebug, Err: e.Err}
	if e.Kind == EventRefused || e.To == Open || e.To == ForcedOpen {
		d.Level = slog.LevelWarn
	} else if e.To == Closed {
		d.Level = slog.LevelInfo
	}
	switch e.Kind {
	case EventChanged:
		d.Attrs = append(d.Attrs, slog.String("from", string(e.From)), slog.String("to", string(e.To)))
	case EventRefused:
		if refusal, ok := e.Err.(*OpenError); ok {
			d.Attrs = append(d.Attrs, slog.String("reason", string(refusal.State)))
		}
	}
	if e.OpenFor > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("for", e.OpenFor))
	}
	return d
}
