package others_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	backoff4 "github.com/cenkalti/backoff/v4"
	backoff5 "github.com/cenkalti/backoff/v5"
	backoff6 "github.com/cenkalti/backoff/v6"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/retry"
)

var errDown = errors.New("backend: down")

// marks has Permanent of each version of cenkalti/backoff.
var marks = map[string]func(error) error{
	"v4": backoff4.Permanent,
	"v5": backoff5.Permanent,
	"v6": backoff6.Permanent,
}

// retryAfters has RetryAfter of each version that has one.
var retryAfters = map[string]func(seconds int) error{"v5": backoff5.RetryAfter, "v6": backoff6.RetryAfter}

func TestBackoffPermanentIsHonoredAndRemoved(t *testing.T) {
	for name, permanent := range marks {
		t.Run(name, func(t *testing.T) {
			wrapped := fmt.Errorf("users: %w", permanent(errDown))
			for _, c := range []struct{ returned, want error }{
				{permanent(errDown), errDown},
				{permanent(permanent(errDown)), errDown},
				{retry.Permanent(permanent(errDown)), errDown},
				{permanent(retry.Permanent(errDown)), errDown},
				{backoff6.Permanent(backoff5.Permanent(backoff4.Permanent(errDown))), errDown},
				{permanent(backoff5.RetryAfter(1)), backoff5.RetryAfter(1)},
				{wrapped, wrapped},
			} {
				attempts := 0
				r := retry.New(retry.Config{RetryIf: func(error) bool { panic("called for a permanent error") }})
				err := r.Do(t.Context(), func(context.Context) error { attempts++; return c.returned })
				require.Equal(t, 1, attempts)
				require.Equal(t, c.want, err)
				require.False(t, resilience.Retryable(c.returned))
			}
		})
	}
}

func TestBackoffRetryAfterIsHonored(t *testing.T) {
	for name, after := range retryAfters {
		t.Run(name, func(t *testing.T) {
			for _, err := range []error{
				after(10), fmt.Errorf("users: %w", after(10)), errors.Join(errDown, after(10)),
				errors.Join(after(3), fmt.Errorf("users: %w", after(10)), after(5)),
			} {
				synctest.Test(t, func(t *testing.T) {
					require.Equal(t, 10*time.Second, resilience.RetryAfter(err))
					require.True(t, resilience.Retryable(err))
					start := time.Now()
					got := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0)}).Do(t.Context(),
						func(context.Context) error { return err })
					require.ErrorIs(t, got, err)
					require.ErrorIs(t, got, retry.ErrExhausted)
					require.GreaterOrEqual(t, time.Since(start), 10*time.Second)
					require.LessOrEqual(t, time.Since(start), 11*time.Second)
				})
			}
			for _, seconds := range []int{0, -5} {
				require.Zero(t, resilience.RetryAfter(after(seconds)))
			}
			err := retry.New(retry.Config{}).Do(t.Context(), func(context.Context) error { return after(3600) })
			require.ErrorIs(t, err, retry.ErrExhausted, "longer than MaxRetryAfter")
		})
	}
}

// A BackOff of any version is a retry.Backoff.
func TestBackoffsOfAllVersions(t *testing.T) {
	for name, b := range map[string]func() retry.Backoff{
		"v4": func() retry.Backoff { return &backoff4.ZeroBackOff{} },
		"v5": func() retry.Backoff { return &backoff5.ZeroBackOff{} },
		"v6": func() retry.Backoff { return &backoff6.ZeroBackOff{} },
	} {
		attempts := 0
		err := retry.New(retry.Config{Backoff: b}).Do(t.Context(), func(context.Context) error { attempts++; return errDown })
		require.ErrorIs(t, err, errDown, name)
		require.Equal(t, 3, attempts, name)
	}
}
