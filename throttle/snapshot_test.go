package throttle_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

func snapshotOf[K comparable](t *testing.T, g *throttle.Group[K]) []byte {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, g.Snapshot(&b))
	return b.Bytes()
}

// A restart does not refill a month's quota. What has refilled meanwhile is there.
func TestRestartKeepsWhatWasSpent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		berlin, err := time.LoadLocation("Europe/Berlin")
		require.NoError(t, err)
		cfg := throttle.GroupConfig[string]{Config: throttle.Config{
			Rate: 1, Burst: 10, Quotas: []throttle.Quota{{N: 100, Per: throttle.Month, In: berlin}, {N: 12, Every: time.Hour}},
		}}
		g := throttle.NewGroup(cfg)
		require.True(t, g.Take("a", 9).OK)
		require.True(t, g.Take("\xff\xfe", 5).OK, "not a text")
		require.NoError(t, g.Set("paying", throttle.Limit{Rate: 1.0 / 3600, Burst: 50, Quotas: []throttle.Quota{{N: 60, Per: throttle.Year}}}))
		require.True(t, g.Take("paying", 30).OK)
		g.Peek("never")
		saved := snapshotOf(t, g)
		require.Equal(t, 5, bytes.Count(saved, []byte("\n")), "%s", saved)

		time.Sleep(4 * time.Second)
		g = throttle.NewGroup(cfg)
		require.NoError(t, g.Restore(bytes.NewReader(saved)))
		require.Equal(t, 3, g.Peek("a").Remaining, "9 of 12 in an hour")
		require.Equal(t, time.Hour-4*time.Second, g.Peek("a").ResetAfter)
		require.Equal(t, 7, g.Peek("\xff\xfe").Remaining)
		require.Equal(t, 10, g.Peek("never").Remaining)
		require.Equal(t, 20, g.Peek("paying").Remaining, "of 50, by its own limit")
		time.Sleep(time.Hour)
		require.Equal(t, 10, g.Peek("a").Remaining)
		require.NoError(t, g.Update(func(c *throttle.GroupConfig[string]) { c.Config.Burst = 1000; c.Config.Quotas = c.Config.Quotas[:1] }))
		require.Equal(t, 91, g.Peek("a").Remaining, "of the month")
		for _, key := range []string{"a", "b"} {
			require.NoError(t, g.Set(key, throttle.Limit{Rate: 1, Burst: 20}))
		}
		again := snapshotOf(t, g)
		g = throttle.NewGroup(cfg)
		require.NoError(t, g.Set("b", throttle.Limit{Rate: 1, Burst: 30}))
		require.NoError(t, g.Restore(bytes.NewReader(again)))
		require.Equal(t, 20, g.Peek("a").Limit)
		require.Equal(t, 30, g.Peek("b").Limit, "the limit that it has now")
	})
}

// Whatever snapshot is restored, how old it is and how often: no key has more tokens.
func TestStaleSnapshotGivesNoTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1, Burst: 10, Quotas: []throttle.Quota{{N: 20, Per: throttle.Day}}}, MaxKeys: 3}
		g := throttle.NewGroup(cfg)
		g.Take(1, 2)
		old := snapshotOf(t, g)
		g.Take(1, 6)
		g.Take(2, 5)
		require.Equal(t, 2, g.Peek(1).Remaining)
		require.NoError(t, g.Restore(bytes.NewReader(old)))
		require.Equal(t, 0, g.Peek(1).Remaining, "2 more are gone")
		require.Equal(t, 5, g.Peek(2).Remaining)
		for range 20 {
			require.NoError(t, g.Restore(bytes.NewReader(old)))
			require.Zero(t, g.Peek(1).Remaining)
		}
		require.LessOrEqual(t, g.Peek(1).RetryAfter, 24*time.Hour)

		time.Sleep(48 * time.Hour)
		g = throttle.NewGroup(cfg)
		require.NoError(t, g.Restore(bytes.NewReader(old)))
		require.Equal(t, 10, g.Peek(1).Remaining, "all of that is over")
	})
}

// A window that is restored ends no earlier than the one that it is added to, and the calls
// that wait are no part of what was spent.
func TestRestoreIntoAGroupInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		group := func() *throttle.Group[int] {
			return throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1, Burst: 2, MaxWait: time.Minute, Quotas: []throttle.Quota{{N: 10, Every: time.Hour}}}})
		}
		early := group()
		early.Take(1, 1)
		time.Sleep(30 * time.Minute)
		late := group()
		late.Take(1, 1)
		end, ofEarly, ofLate := time.Now().Add(time.Hour), snapshotOf(t, early), snapshotOf(t, late)
		require.NoError(t, early.Restore(bytes.NewReader(ofLate)))
		require.NoError(t, late.Restore(bytes.NewReader(ofEarly)))
		for _, g := range []*throttle.Group[int]{early, late} {
			for range 4 {
				time.Sleep(2 * time.Second)
				require.True(t, g.Take(1, 2).OK)
			}
			require.Equal(t, end, time.Now().Add(g.Take(1, 2).RetryAfter), "the later end")
		}

		waiting := group()
		waiting.Take(1, 2)
		begun, other := time.Now(), snapshotOf(t, group())
		go func() {
			time.Sleep(time.Millisecond)
			_ = waiting.Restore(bytes.NewReader(other))
			_ = waiting.Restore(bytes.NewReader(ofEarly))
		}()
		require.NoError(t, waiting.Wait(t.Context(), 1))
		require.Equal(t, time.Second, time.Since(begun))
	})
}

