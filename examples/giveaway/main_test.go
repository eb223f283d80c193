package main

import (
	"context"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// TestMain runs the tests. If a test or a worker process has started the test binary, it runs the
// program instead.
func TestMain(m *testing.M) {
	if os.Getenv("GIVEAWAY") != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// requireExact runs the program and checks that every division pays exactly 100.00.
func requireExact(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], append(args, "-batch", "8000")...)
	cmd.Env = append(os.Environ(), "GIVEAWAY=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, divisions, strings.Count(string(out), ": 100.00"), string(out))
	require.Contains(t, string(out), "retries")
}

func TestGiveawayOnSQLite(t *testing.T) { requireExact(t) }

func TestGiveawayOnPostgreSQL(t *testing.T) {
	dsn := os.Getenv("POSTGRES_DSN")
	if dsn == "" {
		dsn = "postgres://postgres@127.0.0.1:5432/postgres"
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		if must, _ := strconv.ParseBool(os.Getenv("REQUIRE_SERVICES")); must {
			t.Fatal(err)
		}
		t.Skip("PostgreSQL at POSTGRES_DSN cannot be reached: ", err)
	}
	require.NoError(t, conn.Close(ctx))
	requireExact(t, "-dsn", dsn)
}
