package resilienceotel

import (
	"context"
	"database/sql"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-resilience/resilience/saga"
)

// Inject returns the W3C traceparent of the span in ctx, or "" if there is none. It is for
// saga.RunnerConfig.Inject: the traceparent is stored with the saga. The children of a
// saga (saga.ChildOf) have the span that started the saga. A saga that a step traced by
// [Steps] starts has the span of that step.
func (t *Telemetry) Inject(ctx context.Context) string {
	if origin, ok := ctx.Value(originKey{}).(trace.SpanContext); ok && !trace.SpanContextFromContext(ctx).IsValid() {
		ctx = trace.ContextWithSpanContext(ctx, origin)
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier["traceparent"]
}

// Extract returns ctx with the span that started a saga, for the links of [Steps]. It is
// for saga.RunnerConfig.Extract. The span does not become the current one.
func (t *Telemetry) Extract(ctx context.Context, carried string) context.Context {
	carrier := propagation.MapCarrier{"traceparent": carried}
	origin := trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
	if !origin.IsValid() {
		return ctx
	}
	return context.WithValue(ctx, originKey{}, origin)
}

// originKey is the key of the trace.SpanContext of the span that started a saga.
type originKey struct{}

// Steps returns a copy of steps in which each call of a Do, Undo, DoTx or UndoTx has a
// span. Its name is that of the step and the word do or undo:
//
//	runner := saga.NewRunner(store, saga.RunnerConfig{Inject: t.Inject, Extract: t.Extract})
//	trip := &saga.Saga[Trip]{Name: "trip", Steps: resilienceotel.Steps(t, []saga.Step[Trip]{
//		{Name: "flight", Do: bookFlight, Undo: cancelFlight},
//	})}
//
// A step may run days after the span that started the saga has ended, in another process.
// With the Inject and Extract of a Telemetry, the span of a step is therefore the first of
// a trace of its own, with a link to the span that started the saga. Under saga.Run it is
// a child of the span in the caller's ctx.
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

// step calls fn in a span.
func (t *Telemetry) step(ctx context.Context, step string, op saga.Op, fn func(context.Context) error) error {
	attrs := trace.WithAttributes(
		stepKey.String(step), opKey.String(string(op)), attemptKey.Int(saga.CommandFrom(ctx).Attempt))
	options := []trace.SpanStartOption{attrs}
	if origin, linked := ctx.Value(originKey{}).(trace.SpanContext); linked {
		options = append(options, trace.WithNewRoot(), trace.WithLinks(trace.Link{SpanContext: origin}))
	}
	inner, span := t.tracer.Start(ctx, step+" "+string(op), options...)
	inner = context.WithValue(inner, originKey{}, nil) // a saga that the step runs is a part of it
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
