// The tests in this file need unexported fields.

package breaker

import (
	"testing"

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
