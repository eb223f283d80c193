package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRun(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(&out))
	text := out.String()
	require.Equal(t, 5, strings.Count(text, "hello a"))
	require.Equal(t, 1, strings.Count(text, " 429 "))
	require.Equal(t, 2, strings.Count(text, "hello b"))
	require.Equal(t, 1, strings.Count(text, " 503 "))
	require.Equal(t, 2, strings.Count(text, "/health"))
}
