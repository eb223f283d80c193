package keyed_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/keyed"
)

// A counted is a value that knows how often it was made and used.
type counted struct {
	key   int
	inUse bool
}

func newTable(maxKeys int, idle time.Duration, evicted *[]int) *keyed.Table[int, *counted] {
	return keyed.NewTable(keyed.Rule[int, *counted]{
		Make:  func(m *keyed.Member[int, *counted]) { m.Value = &counted{key: m.Key} },
		InUse: func(c **counted) bool { return (*c).inUse },
		Evicted: func(c *counted) {
			if evicted != nil {
				*evicted = append(*evicted, c.key)
			}
		},
		MaxKeys: maxKeys, IdleAfter: idle, KeepStrays: true,
	})
}

func touch(t *keyed.Table[int, *counted], key int) *counted {
	m := t.Pin(key)
	defer t.Unpin(m)
	return m.Value
}

func TestTableEvictsIdleMembersAtInserts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var evicted []int
		table := newTable(100, time.Minute, &evicted)
		long := table.Pin(1)
		touch(table, 2)
		time.Sleep(time.Minute - 1)
		touch(table, 3)
		require.Empty(t, evicted)
		table.Unpin(long) // idle time counts from the end of the last use
		time.Sleep(time.Nanosecond)
		touch(table, 4)
		require.Equal(t, []int{2}, evicted)
		for range table.Each(table.Locked(func() {})) {
		}
		time.Sleep(time.Minute - 1)
		touch(table, 5)
		require.Equal(t, []int{2, 3, 1}, evicted, "to be looked at is no use")
	})
}

func TestTableGivesNaNTheOverflow(t *testing.T) {
	table := keyed.NewTable(keyed.Rule[float64, int]{
		Make: func(*keyed.Member[float64, int]) {}, MaxKeys: 10,
	})
	require.Same(t, table.Overflow(), table.Pin(math.NaN()))
	require.Zero(t, table.Len())
}

func TestTableIsUnchangedIfMakePanics(t *testing.T) {
	fail := false
	table := keyed.NewTable(keyed.Rule[int, int]{Make: func(m *keyed.Member[int, int]) {
		if fail {
			panic("no")
		}
		m.Value = m.Key
	}, MaxKeys: 10})
	fail = true
	require.Panics(t, func() { table.Pin(1) })
	require.Zero(t, table.Len())
	fail = false
	require.Equal(t, 1, table.Pin(1).Value)
}

func TestTableLosesNoMemberIfInUsePanics(t *testing.T) {
	panics := true
	var evicted []int
	table := keyed.NewTable(keyed.Rule[int, int]{
		Make:    func(m *keyed.Member[int, int]) { m.Value = m.Key },
		InUse:   func(*int) bool { return panics && func() bool { panics = false; panic("in use") }() },
		Evicted: func(key int) { evicted = append(evicted, key) },
		MaxKeys: 3, IdleAfter: -1,
	})
	use := func(keys ...int) {
		for _, key := range keys {
			table.Unpin(table.Pin(key))
		}
	}
	use(1, 2, 3)
	require.PanicsWithValue(t, "in use", func() { use(4) })
	use(2, 1, 4, 5, 6)
	require.Equal(t, []int{3, 2, 1}, evicted)
}

func TestPinOfExistingKeyDoesNotAllocate(t *testing.T) {
	table := newTable(10, -1, nil)
	touch(table, 1)
	require.Zero(t, testing.AllocsPerRun(100, func() { touch(table, 1) }))
}

func TestTableEachUnpinsAfterBreak(t *testing.T) {
	table := newTable(2, -1, nil)
	touch(table, 1)
	touch(table, 2)
	for range table.Each(table.Locked(func() {})) {
		break
	}
	touch(table, 3)
	touch(table, 4)
	require.Equal(t, 2, table.Len(), "nothing stayed pinned")
	require.NotSame(t, table.Overflow(), table.Pin(5))
}

// A model of a Table: the members in their order of use, the pins, and the keys that share the overflow.
type model struct {
	limit  int
	order  []int // the least recently used first
	pins   map[int]int
	inUse  map[int]bool
	strays map[int]time.Time
}

func (m *model) remove(key int) {
	m.order = slices.DeleteFunc(m.order, func(k int) bool { return k == key })
}

func (m *model) use(key int) {
	m.remove(key)
	m.order = append(m.order, key)
}

// overflow is the key of the overflow in pins and inUse.
const overflow = 0

// pin returns the key of the member that a pin of key gets, and the keys that it evicts.
func (m *model) pin(key int, now time.Time) (got int, evicted []int) {
	if !slices.Contains(m.order, key) {
		since, stray := m.strays[key]
		switch busy := m.pins[overflow] > 0 || m.inUse[overflow]; {
		case stray && !busy:
			clear(m.strays)
		case stray && now.Sub(since) < time.Minute:
			m.pins[overflow]++
			return overflow, nil
		}
		if len(m.order) == m.limit {
			victim := slices.IndexFunc(m.order, func(k int) bool { return m.pins[k] == 0 && !m.inUse[k] })
			if victim < 0 {
				m.strays[key] = now
				m.pins[overflow]++
				return overflow, nil
			}
			evicted = []int{m.order[victim]}
			m.order = append(m.order[victim+1:], m.order[:victim]...) // those that stay are moved behind the others
			delete(m.inUse, evicted[0])
		}
	}
	m.use(key)
	m.pins[key]++
	return key, evicted
}

