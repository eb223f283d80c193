package keyed_test

import (
	"fmt"
	"iter"
	"maps"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/settings"
)

type config[K comparable] struct {
	MaxKeys   int
	IdleAfter time.Duration
	Setting   int
	Own       func(K) *int
}

func (c config[K]) Validate() error { return nil }

func (c *config[K]) bounds() keyed.Bounds { return keyed.Bounds{c.MaxKeys, c.IdleAfter} }

// A member knows its key and its setting.
type member[K comparable] struct {
	key     K
	setting atomic.Int64
	needed  atomic.Bool
}

type group[K comparable] = keyed.Group[K, config[K], int, member[K]]

func newGroup[K comparable](cfg config[K], evict ...func(shard int, key K, m *member[K])) *group[K] {
	kind := keyed.Kind[K, config[K], int, member[K]]{
		Type:   "x.Config",
		Bounds: (*config[K]).bounds,
		Each:   func(s *settings.Setting[config[K]]) *int { return &s.Load().Setting },
		Make: func(m *member[K], key *K, each *int) {
			if key != nil {
				m.key = *key
			}
			m.setting.Store(int64(*each))
			runtime.Gosched()
		},
		Follow: func(m *member[K], each *int) { m.setting.Store(int64(*each)) },
		Needed: func(m *member[K]) bool { return m.needed.Load() },
	}
	if cfg.Own != nil {
		kind.Own = func(c *config[K], key K) *int { return c.Own(key) }
	}
	if len(evict) > 0 {
		kind.Evict = evict[0]
	}
	return keyed.New(cfg, func(c config[K]) config[K] { return c }, kind)
}

func newMap(limit int, idle time.Duration) *group[int] {
	return newGroup(config[int]{MaxKeys: limit, IdleAfter: idle})
}

func use(t testing.TB, m *group[int], key int) *member[int] {
	t.Helper()
	e := m.Pin(key)
	require.NotNil(t, e)
	defer e.Unpin()
	require.Equal(t, key, e.Value.key)
	return &e.Value
}

func TestMapKeepsOneMemberForEachKey(t *testing.T) {
	m := newMap(100, 0)
	first := use(t, m, 1)
	require.Same(t, first, use(t, m, 1))
	require.NotSame(t, first, use(t, m, 2))
	require.Equal(t, 2, m.Len())
	require.Equal(t, 1, maps.Collect(m.All())[1].key)
	found := m.Find(1)
	require.Same(t, first, &found.Value)
	found.Unpin()
	require.Nil(t, m.Find(3))
}

// A key that does not equal itself could be put into a map, and never be found or
// dropped again.
func TestMapHasNoMemberForAKeyThatIsNotItself(t *testing.T) {
	type pair struct {
		tenant string
		load   float64
	}
	for name, key := range map[string]any{
		"NaN":            math.NaN(),
		"NaN in a field": pair{"a", math.NaN()},
	} {
		t.Run(name, func(t *testing.T) {
			m := newGroup(config[any]{MaxKeys: 10})
			for range 100 {
				require.True(t, m.Pin(key).IsShared())
			}
			require.Zero(t, m.Len())
			require.Empty(t, maps.Collect(m.All()))
			require.Nil(t, m.Find(key))
			require.False(t, m.Room(key))
		})
	}
}

func TestMapPinOfAKnownKeyAllocatesNothing(t *testing.T) {
	m := newGroup(config[string]{MaxKeys: 10})
	key := fmt.Sprint("tenant ", 7)
	m.Pin(key).Unpin()
	require.Zero(t, testing.AllocsPerRun(100, func() { m.Pin(key).Unpin() }))
}

func TestMapNeverExceedsItsBound(t *testing.T) {
	const limit = 50
	m := newMap(limit, 0)
	for key := range 10 * limit {
		use(t, m, key)
		require.LessOrEqual(t, m.Len(), limit)
	}
	require.Equal(t, limit, m.Len())
	require.Len(t, maps.Collect(m.All()), limit)
}

func TestFullMapDropsWhatWasNotUsedLately(t *testing.T) {
	const limit = 40
	m := newMap(limit, 0)
	busy := use(t, m, 0)
	for key := 1; key < 20*limit; key++ {
		use(t, m, key)
		require.Same(t, busy, use(t, m, 0), "in use all the time, after %d other keys", key)
	}
}

func TestFullMapGivesNoMemberWhereNoneMayBeDropped(t *testing.T) {
	const limit = 10
	m := newMap(limit, 0)
	pinned := m.Pin(0)
	for key := 1; key < limit; key++ {
		use(t, m, key).needed.Store(true)
	}
	require.True(t, m.Pin(limit).IsShared())
	require.False(t, m.Room(limit))
	require.Equal(t, limit, m.Len())
	require.NotNil(t, m.Pin(0), "a key that has a member is not concerned")
	pinned.Unpin()
	require.True(t, m.Pin(limit).IsShared(), "pinned twice, unpinned once")
	pinned.Unpin()
	require.NotNil(t, m.Pin(limit))
	require.NotContains(t, maps.Collect(m.All()), 0)
	require.False(t, m.Room(limit+1))
	use(t, m, limit).needed.Store(true)
	more := m.Add(limit + 1)
	require.Equal(t, limit+1, more.Value.key, "with no regard to the bound")
	require.Same(t, more, m.Add(limit+1))
	require.Equal(t, limit+1, m.Len())
}

