package entry_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
)

const s = time.Second

func TestStandingAfterTheTTL(t *testing.T) {
	for name, tc := range map[string]struct {
		times             entry.Times
		fresh, stale, end time.Duration
	}{
		"no stale time":                 {entry.Times{TTL: 10 * s}, 20 * s, 20 * s, 20 * s},
		"stale":                         {entry.Times{TTL: 10 * s, Stale: 5 * s}, 20 * s, 25 * s, 25 * s},
		"stale on error":                {entry.Times{TTL: 10 * s, StaleOnError: 5 * s}, 20 * s, 20 * s, 25 * s},
		"stale for longer than onerror": {entry.Times{TTL: 10 * s, Stale: 7 * s, StaleOnError: 5 * s}, 20 * s, 27 * s, 27 * s},
		"as long as a Duration":         {entry.Times{TTL: math.MaxInt64, Stale: 5 * s}, math.MaxInt64, math.MaxInt64, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			e := entry.Found(tc.times, "value", 1, entry.Terms{}, 10*s, s)
			for now, want := range map[time.Duration]entry.Standing{
				tc.fresh - 1: entry.Fresh, tc.stale - 1: entry.Stale, tc.end - 1: entry.Kept, tc.end: entry.Dead,
			} {
				switch {
				case now < tc.fresh:
					want = entry.Fresh
				case now < tc.stale:
					want = entry.Stale
				}
				require.Equal(t, want, e.Standing(now), now)
			}
			x := e.Expired(tc.times, 12*s)
			require.NotEqual(t, entry.Fresh, x.Standing(12*s))
			require.Equal(t, min(e.Keep, 12*s+max(tc.times.Stale, tc.times.StaleOnError)), x.Keep)
		})
	}
	require.Equal(t, entry.Dead, (*entry.Entry[int])(nil).Standing(0))
	require.Equal(t, entry.Dead, entry.Found(entry.Times{}, 1, 1, entry.Terms{Timed: true}, 10*s, s).Standing(0))
	require.Nil(t, entry.Missing[int](entry.Times{}, entry.Terms{}, 0))
	absent := entry.Missing[int](entry.Times{NotFoundTTL: s, Stale: s}, entry.Terms{}, 0)
	require.Equal(t, entry.Dead, absent.Standing(s), "absence is never stale")
}

func TestVersionsEndWhatBeganBefore(t *testing.T) {
	var v entry.Versions
	m := v.Mark("a")
	require.True(t, v.Holds(m))
	v.EndAll()
	require.False(t, v.Holds(m))

	var divided entry.Versions
	divided.Divide(1000)
	a, b := divided.Mark("a"), divided.Mark("b")
	divided.End("a")
	require.False(t, divided.Holds(a))
	require.True(t, divided.Holds(b))
	require.True(t, divided.Holds(divided.Mark("a")))
}

func TestAnExpiredEntryIsServedNoLongerThanBefore(t *testing.T) {
	e := &entry.Entry[int]{Fresh: 10 * time.Second, Stale: 20 * time.Second, Keep: 30 * time.Second, Pause: 15 * time.Second}
	for now, want := range map[time.Duration][2]time.Duration{5 * time.Second: {11 * time.Second, 17 * time.Second}, 18 * time.Second: {16 * time.Second, 22 * time.Second}, 0: {6 * time.Second, 12 * time.Second}} {
		x := e.Expired(entry.Times{Stale: 6 * time.Second, StaleOnError: 12 * time.Second}, now)
		require.Equal(t, [4]time.Duration{min(now, e.Fresh), want[0], want[1], 0}, [4]time.Duration{x.Fresh, x.Stale, x.Keep, x.Pause})
	}
	x := e.Expired(entry.Times{Stale: time.Minute, StaleOnError: time.Hour}, 5*time.Second)
	require.Equal(t, [2]time.Duration{e.Stale, e.Keep}, [2]time.Duration{x.Stale, x.Keep})
}
