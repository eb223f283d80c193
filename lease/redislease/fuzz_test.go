package redislease_test

import (
	"context"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/lease/redislease"
)

// Regardless of the answer of a server, a proxy or a client, a candidate leads only by a record with its own token, and
// its term ends within its TTL unless it is renewed.
func FuzzAnswers(f *testing.F) {
	f.Add(uint8(6), uint8(0), true, int64(1), int64(1_000_000), int64(0))
	f.Add(uint8(6), uint8(1), true, int64(1), int64(math.MaxInt64), int64(math.MinInt64))
	f.Add(uint8(5), uint8(2), false, int64(-1), int64(5), int64(5))
	f.Fuzz(func(t *testing.T, fields, kind uint8, own bool, epoch, left, run int64) {
		synctest.Test(t, func(t *testing.T) {
			s := redislease.New(redislease.Config{Eval: func(_ context.Context, _ string, _ []string, args ...any) (any, error) {
				token := "another"
				if own {
					token = args[1].(string)
				}
				as := func(n int64) any { return []any{n, float64(n), nil, "x"}[kind%4] }
				answer := []any{token, "me", epoch, as(left), run, int64(1), 0, 0}
				if args[0] == "renew" {
					answer[0] = "another"
				}
				return answer[:fields%8], nil
			}})
			term, err := lease.New(s, lease.Config{Name: "a", TTL: time.Second}).TryCampaign(t.Context())
			if err != nil {
				return
			}
			require.True(t, own && fields%8 == 6 && kind%4 == 0 && left > 0)
			time.Sleep(time.Second)
			require.Error(t, term.Context().Err())
			_ = term.Resign(t.Context())
		})
	})
}