func TestMapDropsIdleMembersAtInserts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const idle = time.Minute
		m := newMap(1000, idle)
		for key := range 100 {
			use(t, m, key)
		}
		kept := use(t, m, 0)
		kept.needed.Store(true)
		pinned := m.Pin(1)
		busy := use(t, m, 2)
		for key := 1000; key < 6000; key++ {
			time.Sleep(idle / 100)
			require.Same(t, busy, use(t, m, 2))
			use(t, m, key)
		}
		left := maps.Collect(m.All())
		require.Same(t, kept, left[0])
		require.Same(t, &pinned.Value, left[1])
		require.Same(t, busy, left[2])
		require.Less(t, m.Len(), 1000)
	})
}

func TestMapCountsIdleTimeFromTheEndOfTheLastUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const idle = time.Minute
		m := newMap(10_000, idle)
		e := m.Pin(0)
		for key := 1; key < 1000; key++ { // the hand passes while it is pinned
			use(t, m, key)
		}
		time.Sleep(10 * idle)
		e.Unpin()
		time.Sleep(idle - 1)
		for key := 1000; key < 2000; key++ {
			use(t, m, key)
		}
		require.Same(t, &e.Value, use(t, m, 0))
	})
}

func TestMapLookingAtMembersIsNoUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMap(10_000, time.Minute)
		use(t, m, 0)
		for key := 1; key < 5000; key++ {
			time.Sleep(time.Second)
			use(t, m, key)
			for range m.All() {
			}
			if e := m.Find(0); e != nil {
				e.Unpin()
			}
		}
		require.NotContains(t, maps.Collect(m.All()), 0)
	})
}

func TestMapAllMayBeLeftEarlyAndMayUseTheMap(t *testing.T) {
	m := newMap(3, 0)
	for key := range 3 {
		use(t, m, key)
	}
	for key := range m.All() {
		use(t, m, key)
		use(t, m, key+100)
		break
	}
	for key := 200; key < 203; key++ {
		require.NotNil(t, m.Pin(key), "nothing stayed pinned")
	}
}

func TestMapGivesThePlaceBackWhenOwnPanics(t *testing.T) {
	m := newGroup(config[int]{MaxKeys: 1, Own: func(key int) *int {
		if key < 0 {
			panic("negative")
		}
		return nil
	}})
	require.Panics(t, func() { m.Pin(-1) })
	require.Zero(t, m.Len())
	require.NotNil(t, m.Pin(1))
}

func TestUnpinWithoutAPinPanics(t *testing.T) {
	e := newMap(1, 0).Pin(1)
	e.Unpin()
	require.Panics(t, e.Unpin)
}

// Whatever comes and goes, the members that one key has of its own and that are in use at a
// moment are one member, and there are never more than the bound.
func TestMapStress(t *testing.T) {
	const (
		workers = 8
		rounds  = 20_000
		keys    = 64
		limit   = 24
	)
	m := newMap(limit, time.Nanosecond)
	var inUse [keys]struct {
		sync.Mutex
		by *member[int]
		n  int
	}
	var shared, done atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(w)))
			for i := range rounds {
				key := r.IntN(keys)
				e := m.Pin(key)
				if i%100 == 0 {
					for range m.All() {
					}
				}
				if e.IsShared() {
					e.Unpin()
					shared.Add(1)
					continue
				}
				u := &inUse[key]
				u.Lock()
				if u.n > 0 && u.by != &e.Value {
					t.Errorf("two members of key %d in use", key)
				}
				u.by, u.n = &e.Value, u.n+1
				u.Unlock()
				if r.IntN(50) == 0 {
					e.Value.needed.Store(!e.Value.needed.Load() && r.IntN(4) == 0)
				}
				if n := m.Len(); n > limit {
					t.Errorf("%d members", n)
				}
				u.Lock()
				u.n--
				u.Unlock()
				e.Unpin()
				done.Add(1)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, workers*rounds, done.Load()+shared.Load())
	for _, v := range maps.Collect(m.All()) {
		v.needed.Store(false)
	}
	for key := range keys * 10 {
		use(t, m, key) // nothing is pinned any more
	}
}

func BenchmarkMapPin(b *testing.B) {
	m := newGroup(config[string]{MaxKeys: 1000})
	keys := make([]string, 512)
	for i := range keys {
		keys[i] = fmt.Sprintf("tenant-%d", i)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		m.Pin(keys[i%len(keys)]).Unpin()
	}
}

func BenchmarkMapPinParallel(b *testing.B) {
	m := newGroup(config[string]{MaxKeys: 1000})
	keys := make([]string, 512)
	for i := range keys {
		keys[i] = fmt.Sprintf("tenant-%d", i)
	}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for i := 0; pb.Next(); i++ {
			m.Pin(keys[i%len(keys)]).Unpin()
		}
	})
}

