// The tests in this file need unexported fields.

package breaker

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// An open breaker refuses a call while another goroutine holds its lock.
func TestRefusalTakesNoLock(t *testing.T) {
	b := New(Config{})
	b.ForceOpen(nil)
	b.mu.Lock()
	defer b.mu.Unlock()
	require.ErrorIs(t, b.Do(t.Context(), nil), ErrOpen)
}

// A success takes no lock, whatever the window, unless it ends a row of failures or moves the
// window on.
func TestSuccessTakesNoLock(t *testing.T) {
	for _, cfg := range []Config{{}, {Window: time.Hour}, {SlowAfter: time.Hour, Window: time.Hour}} {
		b := New(cfg)
		b.mu.Lock()
		require.NoError(t, b.Do(t.Context(), func(context.Context) error { return nil }))
		b.mu.Unlock()
		require.EqualValues(t, 1, b.Stats().Window.Succeeded)
	}
}
