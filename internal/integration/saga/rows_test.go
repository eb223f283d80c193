package saga_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagastore"
)

// Rows that no program of this version writes, after a repair by hand or a restored part of
// a backup, hold up no other saga, and end no process.
func TestRowsOfAnyContentHoldUpNoOther(t *testing.T) {
	texts := []any{"", "x", `{"a":1}`, "[]", "null", `[{"step":7}]`, strings.Repeat("[", 5000), "running"}
	numbers := []any{-1, 0, math.MaxInt32, math.MinInt32, "x"}
	columns := map[string][]any{
		"version": numbers, "status": texts, "data": append(texts,
			[]byte{0xff, 0xfe}), "steps": texts, "parent": texts, "parent_step": texts,
		"seq": numbers, "nonce": {-1, 0, int64(math.MaxInt64), int64(math.MinInt64)}, "owner": texts, "epoch": numbers,
		"failures": numbers, "takeovers": numbers, "last_error": texts,
		"cancel_note": texts, "wake_at": {"x"}, "created_at": numbers,
	}
	trip := &saga.Saga[int]{Name: "trip", Steps: []saga.Step[int]{
		{Name: "a", Do: func(_ context.Context, n *int) error { *n++; return nil },
			Undo: func(context.Context, *int) error { return nil }},
		{Name: "b", Do: func(_ context.Context, n *int) error { *n++; return nil }, Pivot: true},
	}}
	onEach(t, func(t *testing.T, d database) {
		store, db := d.store(t), d.open(t)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		writer := saga.NewRunner(store, saga.RunnerConfig{}) // does not run
		written := saga.Register(writer, trip)
		var ids []string
		start := func(id string) {
			_, err := written.Start(ctx, id, 0)
			require.NoError(t, err)
			ids = append(ids, id)
		}
		changed := 0
		for column, values := range columns {
			for i, value := range values {
				id := fmt.Sprintf("%s-%d", column, i)
				start(id)
				if _, err := db.ExecContext(ctx, d.sql("UPDATE saga SET "+column+" = $1 WHERE id = $2"), value, id); err == nil {
					changed++ // else the table refuses it
				}
			}
		}
		require.Greater(t, changed, len(ids)/2)
		for i := range 20 {
			start(fmt.Sprint("good-", i))
		}

		r := saga.NewRunner(store, saga.RunnerConfig{ // which stops after a LeaseTTL: some rows cannot be given back
			LeaseTTL: 3 * time.Second, Drain: time.Second,
		})
		r.Observe(func(context.Context, saga.Event) {})
		trips := saga.Register(r, trip)
		running, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- r.Run(running) }()
		for i := range 20 {
			n, err := trips.Result(ctx, fmt.Sprint("good-", i))
			require.NoError(t, err)
			require.Equal(t, 2, n)
		}
		stop()
		<-ended

		for _, id := range ids { // whatever they are now, they can be looked at
			_, _ = store.Load(ctx, id)
			_, _ = r.History(ctx, id, 0, 0)
		}
		listed := map[string]bool{}
		for after := ""; ; {
			page, next, err := store.List(ctx, sagastore.Filter{After: after, Limit: 50})
			require.NoError(t, err)
			for _, s := range page {
				listed[s.ID] = true
			}
			if after = next; after == "" {
				break
			}
		}
		require.Len(t, listed, len(ids))
		_, _, err := r.Counts(ctx)
		require.NoError(t, err)
	})
}
