package throttle_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

func TestGroupKeysAreApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1, Burst: 2}})
		require.Equal(t, throttle.Decision{OK: true, Limit: 2, Remaining: 1, ResetAfter: time.Second}, g.AllowN("a", 1))
		require.True(t, g.Allow("a"))
		require.Equal(t, throttle.Decision{Limit: 2, RetryAfter: time.Second, ResetAfter: 2 * time.Second}, g.AllowN("a", 1))
		require.True(t, g.Allow("b"))
		require.Equal(t, []throttle.Usage[string]{{"a", 2, 1}, {"b", 1, 0}}, g.Top(5))
		require.Equal(t, throttle.GroupStats{Admitted: 3, Refused: 1, Spent: 3, Keys: 2}, g.Stats())
		g.Refund("a", 1)
		require.Equal(t, 1, g.Peek("a").Remaining)
		require.Equal(t, 2, g.Peek("c").Remaining)
		require.NoError(t, g.Set("a", 100, 10))
		require.Equal(t, 9, g.Peek("a").Remaining)
		require.True(t, g.AllowN("a", 9).OK)
		require.NoError(t, g.Set("a", 0, 0))
		require.Equal(t, 9*time.Second, g.AllowN("a", 1).RetryAfter)
	})
}

func TestGroupHoldsManyKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var evicted int
		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config: throttle.Config{Rate: 1, Burst: 1}, MaxKeys: 1000, IdleAfter: -1,
			OnEvict: func(u throttle.Usage[int]) { evicted++; require.EqualValues(t, 1, u.Spent) },
		})
		for round := range 5 {
			for k := range 1000 {
				require.True(t, g.Allow(1000*round+k), fmt.Sprint(round, k))
				require.False(t, g.Allow(1000*round+k))
			}
			require.False(t, g.Allow(-1))
			time.Sleep(time.Second)
		}
		s := g.Stats()
		require.Equal(t, 1000, s.Keys)
		require.EqualValues(t, 4000, s.Evicted)
		require.Equal(t, 4000, evicted)
	})
}
