package resilienceotel_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/saga"
)

func TestStepsAreLinkedToTheSpanThatStartedTheSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSDK(t)
		tel := resilienceotel.New(s.Config)
		runner := saga.NewRunner(saga.NewMemory(),
			saga.RunnerConfig{Name: "worker", Inject: tel.Inject, Extract: tel.Extract})
		fail := func(context.Context, *trip) error { return saga.Permanent(errDown) }
		inner := &saga.Saga[trip]{Name: "inner",
			Steps: resilienceotel.Steps(tel, []saga.Step[trip]{{Name: "within", Do: done, Undo: done}})}
		sg := &saga.Saga[trip]{Name: "trip", Steps: resilienceotel.Steps(tel, []saga.Step[trip]{
			{Name: "flight", Do: func(ctx context.Context, t *trip) error { return saga.Run(ctx, inner, t) }, Undo: done},
			{Name: "hotel", Do: fail, Undo: done},
		})}
		sagas := saga.Register(runner, sg)
		s.observe(t, runner)

		ctx, span := s.tracer.Tracer("test").Start(t.Context(), "order")
		_, err := sagas.Start(ctx, "trip-17", trip{})
		require.NoError(t, err)
		span.End()
		serving, serve := s.tracer.Tracer("test").Start(t.Context(), "serve")
		defer serve.End()
		running, stop := context.WithCancel(serving)
		defer stop()
		go func() { _ = runner.Run(running) }()
		_, err = sagas.Result(t.Context(), "trip-17")
		require.ErrorIs(t, err, saga.ErrCompensated)
		time.Sleep(time.Minute)

		spans := s.spans.GetSpans()
		var names []string
		for _, step := range spans[1:] {
			names = append(names, step.Name)
			if step.Name == "within do" {
				require.Equal(t, named(spans, "flight do")[0].SpanContext.SpanID(), step.Parent.SpanID())
				require.Empty(t, step.Links)
				continue
			}
			require.False(t, step.Parent.IsValid(), "a trace of its own")
			require.Len(t, step.Links, 1)
			require.Equal(t, span.SpanContext().TraceID(), step.Links[0].SpanContext.TraceID())
			require.Equal(t, span.SpanContext().SpanID(), step.Links[0].SpanContext.SpanID())
			require.NotContains(t, attrs(step), "trip-17")
		}
		require.ElementsMatch(t, []string{"flight do", "within do", "hotel do", "hotel undo", "flight undo"}, names)
		require.Equal(t, "{attempt=1,op=do,step=flight}", attrs(named(spans, "flight do")[0]))

		v := s.values(t)
		require.Equal(t, 1.0, v["resilience.saga.duration{name=worker,saga=trip,status=compensated}"])
		require.Equal(t, 1.0, v["resilience.saga.step.duration{name=worker,op=undo,outcome=done,saga=trip,step=flight}"])
	})
}

func TestStepsOfARunAreChildren(t *testing.T) {
	s := newSDK(t)
	tel := resilienceotel.New(s.Config)
	sg := &saga.Saga[trip]{Name: "trip", Steps: resilienceotel.Steps(tel, []saga.Step[trip]{
		{Name: "flight", Do: done, Undo: done},
		{Name: "hotel", Attempts: 1, Undo: done, Do: func(context.Context, *trip) error { return errDown }},
	})}
	ctx, span := s.tracer.Tracer("test").Start(t.Context(), "order")
	require.ErrorIs(t, saga.Run(ctx, sg, &trip{}), errDown)
	span.End()
	spans := s.spans.GetSpans()
	require.Len(t, spans, 5)
	for _, step := range spans[:4] {
		require.Equal(t, span.SpanContext().SpanID(), step.Parent.SpanID(), step.Name)
		require.Empty(t, step.Links)
	}
	require.Equal(t, codes.Error, named(spans, "hotel do")[0].Status.Code)
}

func TestStepsLeavesTheStepsAsTheyAre(t *testing.T) {
	tel := resilienceotel.New(newSDK(t).Config)
	steps := []saga.Step[trip]{{Name: "a", Do: done, Attempts: 7}}
	traced := resilienceotel.Steps(tel, steps)
	require.Equal(t, 7, traced[0].Attempts)
	require.Nil(t, traced[0].Undo)
	require.Nil(t, traced[0].DoTx)
	require.Nil(t, traced[0].UndoTx)
	traced[0].Name = "c"
	require.Equal(t, "a", steps[0].Name)
	require.Nil(t, resilienceotel.Steps[trip](tel, nil))
}

func TestInjectAndExtract(t *testing.T) {
	s := newSDK(t)
	tel := resilienceotel.New(s.Config)
	require.Empty(t, tel.Inject(t.Context()))
	ctx, span := s.tracer.Tracer("test").Start(t.Context(), "order")
	defer span.End()
	require.Equal(t, "00-"+span.SpanContext().TraceID().String()+"-"+span.SpanContext().SpanID().String()+"-01",
		tel.Inject(ctx))
	linked := tel.Extract(t.Context(), tel.Inject(ctx))
	require.Equal(t, tel.Inject(ctx), tel.Inject(linked), "for a saga that the saga starts")
	require.False(t, trace.SpanContextFromContext(linked).IsValid())
	for _, bad := range []string{"", "x", "00-00000000000000000000000000000000-0000000000000000-01",
		"ff-" + tel.Inject(ctx)[3:]} {
		require.Equal(t, t.Context(), tel.Extract(t.Context(), bad), bad)
	}
}

func TestPanicInAStep(t *testing.T) {
	s := newSDK(t)
	steps := resilienceotel.Steps(resilienceotel.New(s.Config), []saga.Step[trip]{
		{Name: "a", Attempts: 1, Undo: done, Do: func(context.Context, *trip) error { panic("oops") }},
	})
	require.PanicsWithValue(t, "oops",
		func() { _ = saga.Run(t.Context(), &saga.Saga[trip]{Name: "trip", Steps: steps}, &trip{}) })
	require.Contains(t, attrs(named(s.spans.GetSpans(), "a do")[0]), "error.type=panic,attempt=1,op=do,outcome=error")
}
