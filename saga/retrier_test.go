package saga_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
)

// TestNestedRetriersDoNotMultiplyAttempts charges a card as often as the step allows, whatever retriers the step
// contains.
func TestNestedRetriersDoNotMultiplyAttempts(t *testing.T) {
	for _, c := range []struct{ attempts, calls int }{{5, 5}, {1, 3}} {
		for _, where := range []string{"around", "inside"} {
			t.Run(fmt.Sprint(c.attempts, " ", where), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := retry.New(retry.Config{Attempts: 3})
					calls := 0
					st := step("charge")
					st.Attempts = c.attempts
					charge := func(context.Context) error { calls++; return errDeclined }
					st.Do = func(ctx context.Context, _ *trip) error { return charge(ctx) }
					if where == "around" {
						st.Middleware = r.Wrap
					} else {
						st.Do = func(ctx context.Context, _ *trip) error { return r.Do(ctx, charge) }
					}
					err := saga.Run(t.Context(), sequence(st), &trip{})
					require.ErrorIs(t, err, errDeclined)
					require.Equal(t, c.calls, calls)
				})
			})
		}
	}
}
