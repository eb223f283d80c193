package describe

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"

	"github.com/go-resilience/resilience/policy"
)

// Of returns the description of p, or false if p is no policy: its Describe if it has one, otherwise what
// its optional methods say.
func Of(p any) (policy.Description, bool) {
	if d, ok := p.(policy.Describer); ok {
		return d.Describe(), true
	}
	k, ok := p.(Kinder)
	if !ok {
		return policy.Description{}, false
	}
	d := policy.Description{Kind: k.Kind()}
	if n, ok := p.(Namer); ok {
		d.Name = n.Name()
	}
	if f, ok := p.(Figurer); ok {
		d.Metrics = func() []policy.Metric {
			figures := f.Figures()
			all := make([]policy.Metric, len(figures))
			for i, f := range figures {
				all[i] = policy.Metric(f)
			}
			return all
		}
	}
	switch h := p.(type) {
	case interface{ Health(context.Context) error }:
		d.Health = func(ctx context.Context) policy.Health { return HealthOf(h.Health(ctx)) }
	case Healther:
		d.Health = func(context.Context) policy.Health { return HealthOf(h.Health()) }
	}
	if s, ok := p.(Setter); ok {
		d.Config = s.Settings
	}
	if c, ok := p.(Changer); ok {
		d.Update = c.Change
	}
	if o, ok := p.(Observer); ok {
		d.Observe = policy.Events(o.ObserveAny, func(e any) policy.Event { return eventOf(d, e) })
	}
	if m, ok := p.(interface {
		Members() iter.Seq2[string, policy.Describer]
	}); ok {
		d.Members = m.Members
	}
	if n, ok := p.(interface{ Needed() bool }); ok {
		d.InUse = n.Needed
	}
	return d, true
}

// Describer returns p as a Describer, or false if p is no policy.
func Describer(p any) (policy.Describer, bool) {
	if d, ok := p.(policy.Describer); ok {
		return d, true
	}
	_, ok := p.(Kinder)
	return describer{p}, ok
}

// A describer is a policy that describes itself by optional methods.
type describer struct{ policy any }

// Describe returns the description that Of does.
func (d describer) Describe() policy.Description {
	description, _ := Of(d.policy)
	return description
}

// HealthOf returns the Health that an error of an optional method Health stands for.
func HealthOf(err error) policy.Health {
	if err == nil {
		return policy.Health{}
	}
	h := policy.Health{Status: policy.Warn, Err: err}
	if a, ok := err.(interface{ HealthState() string }); ok {
		h.State, h.Err = a.HealthState(), errors.Unwrap(err)
	}
	if a, ok := err.(interface{ HealthDetail() string }); ok {
		h.Detail = a.HealthDetail()
	}
	if f, ok := err.(interface{ Failed() bool }); ok && f.Failed() {
		h.Status = policy.Fail
	}
	return h
}

func eventOf(of policy.Description, event any) policy.Event {
	ev := policy.Event{Kind: of.Kind, Name: of.Name, Level: slog.LevelDebug}
	d, ok := event.(Event)
	if !ok {
		ev.What = fmt.Sprint(event)
		return ev
	}
	ev.Level = slog.Level(d.Level())
	d.Fields(func(name string, value any) {
		switch name {
		case "event":
			ev.What = fmt.Sprint(value)
		case "name":
		case "key":
			ev.Key = fmt.Sprint(value)
		case "err", "error":
			ev.Err, _ = value.(error)
		default:
			ev.Attrs = append(ev.Attrs, slog.Any(name, value))
		}
	})
	return ev
}
