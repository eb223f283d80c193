package invalid_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/invalid"
)

func TestFieldsNamesAllThatIsWrong(t *testing.T) {
	f := invalid.Fields{Type: "breaker.Config"}
	f.Need(true, "Name", "x", "anything")
	require.NoError(t, f.Err())
	f.Need(false, "FailureRate", 1.5, "in (0, 1]")
	f.Need(false, "Probes", -1, "0 (for 1) or more")
	require.EqualError(t, f.Err(), "breaker.Config.FailureRate is 1.5: must be in (0, 1]\nbreaker.Config.Probes is -1: must be 0 (for 1) or more")
}
