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

// A Telemetry makes middleware that traces and measures calls. Make one with [New] and
// share it: it is safe for concurrent use.
type Telemetry struct {
	tracer         trace.Tracer
	call, attempts metric.Float64Histogram
}

// New returns a Telemetry.
func New(cfg Config) *Telemetry {
	m := cfg.meter()
	return &Telemetry{
		tracer:   cfg.tracer(),
		call:     histogram(m, "resilience.call.duration", "s", "Duration of calls, with attempts and waits.", callBuckets),
		attempts: histogram(m, "resilience.attempt.duration", "s", "Duration of attempts.", callBuckets),
	}
}

// Call returns middleware for the outside of a chain. It measures each call, attempts and
// waits included, in resilience.call.duration, and makes a span for it with the given name.
//
// The outcome of a call is "ok", "error", "refused", "canceled" (by the caller) or
// "timeout". An answer (see resilience.Answered) is "ok".
func (t *Telemetry) Call(name string) resilience.Middleware {
	return t.middleware(&probe{tracer: t.tracer, duration: t.call, name: name, span: name})
}

// Attempt returns middleware for the inside of a chain. It measures each attempt in
// resilience.attempt.duration, and makes a span for it: that of Attempt("users") is called
// "users attempt". Attempts that a policy further out refuses do not get here.
//
// Within a resiliencehttp.Transport, the span of a second attempt has the attribute
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

// A probe traces and measures calls of one kind and name.
type probe struct {
	tracer   trace.Tracer
	duration metric.Float64Histogram
	name     string
	span     string
	attempt  bool
	ok       []metric.RecordOption
}

// run calls next. Both the span and the duration last until the work has really ended:
// see resilience.AtEnd.
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

// describe sets the attributes that are known at the beginning.
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

// failSpan says how the work of the span has failed. A caller that left is no error.
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

// panicked is the error of a call that panicked or ended its goroutine.
type panicked struct{}

func (panicked) Error() string     { return "resilienceotel: the call panicked or ended its goroutine" }
func (panicked) ErrorType() string { return "panic" }
