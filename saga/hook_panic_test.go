package saga_test

import (
	"bytes"
	"context"
	"log"
	"os"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// TestPanicInAHookDoesNotPass to the caller of Start or Operate, nor to a runner.
func TestPanicInAHookDoesNotPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log.SetOutput(&out)
		defer log.SetOutput(os.Stderr)
		sg := sequence(step("flight"), step("hotel"))
		cfg := saga.RunnerConfig{
			Inject:  func(context.Context) string { panic("inject") },
			Extract: func(context.Context, string) context.Context { panic("extract") },
		}
		panics := func(_ context.Context, e saga.Event) { panic(e.Kind) }
		r, _ := observed(t, saga.NewMemory(), cfg, panics, sg)
		in, err := saga.Register(r, sg).Start(t.Context(), "trip-1", trip{})
		require.NoError(t, err)
		require.Equal(t, "trip-1", in.ID)
		requireEnd(t, r, "trip-1", nil)
		require.Zero(t, r.Stats().TakenOver)
		synctest.Wait()
		for _, want := range []string{
			"Inject panicked: inject\n", "observer panicked: created\n", "observer panicked: completed\n",
		} {
			require.Contains(t, out.String(), "saga: "+want)
		}

		idle := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
		idle.Observe(panics)
		_, err = saga.Register(idle, sg).Start(t.Context(), "trip-2", trip{})
		require.NoError(t, err)
		operate(t, idle, "trip-2", saga.Operation{Action: saga.ActionAbandon, Note: "test"})
		in = instance(t, idle, "trip-2")
		require.Equal(t, saga.Abandoned, in.Status)
	})
}
