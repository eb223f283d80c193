package resilienceotel

import (
	"context"
	"errors"
	"log/slog"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-resilience/resilience/policy"
)

// A recorder records the events of policies in histograms and in the current span. The metrics of a policy cannot be
// histograms, because each of them is a single number.
type recorder struct {
	keys                                           func(kind, name, key string) bool
	bulkhead, throttle, load, step, saga, attempts metric.Float64Histogram
}

func newRecorder(m metric.Meter, keys func(kind, name, key string) bool) *recorder {
	named := func(name, unit, help string, buckets []float64) metric.Float64Histogram {
		return histogram(m, namespace+name, unit, help, buckets)
	}
	return &recorder{
		keys:     keys,
		bulkhead: named("bulkhead.wait.duration", "s", "Time for which calls waited for a slot.", waitBuckets),
		throttle: named("throttle.wait.duration", "s", "Time for which calls waited for tokens.", waitBuckets),
		load:     named("cache.load.duration", "s", "Duration of loads.", callBuckets),
		step:     named("saga.step.duration", "s", "Duration of attempts of steps.", stepBuckets),
		saga:     named("saga.duration", "s", "Time from the start of a saga to its end.", sagaBuckets),
		attempts: named("retry.call.attempts", "{attempt}",
			"Attempts of calls that were retried or failed.", attemptBuckets),
	}
}

// event records an event of a policy. It is an observer of the registry.
func (r *recorder) event(ctx context.Context, e policy.Event) {
	span := trace.SpanFromContext(ctx)
	if e.What == "refused" && span.IsRecording() {
		span.SetAttributes(refusedByKey.String(e.Kind + "/" + e.Name))
	}
	took := e.Attr("took")
	switch e.Kind {
	case "bulkhead", "throttle":
		waits, outcome := r.bulkhead, "admitted"
		if e.Kind == "throttle" {
			waits = r.throttle
		}
		if e.What == "refused" {
			outcome = "refused"
		}
		if waited := e.Attr("waited"); waited.Kind() == slog.KindDuration {
			span.SetAttributes(waitedKey.Float64(inSeconds(waited)))
			waits.Record(ctx, inSeconds(waited), r.with(e, outcomeKey.String(outcome))...)
		}
	case "retry":
		if e.What == "ended" {
			attempts := e.Attr("attempts").Int64()
			span.SetAttributes(attemptsKey.Int64(attempts))
			r.attempts.Record(ctx, float64(attempts), r.with(e, outcomeKey.String(text(e, "outcome")))...)
		}
	case "cache":
		if e.What == "served_stale" {
			span.SetAttributes(staleKey.Bool(true))
		}
		if o := outcomeOfLoad(e); o != "" {
			r.load.Record(ctx, inSeconds(took), r.with(e, outcomeKey.String(o))...)
		}
	case "saga":
		switch e.What {
		case "attempted":
			r.step.Record(ctx, inSeconds(took), r.with(e,
				sagaKey.String(text(e, "saga")), stepKey.String(text(e, "step")),
				opKey.String(text(e, "op")), outcomeKey.String(text(e, "outcome")))...)
		case "completed", "compensated", "abandoned":
			r.saga.Record(ctx, inSeconds(took), r.with(e,
				sagaKey.String(text(e, "saga")), statusKey.String(text(e, "status")))...)
		}
	}
}

// text returns the text of the event's attribute with a name, or "" if the event does not have the attribute.
func text(e policy.Event, name string) string {
	if v := e.Attr(name); !v.Equal(slog.Value{}) {
		return v.String()
	}
	return ""
}

// inSeconds returns a duration in seconds. It returns 0 for an attribute that the event does not have, because events
// omit durations of zero.
func inSeconds(took slog.Value) float64 {
	if took.Kind() != slog.KindDuration {
		return 0
	}
	return took.Duration().Seconds()
}

// outcomeOfLoad returns the outcome of the load that e reports, with the names of the metric cache.loads. It returns ""
// if e does not report a load.
func outcomeOfLoad(e policy.Event) string {
	switch e.What {
	case "loaded":
		return "loaded"
	case "not_found":
		return "not_found"
	case "load_answered":
		return "answered"
	case "load_refused":
		return "refused"
	case "load_failed":
		if _, panicked := errors.AsType[interface {
			error
			Stack() []byte
		}](e.Err); panicked {
			return "panicked"
		}
		if late, ok := errors.AsType[interface {
			error
			Timeout() bool
		}](e.Err); ok && late.Timeout() {
			return "timed_out"
		}
		return "failed"
	}
	return ""
}

// with returns the attributes of a measurement: more, the name of the policy and, if Config.Keys allows it, the key of
// a Group's member.
func (r *recorder) with(e policy.Event, more ...attribute.KeyValue) []metric.RecordOption {
	kv := append(more, nameKey.String(e.Name))
	if e.Key != "" && r.keys != nil && (e.Kind == "bulkhead" || e.Kind == "throttle") && r.keys(e.Kind, e.Name, e.Key) {
		kv = append(kv, keyKey.String(e.Key))
	}
	return []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}
