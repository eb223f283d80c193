package bulkhead

import (
	"math"
	"time"
)

// A pace is how fast the slots of a standing queue are handed on. It is forgotten when
// the queue is empty, since it says nothing about the next queue.
//
// The slots are timed in batches, and the faster of the last two batches counts, so
// that a single pause does not make the queue look slow.
type pace struct {
	slots  int              // handed on in this batch
	since  time.Duration    // when this batch began
	recent [2]time.Duration // a slot's time in the last two batches; 0: not known yet
}

const paceBatch = 8

func (p *pace) restart(now time.Duration) { *p = pace{since: now} }

// handed records that n slots were handed on.
func (p *pace) handed(n int, now time.Duration) {
	p.slots += n
	if p.slots >= paceBatch {
		p.recent[0], p.recent[1] = p.recent[1], (now-p.since)/time.Duration(p.slots)
		p.slots, p.since = 0, now
	}
}

// least returns the shortest time that n slots may take to be handed on: the mean less
// two standard deviations, if they become free at random. It is 0 until the pace is
// known.
func (p *pace) least(n int) time.Duration {
	n = max(n, 4) // fewer may all be free at once
	count := float64(n) - 2*math.Sqrt(float64(n))
	return time.Duration(count * float64(min(p.recent[0], p.recent[1])))
}
