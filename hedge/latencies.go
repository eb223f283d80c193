package hedge

import (
	"math"
	"slices"
	"sync"
	"time"
)

// latencies remembers how long the last 1000 calls took.
type latencies struct {
	mu     sync.Mutex
	ring   []time.Duration // in the order of arrival
	next   int             // the index in ring of the oldest
	sorted []time.Duration // the same
}

const (
	mostLatencies  = 1000
	leastLatencies = 20 // fewer say little
)

// quantile returns the time within which the fraction q, in (0, 1], of the calls ended. ok
// is false before 20 calls have succeeded.
func (l *latencies) quantile(q float64) (d time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.sorted) < leastLatencies {
		return 0, false
	}
	return l.sorted[int(math.Ceil(q*float64(len(l.sorted))))-1], true
}

func (l *latencies) observe(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ring) < mostLatencies {
		l.ring = append(l.ring, d)
	} else {
		i, _ := slices.BinarySearch(l.sorted, l.ring[l.next])
		l.sorted = slices.Delete(l.sorted, i, i+1)
		l.ring[l.next] = d
		l.next = (l.next + 1) % mostLatencies
	}
	i, _ := slices.BinarySearch(l.sorted, d)
	l.sorted = slices.Insert(l.sorted, i, d)
}
