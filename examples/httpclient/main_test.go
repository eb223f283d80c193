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
	require.Equal(t, 2, strings.Count(text, "200 OK: GET done"))
	require.Equal(t, 1, strings.Count(text, "200 OK: POST done"))
	require.Equal(t, 1, strings.Count(text, "503 Service Unavailable: Service Unavailable"))
	require.Contains(t, text, "20 calls, 5 requests, 18 calls refused")
	require.Contains(t, text, "circuit: half-open -> closed")
}