func BenchmarkMapInsertFull(b *testing.B) {
	m := newMap(10_000, time.Minute)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		m.Pin(i).Unpin()
	}
}

// What members count is in the sum at every moment, whether they were dropped or not.
func TestSumOfCountsNeverGoesBack(t *testing.T) {
	var dropped [keyed.Shards]int64
	m := newGroup(config[int]{MaxKeys: 50}, func(shard, _ int, v *member[int]) { dropped[shard] += v.setting.Load() })
	sum := func() (n int64) {
		m.Shards(func(shard int, members iter.Seq[*member[int]]) {
			n += dropped[shard]
			for v := range members {
				n += v.setting.Load()
			}
		})
		return n
	}
	const goroutines, calls = 4, 5000
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range calls {
				e := m.Pin((i*7 + g) % 400)
				if e.IsShared() {
					t.Error("no room although nothing is pinned for long")
					return
				}
				e.Value.setting.Add(1)
				e.Unpin()
			}
		})
	}
	var last int64
	for last < goroutines*calls && !t.Failed() {
		n := sum()
		require.GreaterOrEqual(t, n, last)
		last = n
		runtime.Gosched()
	}
	wg.Wait()
	require.EqualValues(t, goroutines*calls, sum())
}

func TestTextAndLabel(t *testing.T) {
	require.Equal(t, "7", keyed.Text(7))
	require.Equal(t, strings.Repeat("k", 100), keyed.Text(strings.Repeat("k", 101)))
	require.Equal(t, "x"+strings.Repeat("\u00e4", 49), keyed.Text("x"+strings.Repeat("\u00e4", 50)), "no half of a character")
	type id string
	require.Equal(t, "a", keyed.Text(id("a")))
	require.Equal(t, "users[7]", keyed.Label("users", "7"))
	require.Equal(t, "users", keyed.Label("users", ""))
	require.Equal(t, "[7]", keyed.Label("", "7"))
	require.Empty(t, keyed.Label("", ""))
}

func TestUpdateOfMaxKeys(t *testing.T) {
	m := newMap(3, 0)
	maxKeys := func(n int) error { return m.Update(func(c *config[int]) { c.MaxKeys = n }) }
	var pinned []*keyed.Entry[member[int]]
	pin := func(key int) bool {
		e := m.Pin(key)
		pinned = append(pinned, e)
		return !e.IsShared()
	}
	for key := range 3 {
		require.True(t, pin(key))
	}
	require.EqualError(t, maxKeys(2), "x.Config.MaxKeys is 2: must be at least the 3 keys that the group holds")
	require.False(t, pin(3))
	require.NoError(t, maxKeys(4))
	require.True(t, pin(3))
	require.False(t, pin(4))
	for _, e := range pinned {
		e.Unpin()
	}
	require.True(t, pin(4), "in the place of another")
	require.Equal(t, 4, m.Len())
}

// If an Update succeeds while members are added, there are no more than it allows.
func TestUpdateOfMaxKeysStress(t *testing.T) {
	lowered := 0
	for range 2000 {
		m := newMap(20, 0)
		var wg sync.WaitGroup
		for w := range 3 {
			wg.Go(func() {
				for key := range 6 {
					m.Pin(10*w + key)
				}
			})
		}
		err := m.Update(func(c *config[int]) { c.MaxKeys = 5 })
		wg.Wait()
		if err == nil {
			lowered++
			require.Equal(t, 5, m.Len())
		} else { // a key that met the bound before it was taken back shares a member
			require.LessOrEqual(t, m.Len(), 18)
			require.Greater(t, m.Len(), 5)
		}
	}
	require.Positive(t, lowered)
}

func TestUpdateOfIdleAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMap(1000, 0)
		for key := range 100 {
			use(t, m, key)
		}
		time.Sleep(time.Hour)
		require.NoError(t, m.Update(func(c *config[int]) { c.IdleAfter = time.Minute }))
		for key := range 500 {
			use(t, m, 1000+key)
			time.Sleep(time.Second)
		}
		require.Less(t, m.Len(), 300)
	})
}

// All members follow an Update, also those that are made meanwhile, but for those of Own.
func TestMembersFollowAnUpdate(t *testing.T) {
	own := -1
	m := newGroup(config[int]{MaxKeys: 1 << 20, Own: func(key int) *int {
		if key == 0 {
			return &own
		}
		return nil
	}})
	require.EqualValues(t, own, m.Pin(0).Value.setting.Load())
	var wg sync.WaitGroup
	var making atomic.Int32
	for w := range 4 {
		making.Add(1)
		wg.Go(func() {
			defer making.Add(-1)
			for key := 1 + w; key < 4000; key += 4 {
				m.Pin(key)
				runtime.Gosched()
			}
		})
	}
	updates := 0
	for ; making.Load() > 0; updates++ {
		require.NoError(t, m.Update(func(c *config[int]) { c.Setting++ }))
	}
	wg.Wait()
	require.EqualValues(t, updates, m.Shared().setting.Load())
	for key, v := range m.All() {
		if key == 0 {
			require.EqualValues(t, own, v.setting.Load())
		} else {
			require.EqualValues(t, updates, v.setting.Load())
		}
	}
}
