package shared_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle/internal/shared"
)

func TestTimesHasABound(t *testing.T) {
	const longest = 1 << 61
	for _, c := range []struct {
		token shared.Micros
		n     int
		want  shared.Micros
	}{
		{shared.Micros{Whole: 3, Part: 1 << 31}, 3, shared.Micros{Whole: 10, Part: 1 << 31}},
		{shared.Micros{Whole: longest/4 - 1}, 4, shared.Micros{Whole: longest - 4}},
		{shared.Micros{Whole: longest/4 + 1}, 4, shared.Micros{Whole: longest}},
		{shared.Micros{Whole: longest}, 1 << 20, shared.Micros{Whole: longest}},
	} {
		require.Equal(t, c.want, c.token.Times(c.n))
	}
}
