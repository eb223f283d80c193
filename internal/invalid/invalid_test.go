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
	require.EqualError(t, f.Err(), "breaker.Config.FailureRate is 1.5: must be in (0, 1]\n"+
		"breaker.Config.Probes is -1: must be 0 (for 1) or more")
}

// An opaque is a store whose values cannot be compared.
type opaque struct{ _ func() }

// A wrapper is another store around one.
type wrapper struct{ any }

func TestFieldsSameAllowsNoOtherValue(t *testing.T) {
	f := invalid.Fields{Type: "breaker.Config"}
	f.Same("Name", "a", "a")
	f.Same("Store", nil, nil)
	f.Same("Store", opaque{}, opaque{}) // nobody can tell
	f.Same("Store", wrapper{opaque{}}, wrapper{opaque{}})
	require.NoError(t, f.Err())
	f.Same("Name", "a", "b")
	f.Same("Levels", 3, 2)
	f.Same("Store", opaque{}, nil)
	f.Same("Codec", f, &f)
	require.EqualError(t, f.Err(), `breaker.Config.Name is "b": must be "a" as before: it cannot change
breaker.Config.Levels is 2: must be 3 as before: it cannot change
breaker.Config.Store is another: must be the same as before: it cannot change
breaker.Config.Codec is another: must be the same as before: it cannot change`)
}
