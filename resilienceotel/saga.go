package resilienceotel

import (
	"context"
	"database/sql"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-resilience/resilience/saga"
)

// Inject returns the W3C traceparent of the span in ctx, or "" if ctx has no span. Use Inject as
// saga.RunnerConfig.Inject. The Runner stores the traceparent with each saga that it starts. The spans of the saga's
// steps can then have a link to the span in ctx. A child of a saga (see saga.ChildOf) has the traceparent of its
// parent. If a traced step (see [Steps]) starts another saga, that saga has the traceparent of the step's span.
func (t *Telemetry) Inject(ctx context.Context) string {
	if origin, ok := ctx.Value(originKey{}).(trace.SpanContext); ok && !trace.SpanContextFromContext(ctx).IsValid() {
		ctx = trace.ContextWithSpanContext(ctx, origin)
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier["traceparent"]
}

// Extract returns a copy of ctx with the span that started a saga. The spans of [Steps] then have a link to that span.
// carried is the result of [Telemetry.Inject]. Use Extract as saga.RunnerConfig.Extract. The span does not become the
// current span of ctx.
func (t *Telemetry) Extract(ctx context.Context, carried string) context.Context {
	carrier := propagation.MapCarrier{"traceparent": carried}
	origin := trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
	if !origin.IsValid() {
		return ctx
	}
	return context.WithValue(ctx, originKey{}, origin)
}

// originKey is the key of a ctx's value that is the trace.SpanContext of the span that started a saga.
type originKey struct{}

// Steps returns a copy of steps in which each call to Do, Undo, DoTx and UndoTx has a span. The name of the span is the
// name of the step, followed by "do" or "undo":
//
//	runner := saga.NewRunner(store, saga.RunnerConfig{Inject: t.Inject, Extract: t.Extract})
//	trip := &saga.Saga[Trip]{Name: "trip", Steps: resilienceotel.Steps(t, []saga.Step[Trip]{
//		{Name: "flight", Do: bookFlight, Undo: cancelFlight},
//	})}
//
// A step may run in another process, days after the span that started the saga has ended. So if the Runner has the
// Inject and Extract of a Telemetry, the span of a step starts a new trace. The span of the step has a link to the span
// that started the saga. If the saga is run by saga.Run, the span of a step is a child of the span in the caller's ctx.
func Steps[S any](t *Telemetry, steps []saga.Step[S]) []saga.Step[S] {
	if steps == nil {
		return nil
	}
	traced := make([]saga.Step[S], len(steps))
	for i, step := range steps {
		step.Do = tracedFunc(t, step.Name, saga.OpDo, step.Do)
		step.Undo = tracedFunc(t, step.Name, saga.OpUndo, step.Undo)
		step.DoTx = tracedTx(t, step.Name, saga.OpDo, step.DoTx)
		step.UndoTx = tracedTx(t, step.Name, saga.OpUndo, step.UndoTx)
		traced[i] = step
	}
	return traced
}

func tracedFunc[S any](
	t *Telemetry, step string, op saga.Op, fn func(context.Context, *S) error,
) func(context.Context, *S) error {
	if fn == nil {
		return nil
	}
	return func(ctx context.Context, s *S) error {
		return t.step(ctx, step, op, func(ctx context.Context) error { return fn(ctx, s) })
	}
}

func tracedTx[S any](
	t *Telemetry, step string, op saga.Op, fn func(context.Context, *sql.Tx, *S) error,
) func(context.Context, *sql.Tx, *S) error {
	if fn == nil {
		return nil
	}
	return func(ctx context.Context, tx *sql.Tx, s *S) error {
		return t.step(ctx, step, op, func(ctx context.Context) error { return fn(ctx, tx, s) })
	}
}

// step calls fn with a new span as the current span.
func (t *Telemetry) step(ctx context.Context, step string, op saga.Op, fn func(context.Context) error) error {
	attrs := trace.WithAttributes(
		stepKey.String(step), opKey.String(string(op)), attemptKey.Int(saga.CommandFrom(ctx).Attempt))
	options := []trace.SpanStartOption{attrs}
	if origin, linked := ctx.Value(originKey{}).(trace.SpanContext); linked {
		options = append(options, trace.WithNewRoot(), trace.WithLinks(trace.Link{SpanContext: origin}))
	}
	inner, span := t.tracer.Start(ctx, step+" "+string(op), options...)
	inner = context.WithValue(inner, originKey{}, nil) // a saga that this step runs belongs to the step's trace
	var err error = panicked{}
	defer func() {
		if o := outcomeOf(ctx, err); o != ok {
			failSpan(span, o, errorType(err))
		}
		span.End()
	}()
	err = fn(inner)
	return err
}
