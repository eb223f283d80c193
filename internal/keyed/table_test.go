package keyed_test

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/keyed"
)

// A counted is a value that knows how often it was made and used.
type counted struct {
	key    int
	uses   int
	needed bool
}

func newTable(maxKeys int, idle time.Duration, evicted *[]int) *keyed.Table[int, *counted] {
	return keyed.NewTable(keyed.Rule[int, *counted]{
		Make:   func(key int) *counted { return &counted{key: key} },
		Needed: func(c **counted) bool { return (*c).needed },
		Evicted: func(c *counted) {
			if evicted != nil {
				*evicted = append(*evicted, c.key)
			}
		},
		MaxKeys: maxKeys, Idle: idle,
	})
}

func touch(t *keyed.Table[int, *counted], key int) *counted {
	m := t.Pin(key)
	defer t.Unpin(m)
	return m.Value
}

func TestTableEvictsTheLeastRecentlyUsed(t *testing.T) {
	var evicted []int
	table := newTable(3, -1, &evicted)
	for _, key := range []int{1, 2, 3, 1, 4, 2} {
		touch(table, key)
	}
	require.Equal(t, []int{2, 3}, evicted)
	require.Equal(t, 3, table.Len())
}

func TestTableKeepsPinnedAndNeededMembers(t *testing.T) {
	var evicted []int
	table := newTable(2, -1, &evicted)
	pinned := table.Pin(1)
	touch(table, 2).needed = true
	require.Same(t, table.Overflow(), table.Pin(3), "no place")
	table.Unpin(table.Overflow())
	require.Empty(t, evicted)
	table.Unpin(pinned)
	require.Equal(t, 3, touch(table, 3).key)
	require.Equal(t, []int{1}, evicted)
	require.Zero(t, table.Overflow().Value.key, "made with the zero key")
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

func TestTableGivesAKeyThatIsNotItselfTheOverflow(t *testing.T) {
	table := keyed.NewTable(keyed.Rule[float64, int]{Make: func(float64) int { return 0 }, MaxKeys: 10})
	require.Same(t, table.Overflow(), table.Pin(math.NaN()))
	require.Zero(t, table.Len())
}

func TestTableIsAsBeforeIfMakePanics(t *testing.T) {
	fail := false
	table := keyed.NewTable(keyed.Rule[int, int]{Make: func(key int) int {
		if fail {
			panic("no")
		}
		return key
	}, MaxKeys: 10})
	fail = true
	require.Panics(t, func() { table.Pin(1) })
	require.Zero(t, table.Len())
	fail = false
	require.Equal(t, 1, table.Pin(1).Value)
}

func TestTableLosesNoMemberIfNeededPanics(t *testing.T) {
	panics := true
	var evicted []int
	table := keyed.NewTable(keyed.Rule[int, int]{
		Make:    func(key int) int { return key },
		Needed:  func(*int) bool { return panics && func() bool { panics = false; panic("needed") }() },
		Evicted: func(key int) { evicted = append(evicted, key) },
		MaxKeys: 3, Idle: -1,
	})
	use := func(keys ...int) {
		for _, key := range keys {
			table.Do(key, func(*int) {})
		}
	}
	use(1, 2, 3)
	require.PanicsWithValue(t, "needed", func() { use(4) })
	use(2, 1, 4, 5, 6)
	require.Equal(t, []int{3, 2, 1}, evicted)
}

func TestTablePinOfAKnownKeyAllocatesNothing(t *testing.T) {
	table := newTable(10, -1, nil)
	touch(table, 1)
	require.Zero(t, testing.AllocsPerRun(100, func() { touch(table, 1) }))
}

func TestTableEachMayBeLeftEarly(t *testing.T) {
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

// The model of a Table: which key has a member, in the order of use.
func FuzzTable(f *testing.F) {
	f.Add(uint64(1), uint8(3), uint16(200))
	f.Fuzz(func(t *testing.T, seed uint64, size uint8, steps uint16) {
		r := rand.New(rand.NewPCG(seed, 2))
		limit := 1 + int(size)%12 // fewer than the members that an insert looks at
		var evicted []int
		table := newTable(limit, -1, &evicted)
		var order []int // the least recently used first
		pins := map[int][]*keyed.Member[int, *counted]{}
		needed := map[int]bool{}
		remove := func(key int) {
			for i, k := range order {
				if k == key {
					order = append(order[:i:i], order[i+1:]...)
					return
				}
			}
		}
		has := func(key int) bool {
			for _, k := range order {
				if k == key {
					return true
				}
			}
			return false
		}
		for range steps {
			key := 1 + r.IntN(2*limit)
			switch r.IntN(4) {
			case 0, 1:
				evicted = nil
				m := table.Pin(key)
				place := true
				if !has(key) && len(order) == limit {
					victim, kept := 0, []int(nil)
					for _, k := range order {
						if len(pins[k]) == 0 && !needed[k] {
							victim = k
							break
						}
						kept = append(kept, k)
					}
					for _, k := range kept {
						remove(k)
						order = append(order, k)
					}
					if place = victim != 0; place {
						remove(victim)
						require.Equal(t, []int{victim}, evicted)
					}
				}
				if !place {
					require.Same(t, table.Overflow(), m)
					continue
				}
				require.Equal(t, key, m.Value.key)
				remove(key)
				order = append(order, key)
				pins[key] = append(pins[key], m)
			case 2:
				if p := pins[key]; len(p) > 0 {
					table.Unpin(p[0])
					pins[key] = p[1:]
					remove(key)
					order = append(order, key)
				}
			case 3:
				if has(key) {
					needed[key] = r.IntN(2) == 0
					for m := range table.Each(table.Locked(func() {})) {
						if m.Key == key {
							m.Value.needed = needed[key]
						}
					}
				}
			}
			for k := range needed {
				if !has(k) {
					delete(needed, k)
				}
			}
			require.Equal(t, len(order), table.Len())
		}
	})
}

func TestTableUnderStress(t *testing.T) {
	const limit, keys = 8, 64
	table := newTable(limit, time.Nanosecond, nil)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for range 5000 {
				m := table.Pin(1 + r.IntN(keys))
				if n := table.Len(); n > limit {
					t.Errorf("%d members", n)
				}
				table.Unpin(m)
				table.Do(1+r.IntN(keys), func(c **counted) { (*c).uses++ })
			}
		})
	}
	wg.Wait()
	total := table.Overflow().Value.uses
	for m := range table.Each(table.Locked(func() {})) {
		total += m.Value.uses
	}
	require.LessOrEqual(t, total, 20000)
}
