package sqllease_test

import (
	"context"
	"database/sql/driver"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/sqltx/standby"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/sqllease"
)

// Each write of the store finds the primary by itself.
func TestFailoverLeavesNoConnectionToAReader(t *testing.T) {
	free := []driver.Value{"", "", int64(7), int64(-1), int64(0)}
	taken := []driver.Value{"x", "", int64(8), int64(1), int64(0)}
	for name, write := range map[string]func(context.Context, *sqllease.Store) error{
		"Acquire": func(ctx context.Context, s *sqllease.Store) error {
			_, err := s.Acquire(ctx, lease.Request{Name: "a", Token: "x", TTL: time.Minute})
			return err
		},
		"Renew": func(ctx context.Context, s *sqllease.Store) error {
			return s.Renew(ctx, lease.Request{Name: "a", Token: "x", TTL: time.Minute})
		},
		"Run": func(ctx context.Context, s *sqllease.Store) error {
			return s.Renew(ctx, lease.Request{Name: "a", Token: "x", TTL: time.Minute, Run: 7})
		},
		"Release": func(ctx context.Context, s *sqllease.Store) error { return s.Release(ctx, "a", "x") },
	} {
		for _, dialect := range []sqllease.Dialect{sqllease.PostgreSQL, sqllease.MySQL} {
			servers := &standby.Servers{Answer: func(query string) [][]driver.Value {
				switch {
				case strings.Contains(query, "UPDATE") && strings.Contains(query, "RETURNING"):
					return [][]driver.Value{taken}
				case strings.HasPrefix(query, "SELECT token"):
					return [][]driver.Value{free}
				}
				return [][]driver.Value{{int64(1)}}
			}}
			db := servers.Open(t, 3)
			servers.Swap()
			require.NoError(t, write(t.Context(), sqllease.New(db, dialect, sqllease.Config{})), "%s %s", name, dialect)
			require.Equal(t, [2]int{0, 1}, servers.Conns(), "%s %s", name, dialect)
			require.NotEmpty(t, servers.Writes())
		}
	}
}
