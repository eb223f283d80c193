package cacheaside_test

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/services"
)

func acquire(t *testing.T, s cacheaside.Store, key, token string, refresh bool) cacheaside.Response {
	t.Helper()
	looks, err := s.Acquire(t.Context(), cacheaside.Request{Key: key, Token: token, Refresh: refresh})
	require.NoError(t, err)
	require.Len(t, looks, 1)
	return looks[0]
}

// lease acquires key and returns the grant.
func lease(t *testing.T, s cacheaside.Store, key, token string) string {
	t.Helper()
	look := acquire(t, s, key, token, false)
	require.Equal(t, cacheaside.Leased, look.State)
	require.NotEmpty(t, look.Grant)
	return look.Grant
}

// fill fills value under grant and reports whether nothing was invalidated since.
func fill(t *testing.T, s cacheaside.Store, key, grant, value string) bool {
	t.Helper()
	current, err := s.Fill(t.Context(), cacheaside.Entry{
		Key: key, Grant: grant, Value: []byte(value), Fresh: time.Minute, Keep: time.Hour})
	require.NoError(t, err)
	require.Len(t, current, 1)
	return current[0]
}

// value returns the value of key in the Store, fresh or not.
func value(t *testing.T, s cacheaside.Store, key string) string {
	t.Helper()
	look := acquire(t, s, key, "looks", false)
	require.NoError(t, s.Release(t.Context(), cacheaside.Request{Key: key, Token: "looks"}, false))
	return string(look.Value)
}

// If the clock of Redis is set back, the time of a failed load is in the future. Such a failure does not count.
func TestFailureBeforeTheClockWasSetBack(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	prefix := newPrefix(t)
	s := p.store(prefix)
	require.True(t, fill(t, s, "k", lease(t, s, "k", "a"), "stale"))
	require.NoError(t, s.Expire(t.Context(), "k"))
	a := cacheaside.Request{Key: "k", Token: "a", Pause: time.Second}
	look := acquire(t, s, "k", "a", false)
	require.Equal(t, cacheaside.Leased, look.State)
	require.NoError(t, s.Release(t.Context(), a, true))
	hash := p.client.Keys(t.Context(), "{"+prefix+"*}:k").Val()[0]
	future := time.Now().Add(time.Hour).UnixMicro()
	require.NoError(t, p.client.HSet(t.Context(), hash, "b0", future).Err())

	looks, err := s.Acquire(t.Context(), a)
	require.NoError(t, err)
	require.Equal(t, cacheaside.Leased, looks[0].State, "the stale value is served for an hour, not for a second")
	b := cacheaside.Request{Key: "k", Token: "b"}
	looks, err = s.Acquire(t.Context(), b)
	require.NoError(t, err)
	require.Equal(t, cacheaside.Busy, looks[0].State)
	b.WaitToken = looks[0].WaitToken
	looks, err = s.Acquire(t.Context(), b)
	require.NoError(t, err)
	require.Equal(t, cacheaside.Busy, looks[0].State, "the load has not failed yet")
}

// However long the pause after a failed load is, there is none if no load has failed.
func TestLongPauseWithoutAFailure(t *testing.T) {
	s := newProcess(t, services.Redis(t)).store(newPrefix(t))
	require.True(t, fill(t, s, "k", lease(t, s, "k", "a"), "stale"))
	require.NoError(t, s.Expire(t.Context(), "k"))
	looks, err := s.Acquire(t.Context(), cacheaside.Request{Key: "k", Token: "a", Pause: 1 << 61})
	require.NoError(t, err)
	require.Equal(t, cacheaside.Leased, looks[0].State)
}

// The Store knows only the last generation that was filled. So it rejects a Grant that is older.
func TestGrantBeforeTheLastFill(t *testing.T) {
	s := newProcess(t, services.Redis(t)).store(newPrefix(t))
	a := lease(t, s, "k", "a")
	require.True(t, fill(t, s, "k", a, "of a"))
	require.True(t, fill(t, s, "k", a, "of a"))
	require.True(t, fill(t, s, "k", acquire(t, s, "k", "b", true).Grant, "of b"))
	require.False(t, fill(t, s, "k", a, "of a"))
	require.Equal(t, "of b", value(t, s, "k"))
}

