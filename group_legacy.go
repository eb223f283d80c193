package resilience

import (
	"context"
	"errors"
	"strings"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/policy"
)

// The methods in this file are for readers of policies that do not call Describe yet.

// Name returns the name in the description.
func (g *Group[K, P]) Name() string { return g.Describe().Name }

// Kind returns the kind in the description.
func (g *Group[K, P]) Kind() string { return g.Describe().Kind }

// Figures returns the metrics in the description.
func (g *Group[K, P]) Figures() (all []describe.Figure) {
	for _, m := range g.metrics() {
		all = append(all, describe.Figure(m))
	}
	return all
}

// Health returns the health in the description, as an error.
func (g *Group[K, P]) Health() error {
	h := g.health(context.Background())
	if h.Status == policy.Pass {
		return nil
	}
	return &groupError{describe.Ailment{
		State: strings.ReplaceAll(h.State, "_", " "), Detail: h.Detail, Fails: h.Status == policy.Fail, Err: h.Err,
	}}
}

type groupError struct{ describe.Ailment }

func (e *groupError) Error() string { return e.State + ": " + e.Detail }

// Settings returns the Config in the description.
func (g *Group[K, P]) Settings() any {
	if config := g.Describe().Config; config != nil {
		return config()
	}
	return nil
}

// Change is the Update in the description.
func (g *Group[K, P]) Change(dryRun bool, f func(cfg any) error) error {
	if update := g.Describe().Update; update != nil {
		return update(dryRun, f)
	}
	return errors.New("resilience: the members cannot be updated")
}

// ObserveAny is the Observe in the description.
func (g *Group[K, P]) ObserveAny(f func(context.Context, any)) (stop func()) {
	observe := g.Describe().Observe
	if observe == nil {
		return func() {}
	}
	return observe(func(ctx context.Context, e policy.Event) { f(ctx, legacyEvent{e}) })
}

type legacyEvent struct{ policy.Event }

func (e legacyEvent) Level() int { return int(e.Event.Level) }

func (e legacyEvent) Fields(yield func(name string, value any)) {
	yield("event", e.What)
	yield("name", e.Name)
	for _, a := range e.Attrs {
		yield(a.Key, a.Value.Any())
	}
	if e.Err != nil {
		yield("err", e.Err)
	}
	yield("key", e.Key)
}