// If the clock was years ahead, a key waits for a burst and the present windows at most.
func TestSnapshotOfTheFuture(t *testing.T) {
	cfg := throttle.GroupConfig[int]{Config: throttle.Config{
		Rate: 1, Burst: 10, Quotas: []throttle.Quota{{N: 15, Per: throttle.Day}, {N: 16, Every: time.Hour}},
	}}
	var ahead []byte
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(10 * 365 * 24 * time.Hour)
		g := throttle.NewGroup(cfg)
		g.Take(1, 10)
		ahead = snapshotOf(t, g)
	})
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(cfg)
		require.NoError(t, g.Restore(bytes.NewReader(ahead)))
		require.Zero(t, g.Peek(1).Remaining)
		require.Equal(t, time.Second, g.Peek(1).RetryAfter)
		time.Sleep(10 * time.Second)
		require.Equal(t, 5, g.Peek(1).Remaining)
		time.Sleep(time.Hour)
		require.True(t, g.Take(1, 5).OK)
		require.Equal(t, cfg.Config.Quotas[0].String(), g.Peek(1).Quota.String())
		time.Sleep(24 * time.Hour)
		require.Equal(t, 10, g.Peek(1).Remaining)
	})
}

// Slower or faster: tokens that have been spent stay spent.
func TestRestoreAtAnotherRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		group := func(rate float64) *throttle.Group[int] {
			return throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: rate, Burst: 10, MaxWait: -1}})
		}
		g := group(1)
		g.Take(1, 7)
		ctx, cancel := context.WithCancel(t.Context())
		require.True(t, g.Take(2, 10).OK)
		go func() { _ = g.Wait(ctx, 2) }()
		synctest.Wait()
		saved := snapshotOf(t, g)
		for _, rate := range []float64{0.25, 1, 1000} {
			g := group(rate)
			require.NoError(t, g.Restore(bytes.NewReader(saved)))
			require.InDelta(t, 3, g.Peek(1).Remaining, 1)
			require.LessOrEqual(t, g.Peek(1).Remaining, 3)
			require.Zero(t, g.Peek(2).Remaining)
		}
		cancel()
	})
}

// A limit that keys share is part of a snapshot.
func TestSnapshotOfOtherKeys(t *testing.T) {
	cfg := throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1e-6, Burst: 5}, MaxKeys: 1}
	g := throttle.NewGroup(cfg)
	g.Take(1, 1)
	g.Take(2, 4)
	saved := snapshotOf(t, g)
	g = throttle.NewGroup(cfg)
	require.NoError(t, g.Restore(bytes.NewReader(saved)))
	require.Equal(t, 4, g.Peek(1).Remaining-0)
	require.LessOrEqual(t, g.Peek(3).Remaining, 1)
	cfg.MaxKeys = 5
	g = throttle.NewGroup(cfg)
	for i := range 5 {
		g.Allow(i)
	}
	require.EqualError(t, g.Restore(bytes.NewReader(saved)), "throttle.GroupConfig.MaxKeys is 5: must be at least 6 for the keys of the snapshot")
}

// A snapshot that is cut off or changed anywhere is an error, and changes nothing.
func TestCorruptSnapshotIsAnError(t *testing.T) {
	cfg := throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1e-6, Burst: 10, Quotas: []throttle.Quota{{N: 20, Every: time.Hour}}}}
	g := throttle.NewGroup(cfg)
	g.Take("a", 3)
	require.NoError(t, g.Set("b", throttle.Limit{Rate: 2, Quotas: []throttle.Quota{{N: 5, Per: throttle.Day}}}))
	saved := snapshotOf(t, g)
	fresh := throttle.NewGroup(cfg)
	for i := range saved {
		require.Error(t, fresh.Restore(bytes.NewReader(saved[:i])), "%s", saved[:i])
		changed := slices.Clone(saved)
		changed[i] ^= 1
		require.Error(t, fresh.Restore(bytes.NewReader(changed)), "%s", changed)
	}
	require.Error(t, fresh.Restore(bytes.NewReader(append(slices.Clone(saved), '\n'))))
	require.ErrorContains(t, fresh.Restore(strings.NewReader("")), "throttle: not a whole snapshot: unexpected EOF")
	require.Zero(t, fresh.Stats().Keys)
	numbers := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg.Config})
	require.Error(t, numbers.Restore(bytes.NewReader(saved)), "keys of another type")
	require.Zero(t, numbers.Stats().Keys)
	require.NoError(t, fresh.Restore(bytes.NewReader(saved)))
}

