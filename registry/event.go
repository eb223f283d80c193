package registry

import (
	"fmt"
	"log/slog"

	"github.com/go-resilience/resilience/internal/describe"
)

// An Event is something that happened to a policy.
type Event struct {
	Kind string // of the policy: "breaker"
	Name string // of the policy
	Key  string // of the member, if the policy is a Group

	What  string     // happened: "refused"
	Level slog.Level // Debug for what is normal, Warn or more for what needs attention
	Err   error
	Attrs []slog.Attr // the other details
}

// event returns the Event for an event of the policy's own type.
func (e Entry) event(event any) Event {
	ev := Event{Kind: e.Kind, Name: e.Name, Level: slog.LevelDebug}
	d, ok := event.(describe.Event)
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

// Attr returns a detail, or the zero Value.
func (e Event) Attr(name string) slog.Value {
	for _, a := range e.Attrs {
		if a.Key == name {
			return a.Value
		}
	}
	return slog.Value{}
}

func (e Event) attrs() []slog.Attr {
	attrs := []slog.Attr{slog.String("name", e.Name)}
	if e.Key != "" {
		attrs = append(attrs, slog.String("key", e.Key))
	}
	attrs = append(attrs, e.Attrs...)
	if e.Err != nil {
		attrs = append(attrs, slog.Any("err", e.Err))
	}
	return attrs
}
