package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// A page is a strings.Builder that is safe for concurrent use.
type page struct {
	mu   sync.Mutex
	text strings.Builder
}

func (p *page) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.Write(b)
}

func TestReload(t *testing.T) {
	*lasts = 1500 * time.Millisecond
	var out page
	made, failed := run(t.Context(), &out)
	require.Zero(t, failed)
	require.NotZero(t, made)
	for _, want := range []string{
		"bulkhead/users.Limit: 4 -> 16\n",
		"throttle/users.Rate: 500 -> 2000\n",
		"file: 0 changes made:\n",
		`breaker/users: OpenFor: is 45: must be a duration in quotes, such as "1.5s"`,
		"breaker/users: Failure: breaker.Config has no such field",
		"bulkhead/user: no such policy is registered",
		`breaker/users.OpenFor: "30s" -> "45s"`,
		"bulkhead/users.Limit: 16 -> 2\n",
	} {
		require.Contains(t, out.text.String(), want)
	}
}

func TestReloadReadsFileAtStart(t *testing.T) {
	*lasts, *file = 50*time.Millisecond, filepath.Join(t.TempDir(), "my.json")
	defer func() { *file = "" }()
	require.NoError(t, os.WriteFile(*file, []byte(`{"bulkhead/users": {"Limit": 7}}`), 0o600))
	var out page
	_, failed := run(t.Context(), &out)
	require.Zero(t, failed)
	require.Contains(t, out.text.String(), "file:\nbulkhead/users.Limit: 4 -> 7\n")
}

func TestReloadFromRedis(t *testing.T) {
	*lasts, *addr = 1500*time.Millisecond, "127.0.0.1:6379"
	if a := os.Getenv("REDIS_ADDR"); a != "" {
		*addr = a
	}
	defer func() { *addr = "" }()
	db := redis.NewClient(&redis.Options{Addr: *addr})
	defer func() { _ = db.Close() }()
	if err := db.Set(t.Context(), "resilience:settings", `{"retry/users": {"Attempts": 7}}`,
		time.Minute).Err(); err != nil {
		if os.Getenv("REQUIRE_SERVICES") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	defer db.Del(context.WithoutCancel(t.Context()), "resilience:settings")
	var out page
	_, failed := run(t.Context(), &out)
	require.Zero(t, failed)
	require.Contains(t, out.text.String(), "retry/users.Attempts: 3 -> 7\n")
}
