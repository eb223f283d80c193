package registry

import "log/slog"

// An Event is something that happened to a policy.
type Event struct {
	Kind string // of the policy: "breaker"
	Name string // of the policy
	Key  string // of the member, if the policy is a Group

	// What happened is the Kind of the policy's own event, such as "refused".
	What string
	// Level is slog.LevelDebug for what is normal, and slog.LevelWarn or more for what
	// needs attention.
	Level slog.Level
	// Err is the error of the event, or nil.
	Err error
	// Attrs are the details of the event.
	Attrs []slog.Attr
	// Source is the policy's own event: a breaker.Event, for example.
	Source any
}

// LogValue returns a group of what the event says, without Level and Source.
func (e Event) LogValue() slog.Value {
	return slog.GroupValue(e.attrs()...)
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

// happened returns an event of what is normal.
func happened[K ~string](kind K, key string, err error, attrs ...slog.Attr) Event {
	return Event{What: string(kind), Key: key, Err: err, Level: slog.LevelDebug, Attrs: attrs}
}

// warn returns e as one that needs attention, if it does.
func (e Event) warn(attention bool) Event {
	if attention {
		e.Level = slog.LevelWarn
	}
	return e
}