// Damaged keys are replaced, and other keys of the call are not affected.
func TestDamagedKeysAreReplaced(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	for name, damage := range map[string]func(c *redis.Client, hash string) error{
		"a string": func(c *redis.Client, hash string) error { return c.Set(t.Context(), hash, "x", time.Hour).Err() },
		"a list": func(c *redis.Client, hash string) error {
			if err := c.Del(t.Context(), hash).Err(); err != nil {
				return err
			}
			return c.LPush(t.Context(), hash, "x").Err()
		},
		"no times": func(c *redis.Client, hash string) error { return c.HDel(t.Context(), hash, "f0", "k0", "l0").Err() },
		"times are text": func(c *redis.Client, hash string) error {
			return c.HSet(t.Context(), hash, "f0", "x", "k0", "y", "l0", "z", "w", "u").Err()
		},
		"the epoch is text": func(c *redis.Client, hash string) error { return c.HSet(t.Context(), hash, "e0", "x").Err() },
		"a list for the epoch": func(c *redis.Client, hash string) error {
			epoch, _, _ := strings.Cut(hash, ":k")
			if err := c.Del(t.Context(), epoch).Err(); err != nil {
				return err
			}
			return c.LPush(t.Context(), epoch, "x").Err()
		},
		"text for the epoch": func(c *redis.Client, hash string) error {
			epoch, _, _ := strings.Cut(hash, ":k")
			return c.Set(t.Context(), epoch, "text", time.Hour).Err()
		},
	} {
		for call, do := range map[string]func(s cacheaside.Store, key, grant string) error{
			"nothing":    func(cacheaside.Store, string, string) error { return nil },
			"invalidate": func(s cacheaside.Store, key, _ string) error { return s.Invalidate(t.Context(), key) },
			"expire":     func(s cacheaside.Store, key, _ string) error { return s.Expire(t.Context(), key) },
			"release": func(s cacheaside.Store, key, _ string) error {
				return s.Release(t.Context(), cacheaside.Request{Key: key, Token: "a"}, false)
			},
			"all": func(s cacheaside.Store, _, _ string) error { return s.InvalidateAll(t.Context()) },
			"fill": func(s cacheaside.Store, key, grant string) error {
				_, err := s.Fill(t.Context(),
					cacheaside.Entry{Key: key, Grant: grant, Value: []byte("v"), Fresh: time.Hour, Keep: time.Hour})
				return err
			},
			"update": func(s cacheaside.Store, key, _ string) error {
				if _, err := s.Fence(t.Context(), key, "w"); err != nil {
					return err
				}
				return s.Unfence(t.Context(), key, "w")
			},
			"unfence": func(s cacheaside.Store, key, _ string) error { return s.Unfence(t.Context(), key, "w") },
		} {
			t.Run(name+"/"+call, func(t *testing.T) {
				prefix := newPrefix(t)
				s := p.store(prefix)
				require.True(t, fill(t, s, "k", lease(t, s, "k", "x"), "old"))
				grant := acquire(t, s, "k", "a", true).Grant
				hash := p.client.Keys(t.Context(), "{"+prefix+"*}:k").Val()[0]
				require.NoError(t, damage(p.client, hash))
				require.NoError(t, do(s, "k", grant))
				look := acquire(t, s, "k", "a", true)
				require.Equal(t, cacheaside.Leased, look.State)
				require.True(t, fill(t, s, "k", look.Grant, "new"))
				require.Equal(t, "new", value(t, s, "k"))
			})
		}
	}
}

// The fence of a process with a longer WriteTimeout stays in place when a shorter one ends.
func TestLongestFenceCounts(t *testing.T) {
	p, prefix := newProcess(t, services.Redis(t)), newPrefix(t)
	for token, timeout := range map[string]time.Duration{"long": time.Minute, "short": 50 * time.Millisecond} {
		s := p.store(prefix, func(cfg *redisstore.Config) { cfg.WriteTimeout = timeout })
		_, err := s.Fence(t.Context(), "k", token)
		require.NoError(t, err)
	}
	time.Sleep(110 * time.Millisecond) // the short one ends after twice its WriteTimeout
	require.Equal(t, cacheaside.Fenced, acquire(t, p.store(prefix), "k", "b", false).State)
}
