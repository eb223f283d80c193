package registry

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// burst is how long repeated events of one policy become one line.
const burst = 10 * time.Second

// Log returns an observer that writes a line for each event:
//
//	stop := reg.Observe(registry.Log(slog.Default()))
//
// Of events that every call may cause in an outage, such as refusals, it writes the first of a policy
// with one reason or outcome, and then one every ten seconds, whose attribute suppressed is how many
// it left out. A nil logger means slog.Default().
func Log(logger *slog.Logger) func(context.Context, Event) {
	if logger == nil {
		logger = slog.Default()
	}
	b := &bursts{last: map[burstKey]*burstState{}}
	return func(ctx context.Context, e Event) {
		if !logger.Enabled(ctx, e.Level) {
			return
		}
		attrs := e.attrs()
		if e.Level >= slog.LevelWarn && frequent[e.What] {
			more, ok := b.pass(e, time.Now())
			if !ok {
				return
			}
			if more > 0 {
				attrs = append(attrs, slog.Int64("suppressed", more))
			}
		}
		logger.LogAttrs(ctx, e.Level, e.Kind+" "+e.What, attrs...)
	}
}

// frequent are the events that each call may cause in an outage: unbounded, they would fill the log.
var frequent = map[string]bool{
	"refused": true, "ended": true, "over_budget": true,
	"load failed": true, "load refused": true, "fence failed": true,
	"not invalidated": true, "store failed": true, "codec failed": true, "outage began": true, "recovered": true,
}

// bursts counts the events that are not written.
type bursts struct {
	mu   sync.Mutex
	last map[burstKey]*burstState
}

// A burstKey tells bursts apart: not by key, of which a Group may have many.
type burstKey struct{ kind, name, what, reason string }

type burstState struct {
	begun time.Time
	what  string // of the last line
	more  int64
}

// pass reports whether e is written, and how many before it were not.
func (b *bursts) pass(e Event, now time.Time) (more int64, ok bool) {
	key := burstKey{e.Kind, e.Name, e.What, ""}
	for _, a := range e.Attrs {
		if a.Key == "reason" || a.Key == "outcome" {
			key.reason = a.Value.String()
		}
	}
	if e.What == "recovered" {
		key.what = "outage began" // the end of one is worth a line, and so is the next one
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.last[key]
	if s == nil {
		b.last[key] = &burstState{begun: now, what: e.What}
		return 0, true
	}
	if now.Sub(s.begun) < burst && e.What == s.what {
		s.more++
		return 0, false
	}
	more, s.more, s.begun, s.what = s.more, 0, now, e.What
	return more, true
}
