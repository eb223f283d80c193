package saga_test

import (
	"bytes"
	"context"
	"database/sql"
	"log"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

type traceKey struct{}

func trace(ctx context.Context) string { s, _ := ctx.Value(traceKey{}).(string); return s }

func withTrace(ctx context.Context, trace string) context.Context {
	return context.WithValue(ctx, traceKey{}, trace)
}

// TestSagaCarriesStartContext starts sagas with a trace, one of them in a transaction, stops the process, and lets
// another process finish them.
func TestSagaCarriesStartContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newTxMemory(t)
		seen := func(ctx context.Context, s *trip) { s.Calls = append(s.Calls, trace(ctx)) }
		flight, hotel, car := step("flight"), inTx("hotel"), failing("car", saga.Declined(errDeclined))
		flight.Do = func(ctx context.Context, s *trip) error { seen(ctx, s); return nil }
		flight.Undo = func(ctx context.Context, s *trip) error { seen(ctx, s); return nil }
		hotel.DoTx = func(ctx context.Context, _ *sql.Tx, s *trip) error { seen(ctx, s); return nil }
		hotel.UndoTx = func(ctx context.Context, _ *sql.Tx, s *trip) error { seen(ctx, s); return nil }
		wait := true
		do := car.Do
		car.Do = func(ctx context.Context, s *trip) error {
			if wait {
				return errDeclined // and parks
			}
			return do(ctx, s)
		}
		car.Backoff = func(int) time.Duration { return time.Minute }
		sg := sequence(flight, hotel, car)
		var mu sync.Mutex
		told := make(map[string]bool)
		cfg := saga.RunnerConfig{Inject: trace, Extract: withTrace}
		r, stop := observed[trip](t, store, cfg,
			func(ctx context.Context, e saga.Event) {
				if e.Kind != saga.EventCreated {
					mu.Lock()
					defer mu.Unlock()
					told[trace(ctx)] = true
				}
			}, sg)
		_, err := saga.Register(r, sg).Start(withTrace(t.Context(), "trace 1"), "trip-1", trip{})
		require.NoError(t, err)
		tx, err := store.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, saga.Register(r, sg).StartTx(withTrace(t.Context(), "trace 2"), tx, "trip-2", trip{}))
		require.NoError(t, tx.Commit())
		time.Sleep(10 * time.Second)
		stop()
		wait = false
		r, _ = begin[trip](t, store, cfg, sg)
		require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry, Note: "now"}),
			"an operator's write retains it")
		for id, want := range map[string]string{"trip-1": "trace 1", "trip-2": "trace 2"} {
			s, err := result[trip](t.Context(), r, id)
			require.ErrorIs(t, err, saga.ErrCompensated)
			require.Equal(t, []string{want, want, "do car", want, want}, s.Calls)
		}
		mu.Lock()
		defer mu.Unlock()
		require.Contains(t, told, "trace 1")
		require.Contains(t, told, "trace 2")
	})
}

// TestOversizedContextIsNotCarried: the saga starts without it.
func TestOversizedContextIsNotCarried(t *testing.T) {
	for name, cfg := range map[string]saga.RunnerConfig{
		"nothing":           {Inject: func(context.Context) string { return "" }},
		"too much":          {Inject: func(context.Context) string { return strings.Repeat("x", 4097) }},
		"no text":           {Inject: func(context.Context) string { return "\xff" }},
		"no Inject":         {},
		"Extract panics":    {Inject: trace, Extract: func(context.Context, string) context.Context { panic("oops") }},
		"no ctx":            {Inject: trace, Extract: func(context.Context, string) context.Context { return nil }},
		"NUL and newlines":  {Inject: func(context.Context) string { return "a\x00\n\"" }, Extract: withTrace},
		"as much as may be": {Inject: func(context.Context) string { return strings.Repeat("x", 4096) }, Extract: withTrace},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if cfg.Extract == nil {
					cfg.Extract = func(ctx context.Context, _ string) context.Context {
						t.Error("it carries nothing")
						return ctx
					}
				}
				var got string
				flight := step("flight")
				flight.Do = func(ctx context.Context, _ *trip) error { got = trace(ctx); return nil }
				sg := sequence(flight)
				r, _ := begin(t, saga.NewMemory(), cfg, sg)
				_, err := saga.Register(r, sg).Start(withTrace(t.Context(), "trace"), "trip-1", trip{})
				require.NoError(t, err)
				requireEnd(t, r, "trip-1", nil)
				switch name {
				case "NUL and newlines":
					require.Equal(t, "a\x00\n\"", got)
				case "as much as may be":
					require.Len(t, got, 4096)
				default:
					require.Empty(t, got)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		var logged bytes.Buffer
		log.SetOutput(&logged)
		defer log.SetOutput(os.Stderr)
		sg := sequence(step("flight"))
		r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{Inject: trace}, sg)
		_, err := saga.Register(r, sg).Start(withTrace(t.Context(), "trace"), "trip-1", trip{})
		require.NoError(t, err)
		requireCompleted(t, r, "trip-1")
		stop()
		require.Empty(t, logged.String(), "without Extract")
	})
}
