package main

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func run(t *testing.T, args ...string) string {
	out, err := exec.CommandContext(t.Context(), "go", append([]string{"run", "."}, args...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

func TestOneProcess(t *testing.T) {
	out := run(t)
	require.Contains(t, out, "1000 concurrent callers: 1 query\n")
	require.Contains(t, out, "after an update: 120 cents\n")
	require.Contains(t, out, "the database is closed: still 120 cents\n")
}

func TestTwoProcesses(t *testing.T) {
	addr := os.Getenv("REDIS_ADDR")
	if addr == "" {
		addr = "127.0.0.1:6379"
	}
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		if must, _ := strconv.ParseBool(os.Getenv("REQUIRE_SERVICES")); must {
			t.Fatalf("Redis at %s cannot be reached: %v", addr, err)
		}
		t.Skipf("Redis at %s cannot be reached: %v", addr, err)
	}
	_ = conn.Close()
	out := run(t, "-redis", addr)
	require.Equal(t, 5, strings.Count(out, "the second process sees"), out)
	require.Contains(t, out, "the first process sees 106")
}
