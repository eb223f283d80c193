package resilienceotel

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
)

// A Telemetry creates middleware that traces and measures calls. Create a Telemetry with [New]; it is safe for
// concurrent use.
type Telemetry struct {
	tracer         trace.Tracer
	call, attempts metric.Float64Histogram
}

// New returns a Telemetry that uses the providers of cfg.
func New(cfg Config) *Telemetry {
	m := cfg.meter()
	return &Telemetry{
		tracer:   cfg.tracer(),
		call:     histogram(m, "resilience.call.duration", "s", "Duration of calls, with attempts and waits.", callBuckets),
		attempts: histogram(m, "resilience.attempt.duration", "s", "Duration of attempts.", callBuckets),
	}
}

// Call returns middleware that belongs outside of all policies in a chain. The middleware creates a span with the given
// name for each call, and records the duration of the call in resilience.call.duration. The duration of a call includes
// all attempts and waits.
//
// The outcome of a call is "ok", "error", "refused", "canceled" or "timeout". The outcome is "canceled" if the caller
// has canceled the call. The outcome of an error that is an answer (see resilience.Answered) is "ok".
func (t *Telemetry) Call(name string) resilience.Middleware {
	return t.middleware(&probe{tracer: t.tracer, duration: t.call, name: name, span: name})
}

// Attempt returns middleware that belongs inside of all policies in a chain. The middleware creates a span for each
// attempt, and records the duration of the attempt in resilience.attempt.duration. The name of the span is name
// followed by "attempt", for example "users attempt". If an outer policy refuses an attempt, the attempt is neither
// traced nor measured.
//
// Within a resiliencehttp.Transport, the spans of the second and further attempts have the attribute
// http.request.resend_count.
func (t *Telemetry) Attempt(name string) resilience.Middleware {
	return t.middleware(&probe{
		tracer: t.tracer, duration: t.attempts, name: name, span: name + " attempt", attempt: true,
	})
}

func (t *Telemetry) middleware(p *probe) resilience.Middleware {
	p.ok = p.outcome(ok)
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error { return p.run(ctx, next) }
	}
}

// A probe traces and measures the calls that pass through the middleware of one Call or Attempt.
type probe struct {
	tracer   trace.Tracer
	duration metric.Float64Histogram
	name     string
	span     string
	attempt  bool
	ok       []metric.RecordOption
}

// run calls next. If the work continues after next has returned, such as reading a response, the span and the duration
// include that work: see resilience.AtEnd.
func (p *probe) run(ctx context.Context, next resilience.Func) error {
	begun := time.Now()
	inner, span := p.tracer.Start(ctx, p.span)
	if span.IsRecording() {
		p.describe(ctx, span)
	}
	end := func(err error) { p.end(inner, span, begun, err) }
	work := resilience.WorkOf(ctx)
	var err error = panicked{}
	goesOn := false
	defer func() {
		if !goesOn {
			end(err)
		}
	}()
	err = next(inner)
	goesOn = err == nil && work.OnEnd(end)
	return err
}

// describe sets the attributes that are known when the span starts.
func (p *probe) describe(ctx context.Context, span trace.Span) {
	span.SetAttributes(nameKey.String(p.name))
	n, retried := retry.AttemptFrom(ctx)
	if !p.attempt || !retried {
		return
	}
	span.SetAttributes(attemptKey.Int(n))
	if _, isHTTP := resiliencehttp.RequestFrom(ctx); isHTTP && n > 1 {
		span.SetAttributes(semconv.HTTPRequestResendCount(n - 1))
	}
}

func (p *probe) end(ctx context.Context, span trace.Span, begun time.Time, err error) {
	took := time.Since(begun).Seconds()
	if err == nil {
		p.duration.Record(ctx, took, p.ok...)
		span.End()
		return
	}
	o := outcomeOf(ctx, err)
	if o == ok {
		p.duration.Record(ctx, took, p.ok...)
	} else {
		kind := errorType(err)
		p.duration.Record(ctx, took, p.outcome(o, kind)...)
		failSpan(span, o, kind)
	}
	span.End()
}

// failSpan sets the attributes of a span whose work has failed. If the caller has canceled, the span does not have the
// status Error.
func failSpan(span trace.Span, o outcome, kind attribute.KeyValue) {
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(outcomeKey.String(string(o)), kind)
	if o != canceled {
		span.SetStatus(codes.Error, "")
	}
}

func (p *probe) outcome(o outcome, more ...attribute.KeyValue) []metric.RecordOption {
	kv := append([]attribute.KeyValue{nameKey.String(p.name), outcomeKey.String(string(o))}, more...)
	return []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(kv...))}
}

// panicked is the error of a call that panicked or called runtime.Goexit.
type panicked struct{}

func (panicked) Error() string     { return "resilienceotel: call panicked or ended its goroutine" }
func (panicked) ErrorType() string { return "panic" }