func FuzzTable(f *testing.F) {
	f.Add(uint64(1), uint8(3), uint16(200))
	f.Add(uint64(2), uint8(0), uint16(500))
	f.Fuzz(func(t *testing.T, seed uint64, size uint8, steps uint16) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 2))
			limit := 1 + int(size)%12 // fewer than the members that an insert checks
			var evicted []int
			table := newTable(limit, -1, &evicted)
			m := &model{limit: limit, pins: map[int]int{}, inUse: map[int]bool{}, strays: map[int]time.Time{}}
			pinned := map[int][]*keyed.Member[int, *counted]{}
			for range steps {
				switch key := r.IntN(2*limit + 1); r.IntN(6) {
				case 0, 1:
					key = max(1, key)
					evicted = nil
					got, victims := m.pin(key, time.Now())
					member := table.Pin(key)
					require.Equal(t, victims, evicted)
					require.Equal(t, got, member.Value.key)
					pinned[got] = append(pinned[got], member)
					time.Sleep(time.Millisecond) // no use is as recent as another
				case 2, 3:
					if p := pinned[key]; len(p) > 0 {
						table.Unpin(p[0])
						pinned[key] = p[1:]
						m.pins[key]--
						if key != overflow {
							m.use(key)
						}
						time.Sleep(time.Millisecond)
					}
				case 4:
					member := table.Get(key)
					require.Equal(t, slices.Contains(m.order, key), member != nil)
					if key == overflow {
						member = table.Overflow()
					}
					if member != nil {
						member.Value.inUse = r.IntN(2) == 0
						m.inUse[key] = member.Value.inUse
					}
				case 5:
					time.Sleep(time.Duration(r.IntN(20)) * time.Second)
				}
				require.Equal(t, len(m.order), table.Len())
			}
		})
	})
}

// A call that is briefer than a millisecond keeps the place that its Pin has given it.
func TestLongUseCountsUntilItsEnd(t *testing.T) {
	for _, c := range []struct {
		takes   time.Duration
		evicted int
	}{{time.Millisecond - 1, 1}, {time.Millisecond, 2}} {
		synctest.Test(t, func(t *testing.T) {
			var evicted []int
			table := newTable(2, -1, &evicted)
			m := table.Pin(1)
			touch(table, 2)
			time.Sleep(c.takes)
			table.Unpin(m)
			touch(table, 3)
			require.Equal(t, []int{c.evicted}, evicted)
		})
	}
}

// A key that takes from the overflow gets no member beside it while what it has taken is missing there.
func TestStrayKeepsTheOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(1, -1, nil)
		pinned := table.Pin(1)
		stray := table.Pin(2)
		require.Same(t, table.Overflow(), stray)
		table.Unpin(pinned)
		require.Same(t, table.Overflow(), table.Pin(2), "a call of the key is in flight there")
		table.Unpin(stray)
		table.Unpin(stray)
		stray.Value.inUse = true
		require.Zero(t, touch(table, 2).key, "the overflow is in use")
		require.Equal(t, 3, touch(table, 3).key, "another key gets a member")
		stray.Value.inUse = false
		require.Equal(t, 2, touch(table, 2).key)

		pinned = table.Pin(2)
		touch(table, 4)
		table.Unpin(pinned)
		stray.Value.inUse = true
		time.Sleep(time.Minute - 1)
		require.Zero(t, touch(table, 4).key)
		time.Sleep(time.Nanosecond)
		require.Equal(t, 4, touch(table, 4).key, "an overflow that is always in use keeps no key for long")
	})
}

func TestStraysAreBounded(t *testing.T) {
	table := newTable(1, -1, nil)
	table.Pin(1)
	table.Overflow().Value.inUse = true
	for key := range 100_000 {
		touch(table, 2+key)
	}
	require.LessOrEqual(t, keyed.Strays(table), 1000)
}

// While keys come and go, no member is evicted under a pin, and each use is counted once.
func TestTableUnderStress(t *testing.T) {
	const limit, keys, goroutines, rounds = 8, 64, 8, 5000
	type tally struct{ pins, uses atomic.Int64 }
	var evictedUses atomic.Int64
	table := keyed.NewTable(keyed.Rule[int, tally]{
		Make: func(*keyed.Member[int, tally]) {},
		Evict: func(v *tally) {
			if n := v.pins.Load(); n != 0 {
				t.Errorf("evicted under %d pins", n)
			}
			evictedUses.Add(v.uses.Load())
		},
		MaxKeys: limit, IdleAfter: time.Microsecond,
	})
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for range rounds {
				key := 1 + r.IntN(keys)
				m := table.Pin(key)
				m.Value.pins.Add(1)
				if m != table.Overflow() && m.Key != key {
					t.Errorf("the member for %d is that for %d", key, m.Key)
				}
				if n := table.Len(); n > limit {
					t.Errorf("%d members", n)
				}
				m.Value.uses.Add(1)
				if r.IntN(50) == 0 {
					for other := range table.Each(table.Locked(func() {})) {
						_ = other.Value.uses.Load()
					}
				}
				m.Value.pins.Add(-1)
				table.Unpin(m)
			}
		})
	}
	wg.Wait()
	total := evictedUses.Load() + table.Overflow().Value.uses.Load()
	for m := range table.Each(table.Locked(func() {})) {
		total += m.Value.uses.Load()
	}
	require.EqualValues(t, goroutines*rounds, total)
}
