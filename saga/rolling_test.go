package saga_test

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// An oldOrder and a newOrder are the state of the same saga in two builds of a program.
type oldOrder struct {
	Item  string
	Paid  bool
	Lines []oldLine
}

type oldLine struct{ Article string }

type newOrder struct {
	Item   string
	Paid   bool
	Coupon string // new
	Lines  []newLine
}

type newLine struct {
	Article string
	Color   string // new
}

func noCall[S any](context.Context, *S) error { return nil }

func TestOldBuildKeepsNewFields(t *testing.T) {
	start := newOrder{Item: "book", Coupon: "SAVE10", Lines: []newLine{{"book", "red"}}}
	want := start
	want.Paid, want.Lines = true, []newLine{{"book", "red"}, {Article: "bag"}}
	pay := func(_ context.Context, o *oldOrder) error {
		o.Paid, o.Lines = true, append(o.Lines, oldLine{"bag"})
		return nil
	}
	kid := func() *saga.Saga[oldOrder] {
		return &saga.Saga[oldOrder]{Name: "kid", Steps: []saga.Step[oldOrder]{{Name: "a", Do: pay, Undo: noCall[oldOrder]}}}
	}
	for name, steps := range map[string][]saga.Step[oldOrder]{
		"one step": {{Name: "pay", Do: pay, Undo: noCall[oldOrder]}},
		"parallel": {
			{Name: "pay", Undo: noCall[oldOrder], Do: func(ctx context.Context, o *oldOrder) error {
				time.Sleep(time.Second)
				return pay(ctx, o)
			}},
			{Name: "other", Parallel: true, Undo: noCall[oldOrder], Do: func(_ context.Context, o *oldOrder) error {
				o.Item = "books"
				return nil
			}},
		},
		"a child": {{Name: "pay", Child: saga.ChildOf(kid(),
			func(o *oldOrder) (oldOrder, error) { return *o, nil },
			func(o *oldOrder, c oldOrder) error { *o = c; return nil },
		)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := saga.NewMemory()
				current := saga.NewRunner(store, saga.RunnerConfig{})
				old := saga.NewRunner(store, saga.RunnerConfig{})
				saga.Register(old, &saga.Saga[oldOrder]{Name: "order", Steps: steps})
				var newSteps []saga.Step[newOrder]
				for _, st := range steps {
					newSteps = append(newSteps, saga.Step[newOrder]{
						Name: st.Name, Parallel: st.Parallel, Do: noCall[newOrder], Undo: noCall[newOrder],
					})
				}
				orders := saga.Register(current, &saga.Saga[newOrder]{Name: "order", Steps: newSteps})
				_, err := orders.Start(t.Context(), "1", start)
				require.NoError(t, err)
				ctx, stop := context.WithCancel(t.Context())
				defer synctest.Wait()
				defer stop()
				go func() { _ = old.Run(ctx) }()
				got, err := orders.Result(t.Context(), "1")
				require.NoError(t, err)
				want := want
				if name == "parallel" {
					want.Item = "books"
				}
				require.Equal(t, want, got)
			})
		})
	}
}

// TestOldBuildDecidesForNewSteps of another engine, which performs parallel steps in a process of the new build.
func TestOldBuildDecidesForNewSteps(t *testing.T) {
	both := func(do func(*newOrder)) func(context.Context, *newOrder) error {
		return func(_ context.Context, o *newOrder) error { do(o); return nil }
	}
	for name, second := range map[string]func(*newOrder){
		"another field":   func(o *newOrder) { o.Paid = true },
		"the same field":  func(o *newOrder) { o.Coupon = "B" },
		"the same change": func(o *newOrder) { o.Coupon = "A" },
	} {
		t.Run(name, func(t *testing.T) {
			current, err := saga.Define(&saga.Saga[newOrder]{Name: "order", Steps: []saga.Step[newOrder]{
				{Name: "a", Do: both(func(o *newOrder) { o.Coupon = "A" }), Undo: noCall[newOrder]},
				{Name: "b", Parallel: true, Do: both(second), Undo: noCall[newOrder]},
			}})
			require.NoError(t, err)
			old, err := saga.Define(&saga.Saga[oldOrder]{Name: "order", Steps: []saga.Step[oldOrder]{
				{Name: "a", Do: noCall[oldOrder], Undo: noCall[oldOrder]},
				{Name: "b", Parallel: true, Do: noCall[oldOrder], Undo: noCall[oldOrder]},
			}})
			require.NoError(t, err)
			now := time.Unix(1e9, 0)
			snapshot, err := old.Begin("1", []byte(`{"Item":"book","Coupon":"","Lines":null}`), now)
			require.NoError(t, err)
			d, err := old.Decide(snapshot, saga.Input{Now: now})
			require.NoError(t, err)
			require.Len(t, d.Calls, 2)
			var answers []saga.Answer
			for _, c := range d.Calls {
				answers = append(answers, current.Perform(t.Context(), c))
			}
			d, err = old.Decide(d.Snapshot, saga.Input{Now: now, Answers: answers})
			require.NoError(t, err)
			var got newOrder
			in := old.Instance(d.Snapshot)
			require.NoError(t, json.Unmarshal(in.State, &got))
			require.Equal(t, "A", got.Coupon)
			if name == "the same field" {
				require.ErrorContains(t, errorText(in.Steps[1].Error), "parallel have both changed fields that this program")
				return
			}
			require.Equal(t, saga.Completed, d.Status)
			require.Equal(t, name == "another field", got.Paid)
		})
	}
}

type errorText string

func (e errorText) Error() string { return string(e) }
