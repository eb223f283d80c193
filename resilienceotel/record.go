package resilienceotel

import (
	"context"
	"errors"
	"strings"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
)

// A recorder feeds the histograms that no figure can be, and the current span, with the
// events of policies.
type recorder struct {
	keys                           func(kind, name, key string) bool
	bulkhead, throttle, load, step metric.Float64Histogram
	saga                           metric.Float64Histogram
	attempts                       metric.Int64Histogram
}

func newRecorder(m metric.Meter, keys func(kind, name, key string) bool) *recorder {
	r := &recorder{
		keys:     keys,
		bulkhead: seconds(m, "resilience.bulkhead.wait.duration", "Time that calls waited for a slot, of those that waited.", waitBuckets),
		throttle: seconds(m, "resilience.throttle.wait.duration", "Time that calls waited for their tokens, of those that waited.", waitBuckets),
		load:     seconds(m, "resilience.cache.load.duration", "Duration of loads.", callBuckets),
		step:     seconds(m, "resilience.saga.step.duration", "Duration of attempts of steps.", stepBuckets),
		saga:     seconds(m, "resilience.saga.duration", "Time from the start of a saga to its end.", sagaBuckets),
	}
	var err error
	r.attempts, err = m.Int64Histogram("resilience.retry.call.attempts", metric.WithUnit("{attempt}"),
		metric.WithDescription("Attempts of calls that were retried or given up."), metric.WithExplicitBucketBoundaries(attemptBuckets...))
	if err != nil {
		otel.Handle(err)
	}
	return r
}

// event is the observer of a registry.
func (r *recorder) event(ctx context.Context, e registry.Event) {
	span := trace.SpanFromContext(ctx)
	if e.What == "refused" && span.IsRecording() {
		span.SetAttributes(refusedByKey.String(e.Kind + "/" + e.Name))
	}
	switch own := e.Source.(type) {
	case bulkhead.Event:
		if own.Waited > 0 {
			span.SetAttributes(waitedKey.Float64(own.Waited.Seconds()))
			r.bulkhead.Record(ctx, own.Waited.Seconds(), r.with(e, admitted(own.Reason))...)
		}
	case throttle.Event:
		if own.Waited > 0 {
			span.SetAttributes(waitedKey.Float64(own.Waited.Seconds()))
			r.throttle.Record(ctx, own.Waited.Seconds(), r.with(e, admitted(own.Reason))...)
		}
	case retry.Event:
		if own.Kind == retry.EventEnded && e.Kind == "retry" {
			span.SetAttributes(attemptsKey.Int(own.Attempts))
			r.attempts.Record(ctx, int64(own.Attempts), r.with(e, outcomeOfEvent(own.Outcome))...)
		}
	case cacheaside.Event:
		if own.Kind == cacheaside.EventServedStale {
			span.SetAttributes(staleKey.Bool(true))
		}
		if o := outcomeOfLoad(own); o != "" {
			r.load.Record(ctx, own.Took.Seconds(), r.with(e, outcomeKey.String(o))...)
		}
	case saga.Event:
		switch own.Kind {
		case saga.EventAttempted:
			r.step.Record(ctx, own.Took.Seconds(), r.with(e, sagaKey.String(own.Saga), stepKey.String(own.Step),
				opKey.String(string(own.Op)), outcomeOfEvent(own.Outcome))...)
		case saga.EventCompleted, saga.EventCompensated, saga.EventAbandoned:
			r.saga.Record(ctx, own.Took.Seconds(), r.with(e, sagaKey.String(own.Saga), statusKey.String(string(own.Status)))...)
		}
	}
}

// outcomeOfLoad returns the outcome of a load, as in the figure cache.loads, or "" for
// any other event.
func outcomeOfLoad(e cacheaside.Event) string {
	switch e.Kind {
	case cacheaside.EventLoaded:
		return "loaded"
	case cacheaside.EventNotFound:
		return "not_found"
	case cacheaside.EventLoadAnswered:
		return "answered"
	case cacheaside.EventLoadRefused:
		return "refused"
	case cacheaside.EventLoadFailed:
		if _, panicked := errors.AsType[interface {
			error
			Stack() []byte
		}](e.Err); panicked {
			return "panicked"
		}
		if _, late := errors.AsType[*cacheaside.TimeoutError](e.Err); late {
			return "timed_out"
		}
		return "failed"
	}
	return ""
}

func admitted[R ~string](refusal R) attribute.KeyValue {
	if refusal == "" {
		return outcomeKey.String("admitted")
	}
	return outcomeKey.String("refused")
}

// outcomeOfEvent writes an outcome as figures do.
func outcomeOfEvent[O ~string](o O) attribute.KeyValue {
	return outcomeKey.String(strings.ReplaceAll(string(o), " ", "_"))
}

// with returns attributes besides those of the policy.
func (r *recorder) with(e registry.Event, more ...attribute.KeyValue) []metric.RecordOption {
	kv := append(more, nameKey.String(e.Name))
	if e.Key != "" && r.keys != nil && (e.Kind == "bulkhead" || e.Kind == "throttle") && r.keys(e.Kind, e.Name, e.Key) {
		kv = append(kv, keyKey.String(e.Key))
	}
	return []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}
