package throttle

import (
	"math/bits"

	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

// A table is a hash table of the keys of a shard, with open addressing, linear probing
// and at most 3/4 of its slots in use. A slot of a string key is 40 bytes: the
// fields that a call seldom needs are in rest. docs/decisions/keyed-table.md says
// why it is not a map.
type table[K comparable] struct {
	slots []slot[K]
	rest  []rest // by the index of the slot
	used  int
	each  int      // windows of a key
	spent []window // each of them by the index of the slot
	hand  int      // the slot at which the next sweep begins
}

type slot[K comparable] struct {
	key   K
	tat   bucket.Time
	spent uint32 // tokens: the low half
	tag   uint32 // 31 bits of the hash, shifted left by one, and the bit apart; 0 in a free slot
}

type rest struct {
	spent   int32 // the high half
	refused uint32
}

// apart is set in the tag of a key that has an own limit.
const apart = 1

func tagOf(hash uint64) uint32 { return max(uint32(hash>>32)&^apart, 2) }

// home returns the index at which the search for a tag begins.
func (t *table[K]) home(tag uint32) int {
	hi, _ := bits.Mul64(uint64(tag&^apart)<<32, uint64(len(t.slots)))
	return int(hi)
}

func (t *table[K]) next(i int) int {
	if i++; i < len(t.slots) {
		return i
	}
	return 0
}

// find returns the index of key's slot, or -1.
func (t *table[K]) find(tag uint32, key K) int {
	if len(t.slots) == 0 {
		return -1
	}
	for i := t.home(tag); ; i = t.next(i) {
		s := &t.slots[i]
		if s.tag == 0 {
			return -1
		}
		if s.tag&^apart == tag && s.key == key {
			return i
		}
	}
}

// insert adds a key that is not in the table, and returns the index of its slot. The
// index is valid until the next insert or sweep.
func (t *table[K]) insert(tag uint32, key K) int {
	if 4*(t.used+1) > 3*len(t.slots) {
		t.grow()
	}
	t.used++
	return t.put(slot[K]{key: key, tag: tag}, rest{}, nil)
}

func (t *table[K]) put(s slot[K], r rest, windows []window) int {
	i := t.home(s.tag)
	for t.slots[i].tag != 0 {
		i = t.next(i)
	}
	t.slots[i], t.rest[i] = s, r
	copy(t.windows(i), windows)
	return i
}

// windows returns what the key of a slot has spent of each quota.
func (t *table[K]) windows(i int) []window { return t.spent[i*t.each : (i+1)*t.each] }

// convert changes the windows of all keys: from says which of its old ones each new one
// is, -1 for none.
func (t *table[K]) convert(from []int) {
	old := *t
	t.each, t.spent = len(from), make([]window, len(from)*len(t.slots))
	for i := range t.slots {
		copy(t.windows(i), pick(old.windows(i), from))
	}
}

func (t *table[K]) grow() {
	old := *t
	n := max(8, len(old.slots)+len(old.slots)/2)
	t.slots, t.rest, t.hand = make([]slot[K], n), make([]rest, n), 0
	t.spent = make([]window, n*t.each)
	for i, s := range old.slots {
		if s.tag != 0 {
			t.put(s, old.rest[i], old.windows(i))
		}
	}
}

// add adds to the tokens that the key of a slot has spent.
func (t *table[K]) add(i int, tokens int64) {
	sum := int64(t.slots[i].spent) + tokens
	t.slots[i].spent = uint32(sum)
	if carry := int32(sum >> 32); carry != 0 {
		t.rest[i].spent += carry
	}
}

func (t *table[K]) tokens(i int) int64 {
	return int64(t.rest[i].spent)<<32 + int64(t.slots[i].spent)
}

// refuse adds to the refused calls of the key of a slot, up to the most it can count.
func (t *table[K]) refuse(i int, calls int64) {
	r := &t.rest[i]
	r.refused = uint32(min(int64(r.refused)+calls, 1<<32-1))
}

// sweep looks at the next n slots and drops the keys for which idle returns true.
func (t *table[K]) sweep(n int, idle func(i int) bool) {
	for range min(n, len(t.slots)) {
		// After a drop, another key may have moved into the slot.
		for s := &t.slots[t.hand]; s.tag != 0 && s.tag&apart == 0 && idle(t.hand); {
			t.drop(t.hand)
		}
		t.hand = t.next(t.hand)
	}
}

// drop frees slot i and moves the keys behind it up, so that no search ends early.
func (t *table[K]) drop(i int) {
	t.used--
	for j := t.next(i); t.slots[j].tag != 0; j = t.next(j) {
		// The key at j may move to i unless its home is between i and j.
		home := t.home(t.slots[j].tag)
		if i <= j && (home <= i || home > j) || i > j && home <= i && home > j {
			t.slots[i], t.rest[i] = t.slots[j], t.rest[j]
			copy(t.windows(i), t.windows(j))
			i = j
		}
	}
	t.slots[i], t.rest[i] = slot[K]{}, rest{}
	clear(t.windows(i))
}
