package bulkhead

import "sync/atomic"

// slots is the state of a bulkhead in one word:
//
//	bits 63-32  calls admitted, until fold takes them away
//	bit  31     a call waits
//	bits 30-0   free slots, plus bias
//
// The word holds the free slots and not those in flight, so that a change of the limit
// is one step, too. After the limit has shrunk, their number may be negative.
//
// While no call waits, every goroutine may change the word with a compare-and-swap.
// While one does, only the holder of the bulkhead's mutex may.
type slots struct{ word atomic.Uint64 }

const (
	maxLimit = 1<<30 - 1

	bias     = 1 << 30
	freeMask = 1<<31 - 1
	waiting  = 1 << 31
	admitted = 1 << 32
	foldAt   = 1 << 63
)

func freeIn(word uint64) int { return int(word&freeMask) - bias }

// takeOne takes a slot if one is free, no call waits and the word does not change meanwhile.
func (s *slots) takeOne() bool {
	word := s.word.Load()
	return word&(foldAt|waiting) == 0 && freeIn(word) > 0 && s.word.CompareAndSwap(word, word-1+admitted)
}

// take takes n slots if no call waits and at least kept slots stay free. It returns the
// word that it decided by.
func (s *slots) take(n, kept int) (word uint64, ok bool) {
	for {
		word = s.word.Load()
		if word&waiting != 0 || freeIn(word)-kept < n {
			return word, false
		}
		if s.word.CompareAndSwap(word, word-uint64(n)+admitted) {
			return word, true
		}
	}
}

// give gives n slots back, unless a call waits for them.
func (s *slots) give(n int) bool {
	for {
		word := s.word.Load()
		if word&waiting != 0 {
			return false
		}
		if s.word.CompareAndSwap(word, word+uint64(n)) {
			return true
		}
	}
}

// add changes the number of free slots by n, which may be negative.
func (s *slots) add(n int) { s.word.Add(uint64(n)) }

// fold returns the calls admitted that the word has counted, and forgets them.
func (s *slots) fold() int64 {
	for {
		word := s.word.Load()
		if s.word.CompareAndSwap(word, word%admitted) {
			return int64(word / admitted)
		}
	}
}
