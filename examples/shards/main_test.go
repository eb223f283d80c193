package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestShards(t *testing.T) {
	unguarded := run(none)
	one := run(oneBreaker())
	each := run(breakerPerShard())

	require.Zero(t, unguarded.shutOut+unguarded.spared)
	require.NotZero(t, one.shutOut, "one breaker shuts out shards that are well")
	require.Less(t, each.shutOut, one.shutOut)
	require.Greater(t, each.answered, one.answered)
	require.Less(t, each.reached, unguarded.reached)
	for _, o := range []outcome{unguarded, one, each} {
		require.EqualValues(t, clients*reads, o.answered+o.failed+o.shutOut+o.spared)
	}
}
