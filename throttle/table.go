package throttle

import "math/bits"

// A table is a hash table of what keys have spent, with open addressing, linear
// probing and 3/4 of its slots in use at most: 53 to 80 bytes a key for keys that
// are strings.
type table[K comparable] struct {
	slots []slot[K]
	used  int
	hand  int // where sweep goes on
}

type slot[K comparable] struct {
	key     K
	tat     int64
	spent   int64 // tokens
	refused uint32
	tag     uint32 // 31 bits of the hash, shifted left; 0 in a slot that is free
}

// apart is set in the tag of a key whose limit is a Limiter of its own.
const apart = 1

func tagOf(hash uint64) uint32 { return max(uint32(hash>>32)&^apart, 2) }

// home returns where the search for a tag begins.
func (t *table[K]) home(tag uint32) int {
	hi, _ := bits.Mul64(uint64(tag)<<32, uint64(len(t.slots)))
	return int(hi)
}

func (t *table[K]) next(i int) int {
	if i++; i < len(t.slots) {
		return i
	}
	return 0
}

// find returns the slot of key, or nil.
func (t *table[K]) find(tag uint32, key K) *slot[K] {
	if t.used == 0 {
		return nil
	}
	for i := t.home(tag); ; i = t.next(i) {
		s := &t.slots[i]
		if s.tag == 0 {
			return nil
		}
		if s.tag&^apart == tag && s.key == key {
			return s
		}
	}
}

// insert adds a key that is not there and returns its slot, which is valid until
// the next change.
func (t *table[K]) insert(tag uint32, key K) *slot[K] {
	if 4*(t.used+1) > 3*len(t.slots) {
		t.grow()
	}
	t.used++
	s := t.free(tag)
	s.key, s.tag = key, tag
	return s
}

func (t *table[K]) free(tag uint32) *slot[K] {
	i := t.home(tag &^ apart)
	for t.slots[i].tag != 0 {
		i = t.next(i)
	}
	return &t.slots[i]
}

func (t *table[K]) grow() {
	old := t.slots
	t.slots = make([]slot[K], max(8, len(old)+len(old)/2))
	t.hand = 0
	for i := range old {
		if old[i].tag != 0 {
			*t.free(old[i].tag) = old[i]
		}
	}
}

// sweep looks at the next n slots and drops the keys for which idle says so.
func (t *table[K]) sweep(n int, idle func(*slot[K]) bool) {
	for range min(n, len(t.slots)) {
		// What follows a dropped key may have moved into its slot.
		for s := &t.slots[t.hand]; s.tag != 0 && s.tag&apart == 0 && idle(s); {
			t.drop(t.hand)
		}
		t.hand = t.next(t.hand)
	}
}

// drop frees slot i and moves those behind it up, so that no search ends early.
func (t *table[K]) drop(i int) {
	t.used--
	for j := t.next(i); t.slots[j].tag != 0; j = t.next(j) {
		home := t.home(t.slots[j].tag &^ apart)
		// It may move to i unless its home lies after i, on the way to j.
		if i <= j && (home <= i || home > j) || i > j && home <= i && home > j {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = slot[K]{}
}
