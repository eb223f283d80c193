package registry

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// logInterval is the minimum time between two lines for frequent events of the same kind.
const logInterval = 10 * time.Second

// Log returns an observer that logs each event at the event's Level. For example, the opening of a breaker has level
// Warn, and the closing of a breaker has level Info. A nil logger means slog.Default():
//
//	stop := reg.Observe(registry.Log(slog.Default()))
//
// During an outage, many calls can cause the same event, such as a refusal. If one of these events repeats, Log writes
// a line for the first one, and then at most one line every 10 seconds: refused, ended, over_budget, load_failed,
// load_refused, fence_failed, not_propagated, codec_failed, store_failed, outage_began and outage_ended. Two events
// are the same if they have the same policy, the same field What, and the same reason or outcome. The attribute
// "suppressed" of a line is the number of events that were not logged since the previous line. Log always logs a
// change from an outage to its end, and a change from the end of an outage to the next outage. All other events are
// also always logged, such as a change of a breaker's state, a stuck saga, and any event below slog.LevelWarn except
// outage_ended.
func Log(logger *slog.Logger) func(context.Context, policy.Event) {
	if logger == nil {
		logger = slog.Default()
	}
	limiter := &logLimiter{last: map[logKey]*logState{}}
	return func(ctx context.Context, e policy.Event) {
		enabled := logger.Enabled(ctx, e.Level)
		// The end of an outage has a lower level, but it decides whether the next start is logged.
		if !enabled && e.What != "outage_ended" {
			return
		}
		attrs := logAttrs(e)
		if frequent[e.What] && (e.Level >= slog.LevelWarn || e.What == "outage_ended") {
			suppressed, ok := limiter.allow(e, time.Now(), enabled)
			if !ok {
				return
			}
			if suppressed > 0 {
				attrs = append(attrs, slog.Int64("suppressed", suppressed))
			}
		}
		logger.LogAttrs(ctx, e.Level, e.Kind+" "+e.What, attrs...)
	}
}

// logAttrs returns all attributes of a log line about e.
func logAttrs(e policy.Event) []slog.Attr {
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

// frequent has the What of each event that every call may cause during an outage. A line for each of these events would
// fill the log.
var frequent = map[string]bool{
	"refused": true, "ended": true, "over_budget": true, // calls
	"load_failed": true, "load_refused": true, "fence_failed": true, // caches
	"not_propagated": true, "codec_failed": true,
	"store_failed": true, "outage_began": true, "outage_ended": true, // stores
}

// A logLimiter decides which frequent events are logged, and counts the others.
type logLimiter struct {
	mu   sync.Mutex
	last map[logKey]*logState
}

// A logKey identifies events that count as the same event. It contains the key only of an outage, which is a node. It
// does not contain the key of a group's member, because a group may have many members.
type logKey struct{ kind, name, what, reason, node string }

// A logState is the state of the events with one logKey.
type logState struct {
	at         time.Time // the time of the last line
	what       string    // the What of the last event that was logged or whose level the logger omits
	suppressed int64     // the number of events since the last line
}

// allow reports whether e is logged. suppressed is the number of events since the last line that were not
// logged. If the logger omits the level of e, enabled is false.
func (l *logLimiter) allow(e policy.Event, now time.Time, enabled bool) (suppressed int64, ok bool) {
	key := logKey{kind: e.Kind, name: e.Name, what: e.What}
	for _, a := range e.Attrs {
		if a.Key == "reason" || a.Key == "outcome" {
			key.reason = a.Value.String()
		}
	}
	if e.What == "outage_began" || e.What == "outage_ended" {
		// The start and the end share a logKey. Therefore each change from one to the other is logged.
		key.what, key.node = "outage", e.Key
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.last[key]
	switch {
	case !enabled:
		if s != nil {
			s.what = e.What
		}
		return 0, false
	case s == nil:
		l.last[key] = &logState{at: now, what: e.What}
		return 0, true
	case now.Sub(s.at) < logInterval && e.What == s.what:
		s.suppressed++
		return 0, false
	}
	suppressed = s.suppressed
	*s = logState{at: now, what: e.What}
	return suppressed, true
}
