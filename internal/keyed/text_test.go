package keyed_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/keyed"
)

func TestTextAndLabel(t *testing.T) {
	require.Equal(t, "7", keyed.Text(7))
	require.Equal(t, strings.Repeat("k", 100), keyed.Text(strings.Repeat("k", 101)))
	require.Equal(t, "x"+strings.Repeat("\u00e4", 49), keyed.Text("x"+strings.Repeat("\u00e4", 50)),
		"no half of a character")
	type id string
	require.Equal(t, "a", keyed.Text(id("a")))
	require.Equal(t, "users[7]", keyed.Label("users", "7"))
	require.Equal(t, "users", keyed.Label("users", ""))
	require.Equal(t, "[7]", keyed.Label("", "7"))
	require.Empty(t, keyed.Label("", ""))
}
