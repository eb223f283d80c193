package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRun(t *testing.T) {
	var out bytes.Buffer
	run(t.Context(), &out)
	text := out.String()
	require.Contains(t, text, "attempt 2 of /users.v1.Users/Get: Unavailable\n  user 1 is Ada\n")
	require.Contains(t, text, "  rpc error: code = Unavailable desc = try later\n")
	require.NotContains(t, text, "of /users.v1.Users/Create: Unavailable")
	require.Contains(t, text, "desc = try later, consecutive failures: 2\n  user 1 is Ada, calls: 0, streams: 1\n"+
		"  user 2 is Grace, calls: 0, streams: 1\n  EOF, consecutive failures: 0\n")
	require.Contains(t, text, "20 calls, waited: true")
	require.Contains(t, text, "breaker open: true")
	require.Equal(t, 1, strings.Count(text, "breaker: "))
}