// seal returns a snapshot of lines.
func seal(lines ...string) []byte {
	text := []byte(strings.Join(append([]string{`{"Format":"throttle.Group 1","Rate":1}`}, lines...), "\n") + "\n")
	return fmt.Appendf(text, "{\"Keys\":%d,\"CRC\":%d}\n", len(lines), crc32.Checksum(text, crc32.MakeTable(crc32.Castagnoli)))
}

// A snapshot gives no tokens, whoever has written it, and has nothing that Restore does not know.
func TestSnapshotOfAnotherProgram(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1, Burst: 10, Quotas: []throttle.Quota{{N: 8, Every: time.Hour}}}})
		require.True(t, g.Take("a", 5).OK)
		later := time.Now().Add(time.Minute).UnixNano()
		require.NoError(t, g.Restore(bytes.NewReader(seal(fmt.Sprintf(`{"Key":"a","Spent":{"1h0m0s":{"Used":-5,"End":%d}}}`, later)))))
		require.Equal(t, 3, g.Peek("a").Remaining)
		require.NoError(t, g.Restore(bytes.NewReader(seal(fmt.Sprintf(`{"Key":"a","Full":%d}`, time.Now().Add(-time.Hour).UnixNano())))))
		require.NoError(t, setGroupLimit(g, throttle.Limit{Rate: 1, Burst: 10}))
		require.Equal(t, 5, g.Peek("a").Remaining)
		require.NoError(t, g.Restore(bytes.NewReader(seal(fmt.Sprintf(`{"Key":"a","Full":%d}`, time.Now().Add(-time.Minute).UnixNano())))))
		require.Equal(t, 5, g.Peek("a").Remaining, "what has refilled long ago takes nothing, and gives nothing")
		require.ErrorContains(t, g.Restore(bytes.NewReader(seal(`{"Key":"a","Owner":"b"}`))), "unknown field")
	})
}

// Snapshot and Restore may be called while calls go on.
func TestSnapshotUnderLoad(t *testing.T) {
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: 1e-6, Burst: 1000, MaxWait: time.Nanosecond,
		Quotas: []throttle.Quota{{N: 1000, Every: time.Hour}}}})
	require.NoError(t, g.Set(0, throttle.Limit{Rate: 1e-6, Burst: 500, Quotas: []throttle.Quota{{N: 500, Every: time.Hour}}}))
	empty := snapshotOf(t, g)
	var calls sync.WaitGroup
	var admitted atomic.Int64
	for range 3 {
		calls.Go(func() {
			for i := range 900 {
				if g.Allow(i % 3) {
					admitted.Add(1)
				}
			}
		})
	}
	calls.Go(func() {
		for range 30 {
			_ = snapshotOf(t, g)
			if err := g.Restore(bytes.NewReader(empty)); err != nil {
				t.Error(err)
			}
		}
	})
	calls.Wait()
	require.EqualValues(t, admitted.Load(), g.Stats().Spent)
	require.EqualValues(t, 500+900+900, admitted.Load())
}

type odd struct{ hidden int }

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errDown }

func TestSnapshotOfKeysThatJSONDoesNotKeep(t *testing.T) {
	hidden := throttle.NewGroup(throttle.GroupConfig[odd]{Config: throttle.Config{Rate: 1}})
	hidden.Allow(odd{1})
	require.ErrorContains(t, hidden.Snapshot(&bytes.Buffer{}), "cannot be written: JSON does not keep it")
	any := throttle.NewGroup(throttle.GroupConfig[any]{Config: throttle.Config{Rate: 1}})
	any.Allow(7)
	require.Error(t, any.Snapshot(&bytes.Buffer{}))
	infinite := throttle.NewGroup(throttle.GroupConfig[float64]{Config: throttle.Config{Rate: 1}})
	infinite.Allow(math.Inf(1))
	require.Error(t, infinite.Snapshot(&bytes.Buffer{}))
	fine := throttle.NewGroup(throttle.GroupConfig[[2]uint8]{Config: throttle.Config{Rate: 1e-6}})
	fine.Allow([2]uint8{1, 2})
	saved := snapshotOf(t, fine)
	fine = throttle.NewGroup(fine.Config())
	require.NoError(t, fine.Restore(bytes.NewReader(saved)))
	require.False(t, fine.Allow([2]uint8{1, 2}))
	require.True(t, errors.Is(fine.Snapshot(failing{}), errDown))
}

// FuzzRestore: no text makes Restore panic, or give tokens.
func FuzzRestore(f *testing.F) {
	cfg := throttle.GroupConfig[string]{Config: throttle.Config{Rate: 1e-6, Burst: 10, Quotas: []throttle.Quota{{N: 20, Every: time.Hour}}}}
	g := throttle.NewGroup(cfg)
	g.Take("a", 3)
	_ = g.Set("b", throttle.Limit{Rate: 2, Quotas: []throttle.Quota{{N: 5, Per: throttle.Day}}})
	var b bytes.Buffer
	_ = g.Snapshot(&b)
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, text []byte) {
		g := throttle.NewGroup(cfg)
		g.Take("a", 4)
		if g.Restore(bytes.NewReader(text)) != nil {
			require.Equal(t, 6, g.Peek("a").Remaining)
			return
		}
		require.LessOrEqual(t, g.Peek("a").Remaining, 6)
	})
}
